"""Inputs of captured pulls: noted while a graph is captured, told to the other ranks afterwards.

While a stream is captured nobody can be asked and nothing can be opened, so a captured pull reads the addresses of
the ranks' inputs from a slot of a table in device memory, and the slots are filled after the capture. Until then they
hold zeros, and a kernel that finds one reports it instead of reading. States and failures are in `DESIGN.md`, under
"Policy and custom all-reduce: host side".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec

from device_comm.driver import Driver
from device_comm.peer_memory import PeerMemory
from device_comm.peer_messages import BufferRecord, Exchange, Remark, said, speak
from shm_broadcast.errors import CapabilityError, CommError, DisagreementError

__all__ = ["SLOTS", "GraphInputs"]

SLOTS: Final = 4096
"""Captured pulls of one group: 64 bytes of device memory each. Pushes need none."""

_SLOT_BYTES: Final = 64
_TEXT: Final = 1900


class _Note(msgspec.Struct, frozen=True):
    """One captured input of this rank.

    Attributes:
        address: Where this rank's kernel reads it.
        nbytes: Its size.
        is_staged: Whether the graph copies it into the staging area, as peers cannot map where it lies.
    """

    address: int
    nbytes: int
    is_staged: bool


class CaptureMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one rank tells of a capture.

    Attributes:
        failure: Why it cannot share an input; empty if it can.
        sizes: How long each input is.
        inputs: Where each input lies; None for one that is copied into the staging area, which all have open.
    """

    failure: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    sizes: Annotated[tuple[int, ...], msgspec.Meta(max_length=SLOTS)] = ()
    inputs: Annotated[tuple[BufferRecord | None, ...], msgspec.Meta(max_length=SLOTS)] = ()

    def __post_init__(self) -> None:
        """Check that the two lists are of the same inputs."""
        if len(self.sizes) != len(self.inputs):
            raise ValueError(f"{len(self.sizes)} sizes of {len(self.inputs)} inputs")


