"""Define the kinds of calls that a status page names: each is a number in the page, and a name for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["ALGORITHMS", "KINDS", "OTHER", "REFUSED", "kind_of"]

KINDS: Final = (
    # The first ten are those of the native core of device_comm, in its order.
    *("barrier", "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather"),
    *(
        "scatter",
        "all_to_all",
        "reduce",
        "all_reduce",
        "send",
        "recv",
        "recv_any",
        "send_object",
        "recv_object",
    ),
    *("broadcast_object", "broadcast_object_list", "all_gather_object", "gather_object"),
    *("scatter_object_list", "send_tensor_dict", "recv_tensor_dict", "broadcast_tensor_dict"),
    *("monitored_barrier", "create", "destroy", "dispatch", "combine", "all_reduce_add_rms_norm"),
    *("enqueue", "dequeue", "exchange", "refused", "connect", "moe_finalize_all_reduce"),
)
"""The name of each kind, by its number. There are at most 63; see `OTHER`."""

ALGORITHMS: Final = {1: "one-shot", 2: "two-shot"}
"""The algorithm that the number of a kind implies, if it implies one."""

REFUSED: Final = KINDS.index("refused")
OTHER: Final = 63
"""The kind of a call that has no number of its own."""

# The last place wins: calls that are named from Python are never those of the native core.
_NUMBERS: Final = {name: number for number, name in enumerate(KINDS)}


# Names hold ranks: those of a large world must not pile up.
_MOST_NAMES: Final = 1024


class _Kinds(dict[str, int]):
    """The kind of each name that was asked for; asking takes two thirds of the time of `functools.lru_cache`."""

    def __missing__(self, name: str) -> int:
        if len(self) >= _MOST_NAMES:
            self.clear()
        kind = self[name] = _NUMBERS.get(name.partition(" ")[0].removesuffix("_"), OTHER)
        return kind


kind_of: Final[Callable[[str], int]] = _Kinds().__getitem__
"""Return the kind of the call of this name, whose first word counts: "send to rank 3" is a send."""
