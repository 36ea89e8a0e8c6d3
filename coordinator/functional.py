"""Collectives that return new tensors and wait at the first use of the result; `torch.compile` can trace them.

    from coordinator import functional

    total = functional.all_reduce(x, "sum", group)   # runs while this process computes
    y = f(z)
    total + y                                        # waits here if it is not complete

A call on at most `WAITED_FOR_BYTES` of CPU tensors blocks and returns an ordinary tensor, because a thread would cost
more than it saves. Larger calls return torch's `AsyncCollectiveTensor`, which torch functions, views and `wait_tensor`
accept. `overlap=True` or `False` overrides this, and may differ between ranks.

`group` is one of: a `GroupCoordinator`; its unique name; a list of its global ranks, or several such lists, one of
which is this rank's group; a process group, a 1-D `DeviceMesh` or a pair (mesh, dimension) over the same ranks. Only
existing groups are found: a list never creates a group, and never finds a fake.

In a graph of `torch.compile` every call is one operation (see `compile_ops`). Pass the `GroupCoordinator` itself there.

Errors are those of the corresponding method of `GroupCoordinator`. A running call raises them where its result is
first used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from coordinator import group_registry
from coordinator.group import GroupCoordinator
from coordinator.torch_interop import compile_ops
from coordinator.torch_interop.process_group import CoordinatorProcessGroup
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

# Up to this size a functional call blocks. A call of 1 MiB between two ranks of a host takes about 200 us, and handing
# it to the thread and back costs 50 us, or 120 us on a busy machine: above 1 MiB a call takes less than twice the
# method's time.
WAITED_FOR_BYTES: Final = 1 << 20


class WaitingTensor(AsyncCollectiveTensor):
    """The result of a running call: torch's wrapper tensor, waiting on the call's handle."""

    __slots__ = ("handle",)

    handle: CallHandle[torch.Tensor]

    @staticmethod
    def __new__(  # noqa: PYI034 - of exactly this class
        cls: type[WaitingTensor], handle: CallHandle[torch.Tensor], shape: Sequence[int], like: torch.Tensor
    ) -> WaitingTensor:
        """Represent the result of `handle`: a contiguous tensor of `shape`, with dtype and device of `like`."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        made: Any = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch has no public equivalent
            cls, torch.Size(shape), strides=tuple(reversed(strides)), dtype=like.dtype, device=like.device
        )
        made.handle = handle
        made.completed = False
        return cast("WaitingTensor", made)

    # torch's wrapper creates views before the result exists; here the memory exists only when the call is complete.
    @property
    def elem(self) -> torch.Tensor:  # type: ignore[override]
        """Wait for the result and return it."""
        self.completed = True
        return self.handle.wait()

    def trigger_wait(self) -> torch.Tensor:
        """Wait for the result and return it."""
        return self.elem

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it."""
        return self.elem

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run a torch function on the awaited results, as ordinary tensors."""
        del types
        from torch.utils._pytree import tree_map_only

        ready = tree_map_only(WaitingTensor, WaitingTensor.trigger_wait, (args, kwargs or {}))
        return func(*ready[0], **ready[1])


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a result and return it as an ordinary tensor; return any other tensor unchanged."""
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    waited: Any = tensor
    return cast("torch.Tensor", waited.trigger_wait())


def find_group(group: Group) -> GroupCoordinator:
    """Return the group that `group` names; see the module's docstring for its forms.

    Raises:
        UsageError: This process has no such group.
        ClosedError: The group was destroyed.
    """
    if isinstance(group, GroupCoordinator):
        return group
    if isinstance(group, str):
        named = group_registry.find(group, "functional").reference()
        if isinstance(named, GroupCoordinator):
            return named
    if isinstance(group, CoordinatorProcessGroup):
        return cast("GroupCoordinator", group.coordinator)
    lists = _rank_lists(group)
    for each in group_registry.live_groups():
        if isinstance(each, GroupCoordinator) and each.ranks in lists:
            return each
    raise UsageError(f"this process has no group with the ranks {lists}; create a GroupCoordinator first")


def _rank_lists(group: Any) -> list[list[int]]:
    """Return the global ranks that `group` names: one list, or several, one of which is this rank's group."""
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
        "group must be a GroupCoordinator, its name, a list of global ranks, a list of such lists, a process group, "
        f"a 1-D DeviceMesh or a pair (mesh, dimension), not {group!r}"
    )


