"""The thresholds that choose between algorithms, each with its source.

The built-in rows are public figures for other projects' kernels of the same algorithms, none of them measured with
our kernels. They serve until the `tune` command has measured ours on the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

__all__ = ["BUILT_IN", "Family", "Link", "Mode", "Operation", "PolicyTable", "Threshold", "family_of"]

Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]
Mode = Literal["graph", "eager", "any"]
Family = Literal["ampere", "hopper", "blackwell"]
Link = Literal["nvlink", "pcie"]
AlgorithmName = Literal[
    "push_one_shot",
    "push_two_shot",
    "pull_one_shot",
    "pull_two_shot",
    "multimem_two_shot",
    "push_reduce_scatter",
    "push_all_gather",
    "staged_all_gather",
]

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20


_FAMILIES: Final[dict[int, Family]] = {8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}


def family_of(arch: str) -> Family | Literal[""]:
    """Return the family of an architecture such as "sm_90"; empty if there are no published figures for it."""
    major = arch.removeprefix("sm_")[:-1]
    return _FAMILIES.get(int(major), "") if major.isascii() and major.isdecimal() else ""


class Threshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes for which an algorithm is used, and the source of the numbers.

    Attributes:
        operation: The collective.
        algorithm: One of our algorithms for it.
        family: The architectures to which the row applies.
        link: The link between the devices.
        min_world_size: The smallest group to which it applies.
        max_world_size: The largest group to which it applies.
        mode: Whether it applies in CUDA graphs, outside of them, or in both.
        max_bytes: The largest `CallFacts.nbytes` for which the algorithm is used.
        min_bytes: The smallest one.
        source: The source of the number.
    """

    operation: Operation
    algorithm: AlgorithmName
    family: Family
    link: Link
    min_world_size: int
    max_world_size: int
    mode: Mode
    max_bytes: int
    source: str
    min_bytes: int = 0

    def holds(self, operation: str, family: str, link: str, world_size: int, in_graph: bool) -> bool:
        """Return whether the row applies to a call with these facts."""
        return (
            self.operation == operation
            and self.family == family
            and self.link == link
            and self.min_world_size <= world_size <= self.max_world_size
            and self.mode in ("any", "graph" if in_graph else "eager")
        )


class PolicyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All thresholds that a process uses.

    Attributes:
        thresholds: The rows. Of those that apply to a call, the one with the smallest sufficient `max_bytes` decides;
            of equal ones the first. Rows with `min_bytes` come before the others.
        origin: The source of the table: "built in", or the path of a file.
    """

    thresholds: tuple[Threshold, ...]
    origin: str = "built in"

    def rows(
        self, operation: str, family: str, link: str, world_size: int, in_graph: bool
    ) -> tuple[Threshold, ...]:
        """Return the rows that may apply: those with a lower limit first, then by the upper one."""
        return _rows(self, operation, family, link, world_size, in_graph)


@functools.lru_cache(maxsize=256)
def _rows(
    table: PolicyTable, operation: str, family: str, link: str, world_size: int, in_graph: bool
) -> tuple[Threshold, ...]:
    found = [each for each in table.thresholds if each.holds(operation, family, link, world_size, in_graph)]
    return tuple(sorted(found, key=lambda row: (row.min_bytes == 0, row.max_bytes)))


# --- the built-in rows ------------------------------------------------------------------------------------------

_TUNED: Final = "public H200/B200 tables of SGLang (sglang#31049, sglang#35192) and vLLM (vllm#44891)"
_A100: Final = "public tables of vLLM's and SGLang's custom all-reduce for A100"
_TWO_SHOT: Final = "upper end of the two-shot push's band (sglang#35192)"
_PULL: Final = "public tables of registered pulls; NCCL above"
_ONE_PULL: Final = (
    "arithmetic: at 2 ranks a one-shot pull moves as much as a two-shot one, with a barrier less"
)
_PCIE: Final = (
    "arithmetic: at 2 ranks one-shot moves no more than any other; more ranks need measuring (vllm#56128)"
)
_FLAGS: Final = "derived: half of the one-shot push's number, as each word travels with a flag"
_MULTIMEM: Final = (
    "vLLM's tables (all_reduce_utils.py, symm_mem.py): from where its own all-reduce ends to where NCCL begins; on "
    "Blackwell the higher of the limits for 10.0 and 10.3, and the lower of those at the end; 7 ranks as 6"
)
_STAGED: Final = (
    "derived: as many bytes over the links as a two-shot push at the end of its band, 16 MiB in all"
)
_HALF: Final = "derived: the first half of a two-shot push"

# The smallest and the largest group, the mode, the most bytes.
_Limit = tuple[int, int, Mode, int]
_Row = tuple[Operation, AlgorithmName, Link, _Limit, str]

_HOPPER_ONE_SHOT: Final[tuple[_Limit, ...]] = (
    (2, 2, "any", 8 * _MIB),
    (3, 3, "any", 1280 * _KIB),
    (4, 4, "graph", 384 * _KIB),
    (4, 4, "eager", 896 * _KIB),
    (5, 5, "any", 192 * _KIB),
    (6, 8, "any", 128 * _KIB),
)
_BLACKWELL_ONE_SHOT: Final[tuple[_Limit, ...]] = (*_HOPPER_ONE_SHOT[:-1], (6, 8, "any", 256 * _KIB))
_AMPERE_ONE_SHOT: Final[tuple[_Limit, ...]] = ((2, 4, "any", 512 * _KIB), (5, 8, "any", 256 * _KIB))
_ONE_SHOT: Final[dict[Family, tuple[tuple[_Limit, ...], str]]] = {
    "ampere": (_AMPERE_ONE_SHOT, _A100),
    "hopper": (_HOPPER_ONE_SHOT, _TUNED),
    "blackwell": (_BLACKWELL_ONE_SHOT, _TUNED),
}


# The smallest and the largest group, the least and the most bytes. Below 6 ranks vLLM's tables prefer other algorithms.
_MULTIMEM_RANGES: Final[dict[Family, tuple[tuple[int, int, int, int], ...]]] = {
    "ampere": (),
    "hopper": ((6, 7, 512 * _KIB, 64 * _MIB), (8, 8, 256 * _KIB, 64 * _MIB)),
    "blackwell": ((6, 7, 8 * _MIB, 32 * _MIB), (8, 8, 4 * _MIB, 64 * _MIB)),
}


def _rows_of(limits: tuple[_Limit, ...], source: str) -> Iterator[_Row]:
    """Yield the rows of one family, whose one-shot push has these limits."""
    for low, high, mode, most in limits:
        yield "all_reduce", "push_one_shot", "nvlink", (low, high, mode, most), source
        yield "all_gather", "push_all_gather", "nvlink", (low, high, mode, most // 2), _FLAGS
    for size in range(2, 9):
        yield "all_gather", "staged_all_gather", "nvlink", (size, size, "any", 16 * _MIB // size), _STAGED
    yield "all_reduce", "push_two_shot", "nvlink", (2, 8, "any", 8 * _MIB), _TWO_SHOT
    yield "all_reduce", "pull_one_shot", "nvlink", (2, 2, "graph", 32 * _MIB), _ONE_PULL
    yield "all_reduce", "pull_two_shot", "nvlink", (3, 8, "graph", 32 * _MIB), _PULL
    yield "reduce_scatter", "push_reduce_scatter", "nvlink", (2, 8, "any", 8 * _MIB), _HALF
    two_ranks = limits[0][3]
    yield "all_reduce", "push_one_shot", "pcie", (2, 2, "any", two_ranks), _PCIE
    yield "all_gather", "push_all_gather", "pcie", (2, 2, "any", two_ranks // 2), _FLAGS


def _built_in() -> Iterator[Threshold]:
    for family, (limits, one_shot_source) in _ONE_SHOT.items():
        for operation, algorithm, link, (low, high, mode, most), source in _rows_of(limits, one_shot_source):
            yield Threshold(
                operation=operation,
                algorithm=algorithm,
                family=family,
                link=link,
                min_world_size=low,
                max_world_size=high,
                mode=mode,
                max_bytes=most,
                source=source,
            )
        for low, high, least, most in _MULTIMEM_RANGES[family]:
            yield Threshold(
                operation="all_reduce",
                algorithm="multimem_two_shot",
                family=family,
                link="nvlink",
                min_world_size=low,
                max_world_size=high,
                mode="any",
                min_bytes=least,
                max_bytes=most,
                source=_MULTIMEM,
            )


BUILT_IN: Final = PolicyTable(thresholds=tuple(_built_in()))
