"""The memory that ranks of one host share, all of a group or some of it: how it is made and mapped."""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from device_comm import _core
from device_comm.cpu.channels import Channels, room_bytes
from device_comm.cpu.region_calls import RegionCalls
from device_comm.cpu.status_board import StatusBoard
from device_comm.health import GroupHealth
from shm_broadcast.errors import (
    CapabilityError,
    CommError,
    CommTimeoutError,
    DecodeError,
    PeerLostError,
)
from shm_broadcast.interruption import raised_by_handler, tolerating
from shm_broadcast.liveness import this_process
from shm_broadcast.segment import Handover, Hello, Segment, take_descriptor
from shm_broadcast.status.kept_pages import KeptPages
from shm_broadcast.threads import Aside

# Each rank has two slots of this size; longer data passes through them in pieces. Together they fit the
# second-level cache of a core, so the data makes no trip to memory.
SLOT_BYTES: Final = 256 << 10

# The size of a rank's two slots in the host plane's region, which carries barriers and gathers objects of some KB.
HOST_SLOT_BYTES: Final = 16 << 10

_KEY_BYTES: Final = 32


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """How the other ranks get the segment of the first rank of a host, or why there is none.

    Attributes:
        address: Where the first rank hands the segment over.
        key: What a rank must know to get it.
        failure: Why there is no segment; empty if there is one.
    """

    address: str = ""
    key: bytes = b""
    failure: str = ""


_offer_decoder: Final = msgspec.msgpack.Decoder(_Offer)

# Returns every rank's bytes in rank order; the lengths may differ. Collective.
Exchange = Callable[[bytes], Sequence[bytes | memoryview]]


class SharedMemory:
    """The memory that the ranks of a group on one host share. Its parts may be in use at the same time.

    Attributes:
        board: Where the ranks report what the others must know if they fail or leave.
        device: Carries the collectives on CPU tensors.
        host: Carries barriers and gathers of objects.
        channels: Carry messages between two ranks, one channel for each direction.
    """

    def __init__(self, segment: Segment, rank_in_group: int, health: GroupHealth) -> None:
        """Use `Preparation.map`."""
        self._segment = segment
        memory = memoryview(segment.memory)
        at = _layout(len(health.ranks))
        self.board: StatusBoard = StatusBoard(memory[at.board : at.channels], health.ranks, health.rank)
        self.device: RegionCalls = RegionCalls(
            "shared", _core.SharedRegion(memory[: at.host], rank_in_group), health
        )
        self.host: RegionCalls = RegionCalls(
            "shared host", _core.SharedRegion(memory[at.host : at.board], rank_in_group), health
        )
        self.channels: Channels = Channels(
            segment, memory[at.channels :], segment.nbytes, health, rank_in_group
        )
        health.on_abort(self.channels.close)

    def populate(self) -> None:
        """Make the first calls as fast as later ones. Call it once all ranks have mapped the memory."""
        self._segment.populate()

    def close(self, timeout_s: float = 1.0) -> None:
        """Let the memory go, within about `timeout_s`. Idempotent; calls that wait in other threads end."""
        self.device.close()
        self.host.close()
        self.channels.close()
        self.channels.end_threads(timeout_s)
        self.board.close()
        self._segment.close()