def _overlaps(tensor: torch.Tensor, overlap: bool | None) -> bool:
    return tensor.is_cpu and tensor.nbytes > WAITED_FOR_BYTES if overlap is None else overlap


def _waiting(
    begin: Callable[[], CallHandle[torch.Tensor]], shape: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    handle = begin()
    # A refused call raises here. A call on an accelerator is complete once it is queued on the stream.
    return handle.wait() if handle.is_completed() else WaitingTensor(handle, shape, like)


_SUMS: Final = frozenset({"sum", "SUM"})


def _operation(op: Reduction | str) -> Any:
    return SUM if isinstance(op, str) and op in _SUMS else op


def all_reduce(
    tensor: torch.Tensor, op: Reduction | str = SUM, group: Group = "", *, overlap: bool | None = None
) -> torch.Tensor:
    """Reduce the ranks' tensors in rank order; return a new tensor with the same bits on every rank. Collective.

    Args:
        tensor: See `GroupCoordinator.all_reduce`. Do not change it before the result has been used.
        op: A name such as "sum", "max" or "band", or an operation of this package or of torch.
        group: See the module's docstring.
        overlap: Whether the call runs beside this process's computations; default: above `WAITED_FOR_BYTES`.
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
    """Concatenate the ranks' tensors along `gather_dim` in rank order; return a new tensor. Collective."""
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
    """Reduce the ranks' tensors; return this rank's part along `scatter_dim` as a new tensor. Collective."""
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
    """Send the i-th part of the first dimension to rank i; return the received parts in rank order. Collective.

    The result is a new tensor. Split sizes count elements of the first dimension, one per rank; None splits evenly.
    """
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
    """Return a new tensor with the values of rank `src` (rank in the group). Collective.

    Shape and dtype must be equal on all ranks.
    """
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
    """Do `all_reduce` for several tensors in one round; return new tensors. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    operation = _operation(op)
    if torch.compiler.is_compiling():
        return compile_ops.all_reduce_coalesced(there, tensors, operation, None)
    return there.all_reduce_coalesced([wait_tensor(each) for each in tensors], operation)


def all_gather_tensor_coalesced(
    tensors: Sequence[torch.Tensor], gather_dim: int = 0, group: Group = ""
) -> list[torch.Tensor]:
    """Do `all_gather_tensor` for several tensors in one round; return new tensors. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    if torch.compiler.is_compiling():
        return compile_ops.all_gather_coalesced(there, tensors, gather_dim, None)
    return there.all_gather_coalesced([wait_tensor(each) for each in tensors], gather_dim)


def reduce_scatter_tensor_coalesced(
    tensors: Sequence[torch.Tensor], op: Reduction | str = SUM, scatter_dim: int = 0, group: Group = ""
) -> list[torch.Tensor]:
    """Do `reduce_scatter_tensor` for several tensors in one round; return new tensors. Collective."""
    there = group if isinstance(group, GroupCoordinator) else find_group(group)
    operation = _operation(op)
    if torch.compiler.is_compiling():
        return compile_ops.reduce_scatter_coalesced(there, tensors, scatter_dim, operation, None)
    ready = [wait_tensor(each) for each in tensors]
    return there.reduce_scatter_coalesced(ready, scatter_dim, operation)


def _scaled(tensor: torch.Tensor, dim: int, times: int, parts: int = 1) -> list[int]:
    shape = list(tensor.shape) or [1]
    if not -len(shape) <= dim < len(shape) or shape[dim] % parts:
        # The call itself refuses these arguments, with a better message.
        return shape
    shape[dim] = shape[dim] * times // parts
    return shape
