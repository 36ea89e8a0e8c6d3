"""The shared memory of ranks on one host, a group or a part of one: how it is made, how a call on it is waited for."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final

import msgspec

from device_comm import _core
from device_comm.cpu.channels import Channels, room_bytes
from device_comm.health import GroupHealth, Operation
from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    DisagreementError,
    UsageError,
)
from shm_broadcast.liveness import this_process
from shm_broadcast.segment import Handover, Segment, take_over

# Each rank has two slots of this size; longer data passes through them in pieces. Both fit the second-level cache of a
# core, so that the pieces are read before they reach memory.
SLOT_BYTES: Final = 256 << 10

# The slots of the host plane carry barriers, and objects of some KB.
HOST_SLOT_BYTES: Final = 16 << 10

_KEY_BYTES: Final = 32

_OPERATIONS: Final = ("SUM", "MEAN", "PRODUCT", "MIN", "MAX")
_KINDS: Final = (
    *("barrier", "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather"),
    *("scatter", "all_to_all", "reduce"),
)
_REDUCING: Final = frozenset({"all_reduce", "reduce_scatter", "reduce"})
_ROOTED: Final = frozenset({"broadcast", "gather", "scatter", "reduce"})


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """What each rank says first: where it is; and rank 0 how to get its segment, or why there is none."""

    host_id: str
    address: str = ""
    key: bytes = b""
    generation: int = 0
    failure: str = ""


_offer_decoder: Final = msgspec.msgpack.Decoder(_Offer)

# Returns every rank's bytes in rank order; the lengths may differ. Collective.
Exchange = Callable[[bytes], Sequence[bytes | memoryview]]


class RegionCalls:
    """One rank's end of the shared memory of its group, or of those of its ranks that are on one host."""

    def __init__(
        self, plane: str, core: _core.SharedRegion, health: GroupHealth, ranks: Sequence[int] | None = None
    ) -> None:
        """Use `connect` or `connect_part`.

        Args:
            plane: The plane under which calls are looked up in the group's status store.
            core: This rank's end.
            health: The group's shared state.
            ranks: Global ranks that share the memory, ascending in the group; None for all of the group.
        """
        self.core = core
        self._plane = plane
        self._health = health
        self._ranks = health.ranks if ranks is None else tuple(ranks)
        health.on_abort(self.close)

    def close(self) -> None:
        """Leave the region. Idempotent; calls that wait, here and elsewhere for this rank, end."""
        self.core.close(self._health.is_broken)

    def all_gather_bytes(self, name: str, own: bytes, timeout_s: float) -> memoryview:
        """Return every rank's bytes one after the other; all ranks bring the same number."""
        widths = (len(own),) * len(self._ranks)
        result = bytearray(sum(widths))
        # These have addresses, and live until the call is done.
        source = (ctypes.c_char * len(own)).from_buffer_copy(own)
        target = (ctypes.c_char * len(result)).from_buffer(result)
        addresses = (ctypes.addressof(source), ctypes.addressof(target))
        status = self.core.move(_core.ALL_GATHER, *addresses, 1, widths, 0, 0, 0)
        self.finish(name, status, timeout_s)
        return memoryview(result)

    def finish(self, name: str, status: int, timeout_s: float, whole: Operation | None = None) -> None:
        """Wait for the call that `core` has begun, or raise the error of a call that could not begin.

        Args:
            name: The operation.
            status: What `core` returned.
            timeout_s: Deadline in seconds.
            whole: The operation of which this call is one part, if ranks on other hosts take part in it. A rank that
                is awaited here may then itself wait for one of those, so only the status store can tell who is missing.

        Raises:
            DisagreementError: The ranks made different calls. Nothing was moved and the group is intact.
            UsageError: Another thread is in a call.
            Others: As `GroupHealth.wait`.
        """
        if status in (_core.PENDING, _core.LEFT):
            operation = whole or Operation(self._plane, name, self.core.number)
            self._health.wait(operation, _PendingCall(self, name, is_part=whole is not None), timeout_s)
            return
        self.settle(name, status)

    def settle(self, name: str, status: int) -> None:
        """Raise unless `status` says that the call is done."""
        if status == _core.DONE:
            return
        if status == _core.DISAGREE:
            raise DisagreementError(
                f"{self._health.where(name)}: the ranks made different calls: {self._views()}"
            )
        self._health.check_usable(name)
        if status == _core.BUSY:
            raise UsageError(f"{self._health.where(name)}: another thread of this rank is in a collective")
        raise ClosedError(f"{self._health.where(name)}: the group was destroyed while the call waited")

    def _views(self) -> str:
        views = zip(self._ranks, self.core.views(), self.core.widths(), strict=True)
        return "; ".join(f"rank {rank}: {_describe(*view, widths)}" for rank, view, widths in views)

    def missing(self) -> list[int]:
        """Return the global ranks that have not come to the present step."""
        return [self._ranks[rank] for rank in self.core.missing()]


