"""Inputs of captured pulls: recorded during the capture, exchanged between the ranks afterwards.

During a capture the ranks cannot exchange anything and memory cannot be mapped. A captured pull therefore reads the
addresses of the ranks' inputs from a slot of a table in device memory, and the slots are filled after the capture.
Until then they hold zeros, which a kernel reports as a failure. States and failures are in `DESIGN.md`, under "Policy
and custom all-reduce: host side".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec

from device_comm.cuda.custom.own_stream import own_stream
from device_comm.cuda.custom.peer_memory import PeerMemory
from device_comm.cuda.custom.peer_messages import MAX_TEXT_CHARS, BufferRecord, PeerExchange
from device_comm.cuda.driver import Driver
from shm_broadcast.errors import CapabilityError, CommError

__all__ = ["SLOTS", "GraphInputs"]

SLOTS: Final = 4096
"""Most captured pulls of one group; each takes 64 bytes of device memory. Pushes need no slot."""

# Eight addresses, one for each rank of the largest group.
_SLOT_BYTES: Final = 64


class _Note(msgspec.Struct, frozen=True):
    """One captured input of this rank.

    Attributes:
        address: Where this rank's kernel reads it.
        nbytes: Its size.
        is_staged: Whether the graph copies it into the staging area, because peers cannot map it where it is or the
            result overwrites it.
    """

    address: int
    nbytes: int
    is_staged: bool


class CaptureMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The captured inputs of one rank.

    Attributes:
        failure: Why the rank cannot share an input; empty if it can.
        sizes: Bytes of each input.
        inputs: Location of each input; None for one that is copied into the staging area, which all ranks have mapped.
    """

    failure: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    sizes: Annotated[tuple[int, ...], msgspec.Meta(max_length=SLOTS)] = ()
    inputs: Annotated[tuple[BufferRecord | None, ...], msgspec.Meta(max_length=SLOTS)] = ()

    def __post_init__(self) -> None:
        """Check that the two lists have equal lengths."""
        if len(self.sizes) != len(self.inputs):
            raise ValueError(f"{len(self.sizes)} sizes of {len(self.inputs)} inputs")