class Preparation:
    """What a rank does for shared memory before it meets the other ranks: the first one makes it and offers it.

    Because the offer is ready before they meet, it travels with what they exchange then: no further exchange is needed.
    """

    def __init__(self, world_size: int, rank: int, rank_in_group: int | None = None) -> None:
        """Open nothing yet, so that `close` can be registered before `prepare`.

        Args:
            world_size: How many ranks share it.
            rank: This rank's position among them.
            rank_in_group: Its rank in the group, if only a part of the group shares it.
        """
        self._world_size = world_size
        self._rank = rank
        self._rank_in_group = rank if rank_in_group is None else rank_in_group
        self._aside = Aside()
        self._handover: Handover | None = None
        self._segment: Segment | None = None
        self._connection: socket.socket | None = None
        self.offer: bytes = b""

    def prepare(self) -> None:
        """On the first rank, make the memory. If that fails nothing is raised: the offer tells all ranks the reason.

        What a signal handler raises meanwhile arrives as it is.
        """
        if self._rank == 0 and self._world_size > 1:
            try:
                self._aside.run(self._make)
            except CapabilityError as error:  # no thread could be started
                if raised_by_handler(error):
                    raise
                self.offer = msgspec.msgpack.encode(_Offer(failure=str(error)))

    def _make(self) -> None:
        try:
            self._handover, self._segment, offer = _offer(self._world_size)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            offer = _Offer(failure=_reason(error))
        self.offer = msgspec.msgpack.encode(offer)

    def map(self, health: GroupHealth, offer: bytes, timeout_s: float) -> SharedMemory:
        """Map what the first rank offers. The others may still fail to.

        Args:
            health: The group's shared state.
            offer: The first rank's.
            timeout_s: Deadline in seconds.

        Raises:
            CapabilityError: The first rank lacks the memory, or this one could not map it.
            PeerLostError: The first rank hands nothing over any more; the group's health may know why.
            CommTimeoutError: The first rank did not answer in time.
        """
        try:
            segment = self._obtain(offer, timeout_s)
        except CapabilityError as error:
            raise _no_memory(health, str(error)) from error
        return SharedMemory(segment, self._rank, health)

    def take(self, offer: bytes, timeout_s: float) -> tuple[Segment | None, str]:
        """Return (the segment that the first rank offers, "") or (None, why not); the segment is the caller's."""
        try:
            return self._obtain(offer, timeout_s), ""
        except CapabilityError as error:
            return None, str(error)
        except CommError as error:
            return None, f"rank {self._rank_in_group} of the group: {error}"

    def _obtain(self, offer: bytes, timeout_s: float) -> Segment:
        """Return the segment that the first rank offers, which is the caller's.

        Raises: as `map`.
        """
        offered = _offer_decoder.decode(offer) if offer else _Offer()
        if offered.failure:
            raise CapabilityError(offered.failure, requirement="shared memory")
        if self._segment is None:
            try:
                self._aside.run(lambda: self._fetch(offered, timeout_s))
            except CapabilityError as error:
                text = f"rank {self._rank_in_group} of the group: {error}"
                raise CapabilityError(text, requirement="shared memory") from error
        segment, self._segment = self._segment, None
        assert segment is not None
        return segment

    def _fetch(self, offered: _Offer, timeout_s: float) -> None:
        def connecting(connection: socket.socket) -> None:
            self._connection = connection

        try:
            self._segment = _take(offered, self._rank, self._world_size, timeout_s, connecting)
        except (CapabilityError, CommTimeoutError, PeerLostError):
            raise
        except Exception as error:
            raise CapabilityError(_reason(error), requirement="shared memory") from error
        self._connection = None

    def _hang_up(self) -> None:
        """End the wait for the first rank's answer."""
        connection = self._connection
        if connection is not None:
            with tolerating(OSError):  # not connected, or closed already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        """Hand nothing over any more, and drop what nobody has mapped. Idempotent."""
        self._aside.settle(self._hang_up)
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.close()
        segment, self._segment = self._segment, None
        _drop(segment)


def host_ids(exchange: Exchange) -> list[str]:
    """Return where each rank of the group is, in rank order. Collective."""
    return [str(name, "utf-8") for name in exchange(host_id().encode())]


class SharedPart:
    """What those ranks of a group share that are on one host.

    Attributes:
        device: For their part of the collectives on CPU tensors.
    """

    def __init__(self, segment: Segment, members: Sequence[int], index: int, health: GroupHealth) -> None:
        """Use `connect_part`."""
        self._segment = segment
        memory = memoryview(segment.memory)[: _layout(len(members)).host]
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
    preparation, segment, failure = Preparation(len(members), index, rank_in_group), None, ""
    try:
        preparation.prepare()
        offers = exchange(preparation.offer)
        if len(members) > 1:
            segment, failure = preparation.take(bytes(offers[members[0]]), timeout_s)
        failures = [str(each, "utf-8", "replace") for each in exchange(failure.encode())]
    except BaseException:
        _drop(segment)
        raise
    finally:
        preparation.close()
    reasons = "; ".join(dict.fromkeys(reason for reason in failures if reason))
    if reasons:
        _drop(segment)
        raise _no_memory(health, reasons)
    if segment is None:
        return None
    segment.populate()
    return SharedPart(segment, members, index, health)


