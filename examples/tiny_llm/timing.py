"""Measure the duration of each group operation, as its caller sees it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .group import Group

__all__ = ["OperationRow", "TimedGroup", "summarize"]

Result = TypeVar("Result")


class TimedGroup:
    """Wraps a group and records the duration of each call.

    Attributes:
        group: The wrapped group.
        samples_us: Durations in microseconds, by operation name.
    """

    def __init__(self, group: Group) -> None:
        """Wrap a group.

        Args:
            group: The group to wrap.
        """
        self.group = group
        self.samples_us: dict[str, list[float]] = {}

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members, in the group's order."""
        return self.group.ranks

    @property
    def world_size(self) -> int:
        """Number of members."""
        return self.group.world_size

    @property
    def rank_in_group(self) -> int:
        """Rank of this process in the group."""
        return self.group.rank_in_group

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the first member."""
        return self.group.is_first_rank

    @property
    def is_last_rank(self) -> bool:
        """Whether this process is the last member."""
        return self.group.is_last_rank

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the sum of all members' tensors."""
        return self._timed("all_reduce", lambda: self.group.all_reduce(input_))

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenate all members' tensors on one member; return None on the others."""
        return self._timed("gather", lambda: self.group.gather(input_, dst, dim))

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any:
        """Return one member's object on every member."""
        return self._timed("broadcast_object", lambda: self.group.broadcast_object(obj, src))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return all members' objects on one member, and None on the others."""
        return self._timed("gather_object", lambda: self.group.gather_object(obj, dst))

    def send_object(self, obj: Any, dst: int) -> None:
        """Send an object to one member."""
        self._timed("send_object", lambda: self.group.send_object(obj, dst))

    def recv_object(self, src: int) -> Any:
        """Receive an object from one member."""
        return self._timed("recv_object", lambda: self.group.recv_object(src))

    def send_tensor_dict(
        self, tensor_dict: dict[str, Any], dst: int | None = None, all_gather_group: Any | None = None
    ) -> Any:
        """Send named tensors to one member, by default the next."""
        return self._timed(
            "send_tensor_dict",
            lambda: self.group.send_tensor_dict(tensor_dict, dst, unwrapped(all_gather_group)),
        )

    def recv_tensor_dict(
        self, src: int | None = None, all_gather_group: Any | None = None
    ) -> Mapping[str, Any] | None:
        """Receive named tensors from one member, by default the previous."""
        return self._timed(
            "recv_tensor_dict", lambda: self.group.recv_tensor_dict(src, unwrapped(all_gather_group))
        )

    def _timed(self, name: str, call: Callable[[], Result]) -> Result:
        """Make the call and record its duration."""
        start = time.perf_counter_ns()
        result = call()
        self.samples_us.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000)
        return result


def unwrapped(group: Group | None) -> Group | None:
    """Return the wrapped group: a gather inside another group's call is not timed separately."""
    return group.group if isinstance(group, TimedGroup) else group


@dataclass(frozen=True)
class OperationRow:
    """One line of the table.

    Attributes:
        group: Name of the group.
        operation: Name of the operation.
        count: Number of calls on all ranks.
        p50_us: Median duration.
        p99_us: 99th percentile of the durations.
    """

    group: str
    operation: str
    count: int
    p50_us: float
    p99_us: float


def summarize(samples_us: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> list[OperationRow]:
    """Merge the durations of all ranks.

    Args:
        samples_us: For each rank, its durations by group and operation.

    Returns:
        A row per group and operation, in the order in which they first appear.
    """
    merged: dict[tuple[str, str], list[float]] = {}
    for rank in samples_us:
        for group, operations in rank.items():
            for operation, durations in operations.items():
                merged.setdefault((group, operation), []).extend(durations)
    return [
        OperationRow(group, operation, len(durations), quantile(durations, 0.50), quantile(durations, 0.99))
        for (group, operation), durations in merged.items()
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile `share` (0 to 1) of `values`, which is not empty."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
