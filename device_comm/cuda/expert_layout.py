"""The interface of the expert-parallel kernels and the host: slots of the arena and packed arguments. Pure arithmetic.

`csrc/cuda/expert_parallel.cu` defines the same structures, and a test compares their sizes. The protocol is in
`DESIGN.md`, under "Expert parallel on CUDA".
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableSequence, Sequence
from typing import Final

__all__ = [
    "COMBINE_BYTES",
    "DISPATCH_BYTES",
    "MOST_COLUMNS",
    "CombineCall",
    "DispatchCall",
    "DispatchSlots",
    "combine_slot_bytes",
    "unit_of",
]

MOST_COLUMNS: Final = 6
"""Most tensors that one dispatch moves beside the ids: hidden states, weights and four others."""
DISPATCH_BYTES: Final = 304
COMBINE_BYTES: Final = 88
HEAD_BYTES: Final = 128
"""Bytes of a dispatch's slot that hold the number of rows, a line of their own."""

_VECTOR: Final = 16


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def unit_of(row_bytes: int) -> int:
    """Return the bytes in which rows of `row_bytes` are moved: 16, 4, or 0 if no kernel can move them."""
    if row_bytes <= 0 or row_bytes % 4:
        return 0
    return 4 if row_bytes % _VECTOR else _VECTOR


@dataclasses.dataclass(frozen=True)
class DispatchSlots:
    """The slot of one source in an arena: a head, the ids, then each tensor, with `capacity` places each.

    Attributes:
        ids_offset: Offset of the ids of place 0.
        offsets: Offset of place 0 of each tensor.
        slot_bytes: Bytes of the slot, a multiple of 128.
    """

    ids_offset: int
    offsets: tuple[int, ...]
    slot_bytes: int

    @classmethod
    def of(cls, capacity: int, topk: int, row_bytes: Sequence[int]) -> DispatchSlots:
        """Return the slot for rows of `row_bytes` for each tensor, and `topk` ids."""
        end = HEAD_BYTES + _rounded(capacity * topk * 4, _VECTOR)
        offsets = []
        for nbytes in row_bytes:
            offsets.append(end)
            end += _rounded(capacity * nbytes, _VECTOR)
        return cls(HEAD_BYTES, tuple(offsets), _rounded(end, HEAD_BYTES))


def combine_slot_bytes(capacity: int, row_bytes: int) -> int:
    """Return the bytes of a combine's slot, which holds `capacity` results."""
    return _rounded(capacity * row_bytes, HEAD_BYTES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchCall:
    """The arguments of `expert_dispatch` that calls of one shape share.

    Attributes:
        slots: The slots.
        row_bytes: Bytes of a row of each tensor.
        topk: Number of experts per token.
        experts: Number of experts.
        capacity: Most rows from one rank to another.
        rows: Rows of the output.
        id_bytes: Bytes of an id: 4 or 8.
        is_compact: Whether the rows of the output follow each other without gaps.
    """

    slots: DispatchSlots
    row_bytes: tuple[int, ...]
    topk: int
    experts: int
    capacity: int
    rows: int
    id_bytes: int
    is_compact: bool

    def words(self) -> list[int]:
        """Return `ExpertDispatch` as 64-bit words, with 0 for what `fill` writes."""
        words: list[int] = []
        for offset, nbytes in zip(self.slots.offsets, self.row_bytes, strict=True):
            words += (0, 0, offset, nbytes | unit_of(nbytes) << 32)
        return [
            *words,
            *(0,) * (4 * (MOST_COLUMNS - len(self.row_bytes)) + 8),
            self.slots.slot_bytes,
            self.slots.ids_offset,
            0,
            self.topk | self.experts << 32,
            self.capacity | self.rows << 32,
            self.id_bytes | self.is_compact << 32,
        ]

    def fill(
        self,
        words: MutableSequence[int] | memoryview[int],
        first: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        addresses: Sequence[int],
        tokens: int,
    ) -> None:
        """Write what differs between calls of one shape.

        Args:
            words: Where `words` was copied to.
            first: Index of its first word.
            inputs: The address of each tensor.
            outputs: The address of each output.
            addresses: Addresses of ids, ids_out, local_out, owners, local, places, lost and received.
            tokens: Number of tokens of this rank.
        """
        at = first
        for source, output in zip(inputs, outputs, strict=True):
            words[at] = source
            words[at + 1] = output
            at += 4
        at = first + 4 * MOST_COLUMNS
        for address in addresses:
            words[at] = address
            at += 1
        words[at + 2] = len(self.row_bytes) | tokens << 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineCall:
    """The arguments of `expert_combine` that calls of one shape share.

    Attributes:
        slot_bytes: Bytes of a slot.
        row_bytes: Bytes of a result, a multiple of 16.
        topk: Number of experts per token.
        capacity: As in the dispatch.
        rows: As in the dispatch.
        is_compact: As in the dispatch.
    """

    slot_bytes: int
    row_bytes: int
    topk: int
    capacity: int
    rows: int
    is_compact: bool

    def words(self) -> list[int]:
        """Return `ExpertCombine` as 64-bit words, with 0 for what `fill` writes."""
        return [
            *(0,) * 7,
            self.slot_bytes,
            self.topk << 32,
            self.capacity | self.rows << 32,
            self.row_bytes // _VECTOR | self.is_compact << 32,
        ]

    def fill(
        self,
        words: MutableSequence[int] | memoryview[int],
        first: int,
        addresses: Sequence[int],
        tokens: int,
    ) -> None:
        """Write what differs between calls of one shape.

        Args:
            words: Where `words` was copied to.
            first: Index of its first word.
            addresses: Addresses of results, weights (0 for rows that are weighted already), local_out, received,
                places, lost and the output.
            tokens: Number of tokens of this rank.
        """
        for index, address in enumerate(addresses):
            words[first + index] = address
        words[first + 8] = tokens | self.topk << 32