class GraphInputs:
    """The table of one group on one rank."""

    def __init__(
        self,
        driver: Driver,
        memory: PeerMemory,
        rank: int,
        ranks: Sequence[int],
        staging_offset: int,
        where: Callable[[str], str],
    ) -> None:
        """Allocate the table, all slots empty.

        Args:
            driver: The device.
            memory: The workspaces of all ranks.
            rank: This rank in the group.
            ranks: Global ranks, in group order, for texts.
            staging_offset: Where in a workspace inputs are copied to.
            where: Begins an error's text.
        """
        self._driver = driver
        self._memory = memory
        self._rank = rank
        self._ranks = tuple(ranks)
        self._staging_offset = staging_offset
        self._where = where
        self._table = driver.mem_alloc(SLOTS * _SLOT_BYTES)
        driver.memcpy_htod(self._table, bytes(SLOTS * _SLOT_BYTES))
        self._used = 0
        self._notes: list[_Note] = []
        # Peers' allocations, by whose they are and how they are named: each is opened once.
        self._opened: dict[tuple[int, bytes], int] = {}

    @property
    def pending(self) -> int:
        """Return how many captured inputs the other ranks have not been told of."""
        return len(self._notes)

    def note(self, address: int, nbytes: int, output: int, stream: int) -> int:
        """Note the input of a captured pull; return the address of its slot. No exchange, nothing allocated.

        An input that peers cannot map, or that the result overwrites, is copied into the staging area first, by a
        copy that becomes part of the graph. Peers need not know: they read where they are told to.

        Raises:
            CapabilityError: The table is full.
        """
        if self._used == SLOTS:
            raise CapabilityError(
                f"{self._where('all_reduce')}: the table of captured inputs has {SLOTS} slots, and all are used; "
                "capture fewer large all-reduces, or set cuda.staging_bytes to 0",
                requirement="a free slot for a captured input",
            )
        overlaps = address < output + nbytes and output < address + nbytes
        is_staged = overlaps or bool(self._memory.why_not_exportable(address))
        if is_staged:
            staging = self._memory.addresses[self._rank] + self._staging_offset
            self._driver.memcpy_dtod(staging, address, nbytes, stream)
            address = staging
        self._notes.append(_Note(address, nbytes, is_staged))
        self._used += 1
        return self._table + (self._used - 1) * _SLOT_BYTES

    def finish(self, exchange: Exchange) -> None:
        """Tell the others of what was noted, open what they tell, and fill the slots. Collective.

        Raises:
            CapabilityError: A rank could not export or open an input; all ranks raise, the graph is useless, the
                group is intact.
            DisagreementError: The ranks captured different calls; likewise.
        """
        notes, self._notes = self._notes, []
        first = self._used - len(notes)
        messages = speak(exchange, self._message(notes), self._ranks)
        self._check(messages)
        failure = ""
        try:
            self._fill(first, notes, messages)
        except CommError as error:
            failure = str(error)[:_TEXT]
        self._raise_for([remark.failure for remark in speak(exchange, Remark(failure), self._ranks)])

    def drop(self) -> None:
        """Forget what was noted: its graph is void. The slots stay zero, which a replay reports."""
        self._notes.clear()

    def close_peers(self) -> None:
        """Close what was opened of other ranks' memory. Idempotent."""
        while self._opened:
            self._driver.ipc_close(self._opened.popitem()[1])

    def free(self) -> None:
        """Free the table; no graph may run any more. Idempotent."""
        table, self._table = self._table, 0
        if table:
            self._driver.mem_free(table)

    def _message(self, notes: Sequence[_Note]) -> CaptureMessage:
        handles: dict[int, bytes] = {}
        inputs: list[BufferRecord | None] = []
        try:
            for note in notes:
                if note.is_staged:
                    inputs.append(None)
                    continue
                base, size = self._driver.address_range(note.address)
                if base not in handles:
                    is_local = self._memory.kind == "local"
                    handles[base] = (
                        base.to_bytes(8, "little") if is_local else self._driver.ipc_get_handle(base)
                    )
                inputs.append(BufferRecord(handles[base], note.address - base, note.nbytes, size))
        except CommError as error:
            return CaptureMessage(str(error)[:_TEXT])
        except ValueError as error:
            return CaptureMessage(f"an input of {notes[len(inputs)].nbytes} bytes: {error}")
        return CaptureMessage("", tuple(note.nbytes for note in notes), tuple(inputs))

    def _check(self, messages: Sequence[CaptureMessage]) -> None:
        self._raise_for([message.failure for message in messages])
        # Not the slots: each rank has its own, and after a capture that failed they differ.
        shapes = [message.sizes for message in messages]
        if any(shape != shapes[0] for shape in shapes):
            views = {
                rank: f"{len(sizes)} pulls, of {list(sizes)[:20]} bytes"
                for rank, sizes in zip(self._ranks, shapes, strict=True)
            }
            listed = "; ".join(f"rank {rank}: {view}" for rank, view in views.items())
            raise DisagreementError(
                f"{self._where('graph capture')}: ranks captured different calls: {listed}", views=views
            )

    def _raise_for(self, failures: Sequence[str]) -> None:
        failure = said(failures, self._ranks)
        if failure:
            raise CapabilityError(
                f"{self._where('graph capture')}: an input could not be shared ({failure}); "
                "drop the graph, replaying it would break the group",
                requirement="inputs that peers can map",
            )

    def _fill(self, first: int, notes: Sequence[_Note], messages: Sequence[CaptureMessage]) -> None:
        if not notes:
            return
        addresses = [
            [self._address(rank, each) for each in message.inputs] for rank, message in enumerate(messages)
        ]
        addresses[self._rank] = [note.address for note in notes]
        # The kernels read as many addresses as the group has ranks; a slot has room for the largest group.
        padding = (0,) * (_SLOT_BYTES // 8 - len(messages))
        slots = b"".join(struct.pack("<8Q", *column, *padding) for column in zip(*addresses, strict=True))
        self._driver.memcpy_htod(self._table + first * _SLOT_BYTES, slots)

    def _address(self, rank: int, record: BufferRecord | None) -> int:
        """Return where another rank's input is in this process; its allocation is opened once."""
        if rank == self._rank:
            return 0
        if record is None:
            return self._memory.addresses[rank] + self._staging_offset
        if self._memory.kind == "local":
            return int.from_bytes(record.handle, "little") + record.offset
        key = (rank, record.handle)
        if key not in self._opened:
            self._opened[key] = self._driver.ipc_open_handle(record.handle)
        return self._opened[key] + record.offset