class SharedMemory:
    """What the ranks of a group share on one host; nothing in it disturbs the others.

    Attributes:
        device: For the collectives on CPU tensors.
        host: For barriers and gathered objects.
        channels: From each rank to each other.
    """

    def __init__(self, segment: Segment, rank_in_group: int, health: GroupHealth) -> None:
        """Use `connect`."""
        self._segment = segment
        memory = memoryview(segment.memory)
        middle, behind, _ = _layout(len(health.ranks))
        self.device: RegionCalls = RegionCalls(
            "shared", _core.SharedRegion(memory[:middle], rank_in_group), health
        )
        self.host: RegionCalls = RegionCalls(
            "shared host", _core.SharedRegion(memory[middle:behind], rank_in_group), health
        )
        self.channels: Channels = Channels(segment, memory[behind:], segment.nbytes, health, rank_in_group)
        health.on_abort(self.channels.close)

    def close(self, timeout_s: float = 1.0) -> None:
        """Let the memory go, within about `timeout_s`. Idempotent; calls that wait in other threads end."""
        self.device.close()
        self.host.close()
        self.channels.close()
        self.channels.end_threads(timeout_s)
        self._segment.close()


class _PendingCall:
    """A call under way; see `Pollable`."""

    def __init__(self, region: RegionCalls, name: str, *, is_part: bool) -> None:
        self._region = region
        self._name = name
        self._is_part = is_part

    def poll(self, slice_s: float) -> bool:
        status = self._region.core.resume(max(int(slice_s * 1e9), 0))
        if status == _core.PENDING:
            return False
        if status == _core.LEFT:
            # The status store knows why; see `GroupHealth.explain`.
            raise RuntimeError("a rank has left the group")
        self._region.settle(self._name, status)
        return True

    def pending(self) -> list[int] | None:
        return None if self._is_part else self._region.missing()


