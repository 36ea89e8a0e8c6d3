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

Gradients flow through the calls on one tensor; through reductions if they sum or average. They are those of the sum of
all ranks' losses, and each rank must make the backward call too. Such a call waits for its result, whatever `overlap`
says. Calls on lists, and other reductions, raise `UsageError` for an input that requires grad while grad mode is on.

In a graph of `torch.compile` every call is one operation (see `compile_ops`). Pass the `GroupCoordinator` itself there.

Errors are those of the corresponding method of `GroupCoordinator`. A running call raises them where its result is
first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from coordinator import group_registry
from coordinator.gradients import wants_gradient
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
        strides = torch.empty(shape, device="meta").stride()
        made: Any = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch has no public equivalent
            cls, torch.Size(shape), strides=strides, dtype=like.dtype, device=like.device
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

    wait = trigger_wait

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
    if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
        group = group[0].get_group(group[1])
    elif hasattr(group, "get_group"):
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return [list(dist.get_process_group_ranks(group))]
    if isinstance(group, Sequence) and not isinstance(group, str) and group:
        if all(isinstance(rank, int) for rank in group):
            return [list(group)]
        if all(isinstance(ranks, Sequence) and not isinstance(ranks, str) for ranks in group):
            return [list(ranks) for ranks in group]
    raise UsageError(
        "group must be a GroupCoordinator, its name, a list of global ranks, a list of such lists, a process group, "
        f"a 1-D DeviceMesh or a pair (mesh, dimension), not {group!r}"
    )


def _call(
    name: str, tensor: torch.Tensor, group: Group, overlap: bool | None, **arguments: Any
) -> torch.Tensor:
    """Call the group's method `name`, or trace the call; `arguments` are in the order of the method's."""
    there = find_group(group)
    if torch.compiler.is_compiling():
        return compile_ops.trace(name, there, tensor, **arguments)
    tensor = wait_tensor(tensor)
    if wants_gradient(tensor):
        # One operation for autograd, which waits. A handle's result could not tell autograd where it comes from.
        return compile_ops.trace(name, there, tensor, **arguments)
    if name == "broadcast":
        # The method overwrites its input.
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    method = getattr(there, name)
    if overlap is None:
        overlap = tensor.is_cpu and tensor.nbytes > WAITED_FOR_BYTES
    if not overlap:
        result: torch.Tensor = method(tensor, **arguments)
        return result
    handle: CallHandle[torch.Tensor] = method(tensor, **arguments, async_op=True)
    refused = handle.failure()
    if refused is not None:
        raise refused
    # An accelerator is not asked: during a capture it may not be, and to wait for its call blocks no host.
    if tensor.is_cpu and handle.is_completed():
        return handle.wait()
    shape = compile_ops.result_shape(name, tensor, world_size=there.world_size, **arguments)
    return WaitingTensor(handle, shape, tensor)


def _call_on_list(
    name: str, tensors: Sequence[torch.Tensor], group: Group, **arguments: Any
) -> list[torch.Tensor]:
    """Make a call on several tensors; see `_call`."""
    there = find_group(group)
    if torch.compiler.is_compiling():
        return compile_ops.trace_list(name, there, tensors, **arguments)
    results: list[torch.Tensor] = getattr(there, name)([wait_tensor(each) for each in tensors], **arguments)
    return results


def _operation(op: Reduction | str) -> Any:
    return SUM if isinstance(op, str) and op in ("sum", "SUM") else op


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
    return _call("all_reduce", tensor, group, overlap, op=_operation(op))


def all_gather_tensor(
    tensor: torch.Tensor, gather_dim: int = 0, group: Group = "", *, overlap: bool | None = None
) -> torch.Tensor:
    """Concatenate the ranks' tensors along `gather_dim` in rank order; return a new tensor. Collective."""
    return _call("all_gather", tensor, group, overlap, dim=gather_dim)


def reduce_scatter_tensor(
    tensor: torch.Tensor,
    op: Reduction | str = SUM,
    scatter_dim: int = 0,
    group: Group = "",
    *,
    overlap: bool | None = None,
) -> torch.Tensor:
    """Reduce the ranks' tensors; return this rank's part along `scatter_dim` as a new tensor. Collective."""
    return _call("reduce_scatter", tensor, group, overlap, dim=scatter_dim, op=_operation(op))


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
    sizes = {"send_sizes": input_split_sizes, "recv_sizes": output_split_sizes}
    return _call("all_to_all", tensor, group, overlap, dim=0, **sizes)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: Group = "", *, overlap: bool | None = None
) -> torch.Tensor:
    """Return a new tensor with the values of rank `src` (rank in the group). Collective.

    Shape and dtype must be equal on all ranks.
    """
    return _call("broadcast", tensor, group, overlap, src=src)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Reduction | str = SUM, group: Group = ""
) -> list[torch.Tensor]:
    """Do `all_reduce` for several tensors in one round; return new tensors. Collective."""
    return _call_on_list("all_reduce_coalesced", tensors, group, op=_operation(op))


def all_gather_tensor_coalesced(
    tensors: Sequence[torch.Tensor], gather_dim: int = 0, group: Group = ""
) -> list[torch.Tensor]:
    """Do `all_gather_tensor` for several tensors in one round; return new tensors. Collective."""
    return _call_on_list("all_gather_coalesced", tensors, group, dim=gather_dim)


def reduce_scatter_tensor_coalesced(
    tensors: Sequence[torch.Tensor], op: Reduction | str = SUM, scatter_dim: int = 0, group: Group = ""
) -> list[torch.Tensor]:
    """Do `reduce_scatter_tensor` for several tensors in one round; return new tensors. Collective."""
    return _call_on_list("reduce_scatter_coalesced", tensors, group, dim=scatter_dim, op=_operation(op))