class GraphInputs:
    """The table of captured inputs of one group on one rank."""

    def __init__(
        self,
        driver: Driver,
        memory: PeerMemory,
        peers: PeerExchange,
        staging_offset: int,
        where: Callable[[str], str],
    ) -> None:
        """Allocate the table with all slots empty.

        Args:
            driver: The device.
            memory: The workspaces of all ranks.
            peers: The ranks of the group.
            staging_offset: Offset of the staging area in a workspace.
            where: Returns the beginning of an error's text for an operation.
        """
        self._driver = driver
        self._memory = memory
        self._peers = peers
        self._staging_offset = staging_offset
        self._where = where
        self._table = driver.mem_alloc(SLOTS * _SLOT_BYTES)
        with own_stream(driver) as stream:
            driver.memset_d32(self._table, 0, SLOTS * _SLOT_BYTES // 4, stream)
        self._used = 0
        self._notes: list[_Note] = []

    @property
    def pending(self) -> int:
        """Return how many captured inputs have not been sent to the other ranks."""
        return len(self._notes)

    def note(self, address: int, nbytes: int, output: int, stream: int) -> int:
        """Record the input of a captured pull; return the address of its slot. Exchanges and allocates nothing.

        An input that peers cannot map, or that the result overwrites, is copied into the staging area by a copy that
        becomes part of the graph. Peers then read the staging area.

        Raises:
            CapabilityError: The table is full.
        """
        if self._used == SLOTS:
            raise CapabilityError(
                f"{self._where('all_reduce')}: all {SLOTS} slots of the table of captured inputs are used; "
                "capture fewer large all-reduces, or set cuda.staging_bytes to 0",
                requirement="a free slot for a captured input",
            )
        overlaps = address < output + nbytes and output < address + nbytes
        is_staged = overlaps or not self._memory.can_export(address)
        if is_staged:
            staging = self._memory.addresses[self._peers.rank] + self._staging_offset
            self._driver.memcpy_dtod(staging, address, nbytes, stream)
            address = staging
        self._notes.append(_Note(address, nbytes, is_staged))
        self._used += 1
        return self._table + (self._used - 1) * _SLOT_BYTES

    def finish(self, failure: str = "") -> None:
        """Exchange the recorded inputs, map those of the other ranks, and fill the slots. Collective.

        Args:
            failure: That this rank's capture has failed, and why; empty if it has not.

        Raises:
            CapabilityError: The capture of a rank has failed, or it could not export or map an input. All ranks raise;
                the graph cannot be used, the group is intact.
            DisagreementError: The ranks captured different calls, with the same consequence.
        """
        notes, self._notes = self._notes, []
        first = self._used - len(notes)
        own = CaptureMessage(failure[:MAX_TEXT_CHARS]) if failure else self._message(notes)
        messages = self._peers.gather(own)
        self._raise_for(self._peers.named([message.failure for message in messages]))
        # The slots are not compared: they are local to a rank and differ after a capture that failed on some.
        shapes = [message.sizes for message in messages]
        if len(set(shapes)) > 1:
            raise self._peers.disagreement(
                f"{self._where('graph capture')}: ranks captured different calls",
                [f"{len(sizes)} pulls, of {list(sizes)[:20]} bytes" for sizes in shapes],
            )
        trouble = ""
        try:
            self._fill(first, notes, messages)
        except CommError as error:
            trouble = f"the inputs of the other ranks cannot be read: {error}"
        self._raise_for(self._peers.failures(trouble))

    def drop(self) -> None:
        """Discard the recorded inputs of a failed capture. Their slots stay zero, which a replay reports."""
        self._notes.clear()

    def free(self) -> None:
        """Free the table. No graph that uses it may run afterwards."""
        self._driver.mem_free(self._table)

    def _message(self, notes: Sequence[_Note]) -> CaptureMessage:
        handles: dict[int, bytes] = {}
        inputs: list[BufferRecord | None] = []
        try:
            for note in notes:
                own = None if note.is_staged else self._memory.record_of(note.address, note.nbytes, handles)
                inputs.append(own)
        except (CommError, ValueError) as error:
            text = f"an input of {notes[len(inputs)].nbytes} bytes cannot be shared: {error}"
            return CaptureMessage(text[:MAX_TEXT_CHARS])
        return CaptureMessage("", tuple(note.nbytes for note in notes), tuple(inputs))

    def _raise_for(self, failure: str) -> None:
        if failure:
            raise CapabilityError(
                f"{self._where('graph capture')}: {failure}; drop the graph, replaying it would break the group",
                requirement="a capture on all ranks, of inputs that peers can map",
            )

    def _fill(self, first: int, notes: Sequence[_Note], messages: Sequence[CaptureMessage]) -> None:
        if not notes:
            return
        addresses = [
            [self._address(rank, each) for each in message.inputs]
            if rank != self._peers.rank
            else [note.address for note in notes]
            for rank, message in enumerate(messages)
        ]
        # A slot has room for the largest group; a kernel reads one address per rank of its group.
        padding = (0,) * (_SLOT_BYTES // 8 - len(messages))
        slots = b"".join(struct.pack("<8Q", *column, *padding) for column in zip(*addresses, strict=True))
        with own_stream(self._driver) as stream:
            self._driver.memcpy_htod(self._table + first * _SLOT_BYTES, slots, stream)

    def _address(self, rank: int, record: BufferRecord | None) -> int:
        """Return the address in this process of another rank's input; map its allocation if necessary."""
        if record is None:
            return self._memory.addresses[rank] + self._staging_offset
        return self._memory.address_of(rank, record)