def _no_memory(health: GroupHealth, reasons: str) -> CapabilityError:
    return CapabilityError(f"{health.where('create shared memory')}: {reasons}", requirement="shared memory")


def _drop(segment: Segment | None) -> None:
    if segment is not None:
        segment.close()


def host_id() -> str:
    """Return a name of this host as far as an abstract socket reaches."""
    own = this_process()
    return hashlib.sha256(f"{own.boot_id} {own.network_namespace}".encode()).hexdigest()[:32]


class _Layout(NamedTuple):
    """Where the parts of the memory begin; the region of the device plane begins at 0. All are whole pages."""

    host: int
    board: int
    channels: int
    end: int


def _layout(world_size: int) -> _Layout:
    host = _core.segment_bytes(world_size, SLOT_BYTES)
    board = host + _core.segment_bytes(world_size, HOST_SLOT_BYTES)
    channels = board + _core.board_bytes(world_size)
    end = channels + _core.channel_table_bytes(world_size)
    return _Layout(host, board, channels, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)


def _parts(world_size: int, rank: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of what a rank reserves: its slots, and on the first rank also what is nobody's slot.

    A rank writes its slots in each call. As it reserves them itself, they lie on its NUMA node.
    """
    at = _layout(world_size)
    parts, start = [], 0
    for end, slot_bytes in ((at.host, SLOT_BYTES), (at.board, HOST_SLOT_BYTES)):
        slots = end - 2 * slot_bytes * world_size
        parts.append((slots + 2 * slot_bytes * rank, 2 * slot_bytes))
        if rank == 0:
            parts.append((start, slots - start))
        start = end
    return [*parts, (at.board, at.end - at.board)] if rank == 0 else parts


def _reason(error: Exception) -> str:
    """Return why the memory could not be made or mapped; an error that is not ours gets its type as well."""
    return str(error) if isinstance(error, CommError) else f"{type(error).__name__}: {error}"


def _offer(world_size: int) -> tuple[Handover, Segment, _Offer]:
    at = _layout(world_size)
    segment = Segment.create(at.end, room_bytes(world_size), _parts(world_size, 0))
    generation = int.from_bytes(os.urandom(7))
    key = os.urandom(_KEY_BYTES)

    def joined(_hello: Hello, descriptor: int) -> None:
        # The group watches its ranks' processes already.
        os.close(descriptor)

    try:
        with memoryview(segment.memory) as memory:
            _core.lay_out(memory[: at.host], world_size, SLOT_BYTES, generation)
            _core.lay_out(memory[at.host : at.board], world_size, HOST_SLOT_BYTES, generation)
        segment.pages = KeptPages()
        handover = Handover(segment, key, set(range(1, world_size)), joined, segment.pages)
        handover.start()
    except BaseException:
        segment.close()
        raise
    return handover, segment, _Offer(handover.address, key)


def _take(
    offer: _Offer, rank: int, world_size: int, timeout_s: float, connecting: Callable[[socket.socket], None]
) -> Segment:
    """Return the segment that the first rank offers. The other ranks' slots may not be reserved yet."""
    pages = KeptPages()
    memory, _, descriptor = take_descriptor(offer.address, offer.key, rank, timeout_s, connecting, pages)
    os.close(descriptor)
    at = _layout(world_size)
    segment = Segment.adopt(memory, at.end, room_bytes(world_size), is_reserved=False)
    segment.pages = pages
    try:
        _check_regions(segment, at, rank)
        for offset, part_bytes in _parts(world_size, rank):
            segment.reserve(offset, part_bytes)
    except BaseException:
        _drop(segment)
        raise
    return segment


def _check_regions(segment: Segment, at: _Layout, rank: int) -> None:
    """Raise `DecodeError` unless the first rank has laid out both regions; no slot is touched."""
    with memoryview(segment.memory) as memory:
        for part in (memory[: at.host], memory[at.host : at.board]):
            try:
                _core.SharedRegion(part, rank)
            except ValueError as error:
                raise DecodeError(f"the memory received is not that of the group: {error}") from error
