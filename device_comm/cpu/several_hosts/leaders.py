"""What the leaders of several hosts tell each other in a collective, point to point over Gloo.

Their first message in a call is a *frame* of fixed length: what call this is, and the data if that is short. So ranks
that make different calls find out, where Gloo would end a process that gets more bytes than it expects; and no host
goes on before all ranks of all hosts have come to the call, so that the status store can tell who is late.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeGuard

import torch
import torch.distributed as dist

from device_comm.health import GroupHealth, Operation
from device_comm.process_group import COLLECTIVE_TAG, as_bytes
from device_comm.works import PointToPointWorks, WaiterThreads
from shm_broadcast.errors import DisagreementError
from shm_broadcast.interruption import raised_by_handler

FRAME_BYTES: Final = 4096
# In front of a frame's data: a digest of the call, and as much of its text as there is room for.
_DIGEST_BYTES: Final = 16
_HEADER_BYTES: Final = 256

# What can be in flight to or from one leader: bytes to send, bytes to receive.
_Pair = tuple[torch.Tensor | None, torch.Tensor | None]
_Frames = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass
class Call:
    """One collective: all its waits are one operation with one deadline.

    Attributes:
        operation: For the status store and for errors.
        upward: What connects the leaders, for what a host sends to a later one.
        downward: For what a host sends to an earlier one: over one connection, Gloo moves large data in one direction
            at a time. At 1 Gbit/s 16 MiB in each took 255 ms, and take 142 over two connections, the rate of the line.
        end: When the deadline passes, by the monotonic clock.
        view: Text of the call, which the leaders compare and errors quote.
        is_agreed: Whether the comparison succeeded.
    """

    operation: Operation
    upward: dist.ProcessGroup
    downward: dist.ProcessGroup
    end: float
    view: str = ""
    is_agreed: bool = False

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(self.end - time.monotonic(), 0.0)


class Leaders:
    """The leaders of all hosts, as one of them sees the others. Hosts are known by their index."""

    def __init__(
        self, health: GroupHealth, threads: WaiterThreads, leaders: Sequence[int], own_host: int
    ) -> None:
        """Start nothing yet.

        Args:
            health: The group's shared state.
            threads: Where to wait for what is in flight.
            leaders: Of each host, its rank in the group.
            own_host: The host of this rank.
        """
        self._health = health
        self._threads = threads
        self._leaders = list(leaders)
        self._own_host = own_host
        self.others: list[int] = [host for host in range(len(leaders)) if host != own_host]

    def swap(
        self, call: Call, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Swap:
        """Start to send to, and receive from, the hosts that are the keys. Waits for the first frames of a call.

        Raises:
            DisagreementError: Another host makes another call; the group is broken then.
            Others: As `GroupHealth.wait`.
        """
        pairs: dict[int, _Pair] = {
            host: (_bytes_of(sends.get(host)), _bytes_of(receives.get(host))) for host in self.others
        }
        if not call.is_agreed:
            pairs = self._swap_frames(call, pairs)
            call.is_agreed = True
        return self._post(call, pairs)

    def wait(self, call: Call, swap: Swap) -> None:
        """Wait until `swap` is complete. Raises as `GroupHealth.wait`."""
        self._health.wait(call.operation, swap, call.left_s())

    def _swap_frames(self, call: Call, pairs: Mapping[int, _Pair]) -> dict[int, _Pair]:
        """Compare the call and move what is short; return what is left to be moved."""
        header = _header_of(call, self._health.name)
        frames: dict[int, _Frames] = {}
        for host, (own, _) in pairs.items():
            frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
            frame[:_HEADER_BYTES] = header
            if _is_short(own):
                frame[_HEADER_BYTES : _HEADER_BYTES + own.numel()] = own
            frames[host] = (frame, torch.empty_like(frame))
        self.wait(call, self._post(call, frames))
        left: dict[int, _Pair] = {}
        for host, (_, frame) in frames.items():
            self._compare(call, host, header, frame[:_HEADER_BYTES])
            sent, received = pairs[host]
            if _is_short(received):
                # Outside of that mode torch refuses to write into tensors that were made in it.
                with torch.inference_mode():
                    received.copy_(frame[_HEADER_BYTES : _HEADER_BYTES + received.numel()])
            left[host] = (None if _is_short(sent) else sent, None if _is_short(received) else received)
        return left

    def _compare(self, call: Call, host: int, own: torch.Tensor, theirs: torch.Tensor) -> None:
        if torch.equal(own[:_DIGEST_BYTES], theirs[:_DIGEST_BYTES]):
            return
        ranks = self._health.ranks
        views = {
            ranks[self._leaders[at]]: _view_in(each) for at, each in ((self._own_host, own), (host, theirs))
        }
        text = "; ".join(f"rank {rank}: {view}" for rank, view in sorted(views.items()))
        error = DisagreementError(
            f"{self._health.where(call.operation)}: the hosts made different calls: {text}; "
            "the group is now unusable, destroy it",
            views=views,
        )
        # What the other ranks of this host have begun cannot be undone.
        self._health.fail(error)
        raise error

    def _post(self, call: Call, pairs: Mapping[int, _Pair] | Mapping[int, _Frames]) -> Swap:
        works: dict[int, PointToPointWorks] = {}
        for host, (sent, received) in pairs.items():
            peer = self._leaders[host]
            rank = self._health.ranks[peer]
            posted: list[tuple[int, dist.Work]] = []
            try:
                if sent is not None:
                    there = call.upward if self._own_host < host else call.downward
                    posted.append((rank, there.send([sent], peer, COLLECTIVE_TAG)))
                if received is not None:
                    back = call.downward if self._own_host < host else call.upward
                    posted.append((rank, back.recv([received], peer, COLLECTIVE_TAG)))
            except RuntimeError as error:
                if raised_by_handler(error):
                    raise
                raise self._health.explain(call.operation, error, (rank,)) from error
            if posted:
                works[rank] = PointToPointWorks(self._threads, posted, (sent, received))
        return Swap(works)


class Swap:
    """What is in flight between this leader and others; see `Pollable`."""

    def __init__(self, works: Mapping[int, PointToPointWorks]) -> None:
        """Take over what goes to and comes from each leader, by global rank."""
        self._open = dict(works)
        self._failed: tuple[int, ...] | None = None

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds."""
        end = time.monotonic() + slice_s
        while self._open:
            peer, works = next(iter(self._open.items()))
            if not self._try(peer, works, max(end - time.monotonic(), 0.0)):
                # A failure of any other one is to be seen as soon.
                for other, theirs in list(self._open.items())[1:]:
                    self._try(other, theirs, 0.0)
                return False
        return True

    def _try(self, peer: int, works: PointToPointWorks, slice_s: float) -> bool:
        try:
            done = works.poll(slice_s)
        except RuntimeError:
            self._failed = (peer,)
            raise
        if done:
            del self._open[peer]
        return done

    def pending(self) -> tuple[int, ...] | None:
        """Return the leader whose connection failed, or None: an awaited leader may itself be waiting."""
        return self._failed


def _bytes_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None or tensor.numel() == 0 else as_bytes(tensor)


def _is_short(data: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether there is data that goes with the frame."""
    return data is not None and data.numel() <= FRAME_BYTES - _HEADER_BYTES


def _header_of(call: Call, name: str) -> torch.Tensor:
    # The name ends with the epoch: a leader of another one is told so.
    view = f"{call.operation.name} in {name!r}, {call.view}".encode()
    digest = hashlib.blake2b(view, digest_size=_DIGEST_BYTES).digest()
    text = view[: _HEADER_BYTES - _DIGEST_BYTES]
    return torch.frombuffer(bytearray((digest + text).ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _view_in(header: torch.Tensor) -> str:
    return bytes(header[_DIGEST_BYTES:].tolist()).rstrip(b"\0").decode(errors="replace")


__all__ = ["FRAME_BYTES", "Call", "Leaders", "Swap"]
