"""Collectives that return new tensors, which wait when they are first used; and which a compiler can trace.

    from coordinator import functional

    total = functional.all_reduce(x, "sum", group)   # goes on while this process computes
    y = f(z)
    total + y                                        # waits here, if it must

A small tensor is waited for at once, as that takes less time than a result that can wait: a call on up to
`WAITED_FOR_BYTES` of CPU tensors blocks, and its result is an ordinary tensor. `overlap` says otherwise; it is equal on
all ranks or not, as you like. Results of larger ones are torch's `AsyncCollectiveTensor`s, which torch functions, views
and `wait_tensor` know.

`group` is a `GroupCoordinator`; or its unique name; or the global ranks of one, or of several groups that this rank is
in one of (nested lists); or a process group, a 1-D `DeviceMesh`, or a pair (mesh, dimension), of the same ranks. Groups
are found among those that exist: a list creates none, and finds no fake.

A graph of `torch.compile` takes every call as one operation (`compile_ops`). Give the coordinator itself there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from coordinator import compile_ops, group_registry
from coordinator.fakes import FakeGroupCoordinator
from coordinator.group import GroupCoordinator
from coordinator.torch_group import CoordinatorProcessGroup
from device_comm.async_calls import CallHandle
from device_comm.base import SUM
from device_comm.derived_reductions import Reduction
from shm_broadcast.errors import UsageError

Group: TypeAlias = (
    GroupCoordinator
    | str
    | Sequence[int]
    | Sequence[Sequence[int]]
    | dist.ProcessGroup
    | DeviceMesh
    | tuple[DeviceMesh, int | str]
)

# Between two ranks of a host this takes some 200 us; handing a call to the thread and back takes 50, on a busy machine
# 120. Beyond it a functional call stays within twice the time of the method.
WAITED_FOR_BYTES: Final = 1 << 20


class WaitingTensor(AsyncCollectiveTensor):
    """The result of a call under way: torch's own wrapper, which here waits for the call's handle."""

    __slots__ = ("handle",)

    handle: CallHandle[torch.Tensor]

    @staticmethod
    def __new__(  # noqa: PYI034 - of exactly this class
        cls: type[WaitingTensor], handle: CallHandle[torch.Tensor], shape: Sequence[int], like: torch.Tensor
    ) -> WaitingTensor:
        """Stand for what `handle` will give: a contiguous tensor of that shape."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        made: Any = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's only door to it
            cls, torch.Size(shape), strides=tuple(reversed(strides)), dtype=like.dtype, device=like.device
        )
        made.handle = handle
        made.completed = False
        return cast("WaitingTensor", made)

    # Views of torch's wrapper look at the memory before it is filled; it exists only then here.
    @property
    def elem(self) -> torch.Tensor:  # type: ignore[override]
        """Return the result, waiting for it."""
        self.completed = True
        return self.handle.wait()

    def trigger_wait(self) -> torch.Tensor:
        """Return the result, waiting for it."""
        return self.elem

    def wait(self) -> torch.Tensor:
        """Return the result, waiting for it."""
        return self.elem

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run a torch function on results, as ordinary tensors."""
        del types
        from torch.utils._pytree import tree_map_only

        ready = tree_map_only(WaitingTensor, WaitingTensor.trigger_wait, (args, kwargs or {}))
        return func(*ready[0], **ready[1])


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the ordinary tensor of a result, waiting for it; any other tensor as it is."""
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    waited: Any = tensor
    return cast("torch.Tensor", waited.trigger_wait())


def find_group(group: Group) -> GroupCoordinator:
    """Return the group that is meant; see the top of this module.

    Raises:
        UsageError: No group of this process is.
        ClosedError: It was destroyed.
    """
    if isinstance(group, GroupCoordinator):
        return group
    if isinstance(group, str):
        named = group_registry.find(group, "functional").reference()
        if isinstance(named, GroupCoordinator):
            return named
    if isinstance(group, CoordinatorProcessGroup):
        return group.coordinator
    lists = _rank_lists(group)
    for each in group_registry.live_groups():
        # A fake gives results of its own, which nobody means who names real ranks.
        if (
            isinstance(each, GroupCoordinator)
            and not isinstance(each, FakeGroupCoordinator)
            and each.ranks in lists
        ):
            return each
    raise UsageError(f"this process has no group of the ranks {lists}; create a GroupCoordinator first")


def _rank_lists(group: Any) -> list[list[int]]:
    """Return the global ranks that are meant: one list, or several of which one has this rank."""
    if isinstance(group, dist.ProcessGroup):
        return [list(dist.get_process_group_ranks(group))]
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        return [list(dist.get_process_group_ranks(group[0].get_group(group[1])))]
    if hasattr(group, "get_group"):
        return [list(dist.get_process_group_ranks(group.get_group()))]
    if isinstance(group, Sequence) and not isinstance(group, str) and group:
        if all(isinstance(rank, int) for rank in group):
            return [list(group)]
        if all(isinstance(ranks, Sequence) and not isinstance(ranks, str) for ranks in group):
            return [list(ranks) for ranks in group]
    raise UsageError(
        "a group is a GroupCoordinator, its name, global ranks, lists of them, a process group, a 1-D DeviceMesh or a "
        f"pair (mesh, dimension), not {group!r}"
    )


def _overlaps(tensor: torch.Tensor, overlap: bool | None) -> bool:
    return tensor.is_cpu and tensor.nbytes > WAITED_FOR_BYTES if overlap is None else overlap