def _describe(
    number: int, code: int, count: int, detail: int, widths: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> str:
    """Return what a rank said about its call, for people."""
    kind = code & 0xFF
    name = _KINDS[kind] if kind < len(_KINDS) else f"call {kind}"
    parts = [f"{name} #{number}"]
    dtype = code >> 8 & 0xFF
    if widths is not None:
        sent, expected = (" + ".join(str(count * width) for width in each) for each in widths)
        parts.append(
            f"sends {sent} bytes and expects {expected} bytes, {_core.TYPE_NAMES.get(dtype, f'dtype {dtype}')}"
        )
        if count != 1:
            parts.append(f"in {count} rows")
    elif name != "barrier":
        parts.append(f"{count} {'elements' if name in _REDUCING else 'bytes'}")
        parts.append(_core.TYPE_NAMES.get(dtype, f"dtype {dtype}"))
    if name in _REDUCING:
        operation = code >> 16 & 0xFF
        parts.append(_OPERATIONS[operation] if operation < len(_OPERATIONS) else f"reduction {operation}")
    if name in _ROOTED:
        parts.append(f"root {code >> 24}")
    if detail:
        parts.append(f"layout {detail & 0xFFFF:04x}")
    return ", ".join(parts)


class Preparation:
    """What a rank does for shared memory before it meets the other ranks: the first rank makes it and offers it.

    The memory then exists when the ranks meet, and they need no second exchange.
    """

    def __init__(self, world_size: int, rank: int, rank_in_group: int | None = None) -> None:
        """Make the memory on the first rank. If that fails, the offer says why.

        Args:
            world_size: How many ranks share it.
            rank: This rank's position among them.
            rank_in_group: Its rank in the group, if only a part of the group shares it.
        """
        self._world_size = world_size
        self._rank = rank
        self._rank_in_group = rank if rank_in_group is None else rank_in_group
        self._handover: Handover | None = None
        self._segment: Segment | None = None
        self.offer: Final = b"" if rank else msgspec.msgpack.encode(self._make())

    def _make(self) -> _Offer:
        """Make the memory; return what the other ranks need to map it."""
        world_size = self._world_size
        if world_size == 1:
            return _Offer(host_id())
        middle, behind, nbytes = _layout(world_size)
        try:
            segment = Segment.create(nbytes, room_bytes(world_size))
        except CapabilityError as error:
            return _Offer(host_id(), failure=str(error))
        generation = int.from_bytes(os.urandom(7))
        with memoryview(segment.memory) as memory:
            _core.lay_out(memory[:middle], world_size, SLOT_BYTES, generation)
            _core.lay_out(memory[middle:behind], world_size, HOST_SLOT_BYTES, generation)
        key, others = os.urandom(_KEY_BYTES), set(range(1, world_size))
        try:
            # The pidfds that come are not needed: the group watches its ranks' processes already.
            handover = Handover(segment, key, others, lambda _hello, descriptor: os.close(descriptor))
        except BaseException:
            segment.close()
            raise
        self._handover, self._segment = handover, segment
        return _Offer(host_id(), handover.address, key, generation)

    def map(self, health: GroupHealth, offer: bytes, timeout_s: float) -> SharedMemory:
        """Map what the first rank offers. The others may still fail to.

        Args:
            health: The group's shared state.
            offer: The first rank's.
            timeout_s: Deadline in seconds.

        Raises:
            CapabilityError: The first rank lacks the memory, or this one could not map it.
        """
        failure = self.take(offer, timeout_s)
        segment = self.release()
        if segment is None:
            raise _no_memory(health, failure)
        return SharedMemory(segment, self._rank, health)

    def take(self, offer: bytes, timeout_s: float) -> str:
        """Map what the first rank offers, unless this rank has made it; return why that failed, or ""."""
        offered = _offer_decoder.decode(offer)
        if offered.failure or self._segment is not None:
            return offered.failure
        nbytes, room = _layout(self._world_size)[2], room_bytes(self._world_size)
        try:
            self._segment, _, descriptor = take_over(
                offered.address, offered.key, self._rank, nbytes, timeout_s, room
            )
        except CommError as error:
            return f"rank {self._rank_in_group} of the group: {error}"
        os.close(descriptor)
        return ""

    def release(self) -> Segment | None:
        """Return the segment, which is the caller's from now on; None if this rank has none."""
        segment, self._segment = self._segment, None
        return segment

    def close(self) -> None:
        """End the offer, and drop a segment that was not released. Idempotent."""
        if self._handover is not None:
            self._handover.close()
        if self._segment is not None:
            self._segment.close()


class SharedPart:
    """What those ranks of a group share that are on one host.

    Attributes:
        device: For their part of the collectives on CPU tensors.
    """

    def __init__(self, segment: Segment, members: Sequence[int], index: int, health: GroupHealth) -> None:
        """Use `connect_part`."""
        self._segment = segment
        memory = memoryview(segment.memory)[: _layout(len(members))[0]]
        ranks = [health.ranks[member] for member in members]
        self.device: RegionCalls = RegionCalls("device", _core.SharedRegion(memory, index), health, ranks)

    def close(self) -> None:
        """Let the memory go. Idempotent; calls that wait in other threads end."""
        self.device.close()
        self._segment.close()


def connect_part(
    health: GroupHealth, rank_in_group: int, members: Sequence[int], timeout_s: float, exchange: Exchange
) -> SharedPart | None:
    """Return what `members` share, the ranks in the group that are on this host; None if that is this rank alone.

    Collective over the whole group, each host with its own `members`, ascending.

    Raises:
        CapabilityError: On some host the memory could not be made or mapped; on every rank of the group.
    """
    index = members.index(rank_in_group)
    with closing(Preparation(len(members), index, rank_in_group)) as preparation:
        offers = exchange(preparation.offer)
        failure = preparation.take(bytes(offers[members[0]]), timeout_s) if len(members) > 1 else ""
        failures = [str(each, "utf-8", "replace") for each in exchange(failure.encode())]
        reasons = "; ".join(dict.fromkeys(reason for reason in failures if reason))
        if reasons:
            raise _no_memory(health, reasons)
        segment = preparation.release()
    return None if segment is None else SharedPart(segment, members, index, health)


def _no_memory(health: GroupHealth, reasons: str) -> CapabilityError:
    return CapabilityError(f"{health.where('create shared memory')}: {reasons}", requirement="shared memory")


def host_id() -> str:
    """Return a name of this host as far as an abstract socket reaches."""
    own = this_process()
    return hashlib.sha256(f"{own.boot_id} {own.network_namespace}".encode()).hexdigest()


def _layout(world_size: int) -> tuple[int, int, int]:
    """Return where the region of the host plane begins, where the table of channels does, and where that ends."""
    middle = _core.segment_bytes(world_size, SLOT_BYTES)
    behind = middle + _core.segment_bytes(world_size, HOST_SLOT_BYTES)
    end = behind + _core.channel_table_bytes(world_size)
    return middle, behind, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
