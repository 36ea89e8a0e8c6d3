"""What the leaders of several hosts tell each other in a collective, point to point over TCP.

Their first message in a call is a *header* of fixed length, which says what call this is. A leader reads the
data after a header only if it makes the same call, and awaits the headers of all other leaders of its place.
So ranks that make different calls find out, and no host goes on before all ranks of all hosts have come to
the call. The status store can therefore tell who is late.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

import torch

from device_comm.cpu.several_hosts.wires import Swap, Wire
from device_comm.health import ANNOUNCE_AFTER_S, GroupHealth, Operation
from shm_broadcast.errors import DisagreementError
from shm_broadcast.interruption import raised_by_handler

HEADER_BYTES: Final = 256
# In front of a header's text: a digest of the call.
_DIGEST_BYTES: Final = 16


@dataclasses.dataclass
class Call:
    """One collective: all its waits are one operation with one deadline.

    Attributes:
        operation: For the status store and for errors.
        end: When the deadline passes, by the monotonic clock.
        view: Text of the call, which the ranks compare and errors quote; complete before the first part of the call.
        is_told: Whether the leaders have been told of the call.
        begun: When this rank came to the call, by the monotonic clock.
        is_announced: Whether this rank has reported that to the status store.
    """

    operation: Operation
    end: float
    view: str = ""
    is_told: bool = False
    begun: float = dataclasses.field(default_factory=time.monotonic)
    is_announced: bool = False

    @functools.cached_property
    def digest(self) -> int:
        """Return a hash of the number, the name and the view, by which the ranks of a host compare the call."""
        found = hashlib.blake2b(f"{self.operation}, {self.view}".encode(), digest_size=8)
        return int.from_bytes(found.digest(), "little")

    def left_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(self.end - time.monotonic(), 0.0)

    def announce_in_time(self, health: GroupHealth) -> None:
        """Report to the status store once the call has taken long; before each of its waits.

        `GroupHealth.wait` measures one wait. A call may consist of many, each too short to be reported there.
        """
        is_due = not self.is_announced and time.monotonic() - self.begun >= ANNOUNCE_AFTER_S
        if is_due and self.operation.number:
            health.announce(self.operation)
            self.is_announced = True


class Leaders:
    """The leaders of all hosts, as one of them sees the others. Hosts are known by their index."""

    def __init__(
        self, health: GroupHealth, leaders: Mapping[int, int], own_host: int, wires: Mapping[int, Wire]
    ) -> None:
        """Own `wires`.

        Args:
            health: The group's shared state.
            leaders: The rank in the group of each leader, by host.
            own_host: The host of this rank.
            wires: A connection to each other leader, by host.
        """
        self._health = health
        self._ranks = {host: health.ranks[leader] for host, leader in leaders.items()}
        self._own_host = own_host
        self._wires = dict(wires)
        self._refused: dict[int, str] = {}
        self.others: list[int] = sorted(wires)
        health.on_abort(self.shut)

    def swap(
        self, call: Call, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> Swap:
        """Start to send to, and receive from, the hosts that are the keys. The tensors stay in use until `wait`.

        Raises:
            As `GroupHealth.explain`.
        """
        header = None if call.is_told else _header_of(call, self._health.name)
        call.is_told = True
        for host in self.others:
            wire = self._wires[host]
            if header is not None:
                wire.send(memoryview(header))
                check = partial(self._compare, host, header)
                wire.receive(memoryview(bytearray(HEADER_BYTES)), check=check)
            if (own := sends.get(host)) is not None and own.numel():
                wire.send(_memory_of(own), own)
            if (theirs := receives.get(host)) is not None and theirs.numel():
                wire.receive(_memory_of(theirs), theirs)
        swap = Swap(self._wires.values(), is_reported=call.operation.number != 0)
        try:
            swap.begin()
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            raise self._health.explain(call.operation, error, swap.pending()) from error
        return swap

    def wait(self, call: Call, swap: Swap) -> None:
        """Wait until `swap` is complete.

        Raises:
            DisagreementError: Another host makes another call; the group is broken then.
            Others: As `GroupHealth.wait`.
        """
        call.announce_in_time(self._health)
        self._health.wait(call.operation, swap, call.left_s())
        if swap.is_refused:
            raise self._disagreement(call)

    def _compare(self, host: int, own: bytes, theirs: bytes) -> bool:
        is_same = own[:_DIGEST_BYTES] == theirs[:_DIGEST_BYTES]
        if not is_same:
            self._refused = {self._own_host: _view_in(own), host: _view_in(theirs)}
        return is_same

    def _disagreement(self, call: Call) -> DisagreementError:
        """Break the group, and return the error to raise."""
        views = {self._ranks[host]: view for host, view in self._refused.items()}
        text = "; ".join(f"rank {rank}: {view}" for rank, view in sorted(views.items()))
        error = DisagreementError(
            f"{self._health.where(call.operation)}: the hosts made different calls: {text}; "
            "the group is now unusable, destroy it",
            views=views,
        )
        # What the other ranks of this host have begun cannot be undone.
        self._health.fail(error)
        return error

    def shut(self) -> None:
        """End all connections, so that calls that wait on them fail, here and on the other hosts. Idempotent."""
        for wire in self._wires.values():
            wire.shut()

    def close(self) -> None:
        """End all connections and release them. Idempotent."""
        for wire in self._wires.values():
            wire.close()


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor as bytes; it does not keep the tensor."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _header_of(call: Call, name: str) -> bytes:
    # The group's name ends with the epoch, so a leader of another epoch finds a different header. The call's
    # number exposes a rank that has refused a call, or made one without elements, where the others did not.
    view = f"{call.operation} in {name!r}, {call.view}".encode()
    digest = hashlib.blake2b(view, digest_size=_DIGEST_BYTES).digest()
    return (digest + view)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")


def _view_in(header: bytes) -> str:
    return header[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")


__all__ = ["HEADER_BYTES", "Call", "Leaders"]