def _waiting(
    begin: Callable[[], CallHandle[torch.Tensor]], shape: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    handle = begin()
    # What was refused is raised here, and what an accelerator carries out is queued.
    return handle.wait() if handle.is_completed() else WaitingTensor(handle, shape, like)


_SUMS: Final = frozenset({"sum", "SUM"})


def _operation(op: Reduction | str) -> Any:
    return SUM if isinstance(op, str) and op in _SUMS else op


def all_reduce(
    tensor: torch.Tensor, op: Reduction | str = SUM, group: Group = "", *, overlap: bool | None = None
) -> torch.Tensor:
    """Combine the ranks' tensors, in rank order; a new tensor with the same bits on every rank. Collective.

    Args:
        tensor: As for `GroupCoordinator.all_reduce`. It must not be changed before the result has been used.
        op: Such as "sum", "max", "band"; or one of ours or torch's.
        group: See the top of this module.
        overlap: Whether the call goes on beside this process's computations; by default where that pays.
    """
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    operation = _operation(op)
    if torch.compiler.is_compiling():
        return compile_ops.all_reduce(there, tensor, operation, None)
    tensor = wait_tensor(tensor)
    if not _overlaps(tensor, overlap):
        return there.all_reduce(tensor, operation)
    return _waiting(lambda: there.all_reduce(tensor, operation, async_op=True), tensor.shape, tensor)


def all_gather_tensor(
    tensor: torch.Tensor, gather_dim: int = 0, group: Group = "", *, overlap: bool | None = None
) -> torch.Tensor:
    """Concatenate the ranks' tensors along `gather_dim`, in rank order; a new tensor. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    if torch.compiler.is_compiling():
        return compile_ops.all_gather(there, tensor, gather_dim, None)
    tensor = wait_tensor(tensor)
    if not _overlaps(tensor, overlap):
        return there.all_gather(tensor, gather_dim)
    shape = _scaled(tensor, gather_dim, there.world_size)
    return _waiting(lambda: there.all_gather(tensor, gather_dim, async_op=True), shape, tensor)


def reduce_scatter_tensor(
    tensor: torch.Tensor,
    op: Reduction | str = SUM,
    scatter_dim: int = 0,
    group: Group = "",
    *,
    overlap: bool | None = None,
) -> torch.Tensor:
    """Combine the ranks' tensors; a new tensor of this rank's part along `scatter_dim`. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    operation = _operation(op)
    if torch.compiler.is_compiling():
        return compile_ops.reduce_scatter(there, tensor, scatter_dim, operation, None)
    tensor = wait_tensor(tensor)
    if not _overlaps(tensor, overlap):
        return there.reduce_scatter(tensor, scatter_dim, operation)
    shape = _scaled(tensor, scatter_dim, 1, there.world_size)
    return _waiting(
        lambda: there.reduce_scatter(tensor, scatter_dim, operation, async_op=True), shape, tensor
    )


def all_to_all_single(
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = "",
    *,
    overlap: bool | None = None,
) -> torch.Tensor:
    """Send the i-th part of the first dimension to rank i; a new tensor of what came, in rank order. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    if torch.compiler.is_compiling():
        return compile_ops.all_to_all(there, tensor, 0, input_split_sizes, output_split_sizes, None)
    tensor = wait_tensor(tensor)
    if not _overlaps(tensor, overlap):
        return there.all_to_all(tensor, 0, input_split_sizes, output_split_sizes)
    shape = list(tensor.shape) or [1]
    if output_split_sizes is not None:
        shape[0] = sum(output_split_sizes)
    return _waiting(
        lambda: there.all_to_all(tensor, 0, input_split_sizes, output_split_sizes, async_op=True),
        shape,
        tensor,
    )


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: Group = "", *, overlap: bool | None = None
) -> torch.Tensor:
    """Return rank `src`'s tensor (a rank in the group), as a new one; shapes and dtypes are equal. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    if torch.compiler.is_compiling():
        return compile_ops.broadcast(there, tensor, src, None)
    tensor = wait_tensor(tensor)
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if not _overlaps(tensor, overlap):
        return there.broadcast(result, src)
    return _waiting(lambda: there.broadcast(result, src, async_op=True), result.shape, result)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Reduction | str = SUM, group: Group = ""
) -> list[torch.Tensor]:
    """Combine several tensors of each rank, for the price of one meeting; new tensors. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    operation = _operation(op)
    if torch.compiler.is_compiling():
        return compile_ops.all_reduce_coalesced(there, tensors, operation, None)
    return there.all_reduce_coalesced([wait_tensor(each) for each in tensors], operation)


def all_gather_tensor_coalesced(
    tensors: Sequence[torch.Tensor], gather_dim: int = 0, group: Group = ""
) -> list[torch.Tensor]:
    """Concatenate several tensors of each rank, for the price of one meeting; new tensors. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    if torch.compiler.is_compiling():
        return compile_ops.all_gather_coalesced(there, tensors, gather_dim, None)
    return there.all_gather_coalesced([wait_tensor(each) for each in tensors], gather_dim)


def reduce_scatter_tensor_coalesced(
    tensors: Sequence[torch.Tensor], op: Reduction | str = SUM, scatter_dim: int = 0, group: Group = ""
) -> list[torch.Tensor]:
    """Combine several tensors and keep this rank's parts, for the price of one meeting; new tensors. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    operation = _operation(op)
    if torch.compiler.is_compiling():
        return compile_ops.reduce_scatter_coalesced(there, tensors, scatter_dim, operation, None)
    ready = [wait_tensor(each) for each in tensors]
    return there.reduce_scatter_coalesced(ready, scatter_dim, operation)


def _scaled(tensor: torch.Tensor, dim: int, times: int, parts: int = 1) -> list[int]:
    shape = list(tensor.shape) or [1]
    if not -len(shape) <= dim < len(shape) or shape[dim] % parts:
        # Refused when the call is made, with the right words.
        return shape
    shape[dim] = shape[dim] * times // parts
    return shape
