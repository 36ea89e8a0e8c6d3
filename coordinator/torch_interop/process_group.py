"""Present a group to torch as a `ProcessGroup`: calls from torch's functions become calls of the group."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group
from torch.distributed.distributed_c10d import GroupName

from coordinator.calls import Calls
from device_comm import checks, coalesced
from device_comm.base import DeviceCommunicator, Timeout
from device_comm.derived_reductions import reducer
from device_comm.handles import Handle
from shm_broadcast.errors import ClosedError, UsageError

__all__ = ["register"]

if TYPE_CHECKING:
    from device_comm.async_calls import CallHandle

BACKEND: Final = "group_coordinator"

Tensors = Sequence[torch.Tensor]


class Group(Protocol):
    """What torch's calls need of a `GroupCoordinator`."""

    unique_name: str
    ranks: list[int]
    rank_in_group: int
    world_size: int
    device: torch.device
    device_communicator: DeviceCommunicator

    def barrier(self, timeout_s: float | None = None, *, async_op: Any = False) -> Any:
        """Wait for all ranks."""

    def isend(self, tensor: torch.Tensor, dst: int | None = None, *, tag: int = 0) -> Handle:
        """Start to send a tensor."""

    def irecv(self, tensor: torch.Tensor, src: int | None = None, *, tag: int = 0) -> Handle:
        """Start to receive a tensor."""

    def recv_any(self, size: torch.Size, dtype: torch.dtype, *, tag: int = 0) -> tuple[torch.Tensor, int]:
        """Receive a tensor from any rank."""


class _Work(dist.Work):
    """A running or completed call, with the methods by which torch waits for it."""

    def __init__(self, handle: CallHandle[Any] | None = None) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is complete; raise the error that it raised."""
        if self._handle is not None:
            self._handle.wait(_seconds(timeout))
        return True

    def is_completed(self) -> bool:
        """Return whether the call is complete; raise the error that it raised."""
        return self._handle is None or self._handle.is_completed()

    def is_success(self) -> bool:
        """Return whether the call is complete and has not failed."""
        return self.is_completed()

    def synchronize(self) -> None:
        """Wait for the call."""
        self.wait()

    def get_future(self) -> Any:
        """Return torch's future of the outputs."""
        if self._handle is not None:
            return self._handle.get_future()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class _TransferWork(dist.Work):
    """A send or a receive."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait with the transfer's own deadline; `timeout` is ignored."""
        del timeout
        self._handle.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the transfer is complete."""
        return self._handle.is_completed()


class _AnyWork(dist.Work):
    """A receive from any rank, carried out inside `wait`."""

    def __init__(self, receive: Callable[[], int]) -> None:
        super().__init__()
        self._receive: Callable[[], int] | None = receive
        self._source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Receive, with the group's deadline; `timeout` is ignored."""
        del timeout
        receive, self._receive = self._receive, None
        if receive is not None:
            self._source = receive()
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` was called."""
        return self._receive is None

    def _source_rank(self) -> int:
        return self._source


if TYPE_CHECKING:
    # torch's stub declares other signatures than those that torch calls.
    class _ProcessGroup:
        def __init__(self, rank: int, size: int) -> None: ...
        def size(self) -> int: ...
else:
    _ProcessGroup = dist.ProcessGroup


class CoordinatorProcessGroup(_ProcessGroup):
    """The methods that torch calls, by torch's names. Ranks are ranks in the group."""

    def __init__(self, group: Group, calls: Calls) -> None:
        """Wrap `group`; call `register` instead."""
        super().__init__(group.rank_in_group, group.world_size)
        # torch keeps a process group until it is destroyed. A weak reference lets an unused group be collected.
        self._group = weakref.ref(group)
        self._calls = calls
        self._name = f"{group.unique_name} as a process group"

    @property
    def coordinator(self) -> Group:
        """Return the group.

        Raises:
            ClosedError: It no longer exists.
        """
        group = self._group()
        if group is None:
            raise ClosedError(f"{self._name}: the group no longer exists")
        return group

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torch finds the group."""
        return self._name

    def shutdown(self) -> None:
        """Do nothing: the group's own `destroy` ends it."""

    abort = shutdown

    def _run(
        self, name: str, opts: Any, call: Callable[[DeviceCommunicator, Timeout], Any], device: str = "cpu"
    ) -> _Work:
        """Make or queue a call of the group's communicator, with the deadline that `opts` states."""
        make = partial(call, self.coordinator.device_communicator)
        timeout_s = None if opts is None else _seconds(opts.timeout)
        is_later = getattr(opts, "asyncOp", True) and device == "cpu"
        made = self._calls.run(name, make, timeout_s=timeout_s, async_op=is_later)
        return _Work(made if is_later else None)

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Work:
        """All-reduce each tensor in place."""
        op = _reduction(opts)

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> list[torch.Tensor]:
            return [reducer(op, there).all_reduce_(tensor, op, timeout_s=timeout_s) for tensor in tensors]

        return self._run("all_reduce", opts, call, tensors[0].device.type)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> _Work:
        """All-reduce several tensors in place, in one round."""
        op = _reduction(opts)

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> list[torch.Tensor]:
            return _fill_all(tensors, coalesced.all_reduce(there, tensors, op, timeout_s=timeout_s))

        return self._run("all_reduce_coalesced", opts, call)

    def reduce(self, tensors: Tensors, opts: Any) -> _Work:
        """Reduce to the root, in place there."""
        op = opts.reduceOp

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> list[torch.Tensor]:
            for tensor in tensors:
                result = reducer(op, there).reduce(tensor, opts.rootRank, op, timeout_s=timeout_s)
                if result is not None:
                    _fill(tensor, result)
            return list(tensors)

        return self._run("reduce", opts, call, tensors[0].device.type)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[torch.Tensor | Tensors], opts: Any = None
    ) -> _Work:
        """Reduce each input, a tensor or a list of one tensor per rank, and keep this rank's part."""
        op = _reduction(opts)

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> list[torch.Tensor]:
            return [
                _scatter_sum(there, output, whole, op, timeout_s)
                for output, whole in zip(outputs, inputs, strict=True)
            ]

        return self._run("reduce_scatter", opts, call, outputs[0].device.type)

    reduce_scatter_single_coalesced = reduce_scatter
    reduce_scatter_tensor_coalesced = reduce_scatter

    def reduce_scatter_single(self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None) -> _Work:
        """Reduce, and keep this rank's part of the first dimension."""
        op = _reduction(opts)

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> torch.Tensor:
            return _scatter_sum(there, output, input_, op, timeout_s)

        return self._run("reduce_scatter", opts, call, output.device.type)

    _reduce_scatter_base = reduce_scatter_single

    # ------------------------------------------------------------------ moving data

    def broadcast(self, tensors: Tensors, opts: Any) -> _Work:
        """Overwrite each tensor with the root's."""

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> list[torch.Tensor]:
            return [there.broadcast(tensor, opts.rootRank, timeout_s=timeout_s) for tensor in tensors]

        return self._run("broadcast", opts, call, tensors[0].device.type)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Work:
        """Gather every rank's tensor into a list of one tensor per rank."""

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                _fill_all(parts, there.all_gather(own.unsqueeze(0), 0, timeout_s=timeout_s))

        return self._run("all_gather", opts, call, inputs[0].device.type)

    def all_gather_single(self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None) -> _Work:
        """Gather every rank's tensor into one tensor, in rank order."""
        return self.all_gather_single_coalesced([output], [input_], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        """Do `all_gather_single` for several tensors."""

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> list[torch.Tensor]:
            return [
                _gather_rows(there, output, own.reshape(1, -1), timeout_s)
                for output, own in zip(outputs, inputs, strict=True)
            ]

        return self._run("all_gather", opts, call, inputs[0].device.type)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> _Work:
        """Gather every rank's tensor on the root, into a list of one tensor per rank."""

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            rows = there.gather(inputs[0].unsqueeze(0), opts.rootRank, 0, timeout_s=timeout_s)
            _fill_all(outputs[0] if outputs else (), () if rows is None else rows)

        return self._run("gather", opts, call, inputs[0].device.type)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> _Work:
        """Fill the output with this rank's tensor of the root's list."""
        source = torch.cat([each.reshape(-1) for each in inputs[0]]) if inputs else None

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            landing = outputs[0].detach().new_empty(outputs[0].numel())
            _fill(outputs[0], there.scatter(landing, source, opts.rootRank, timeout_s=timeout_s))

        return self._run("scatter", opts, call, outputs[0].device.type)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> _Work:
        """Send the i-th part of the first dimension to rank i."""
        size = self.size()
        sent = list(input_split_sizes) or [input_.shape[0] // size] * size
        received = list(output_split_sizes) or [output.shape[0] // size] * size

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> torch.Tensor:
            if _is_direct(output, input_, (sum(received), *input_.shape[1:])):
                there.all_to_all_into_output(input_, output, 0, sent, received, timeout_s=timeout_s)
                return output
            return _fill(output, there.all_to_all(input_, 0, sent, received, timeout_s=timeout_s))

        return self._run("all_to_all", opts, call, output.device.type)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        """Send the i-th tensor to rank i; all have the same dtype."""

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            whole = torch.cat([each.reshape(-1) for each in inputs])
            sent, received = ([each.numel() for each in tensors] for tensors in (inputs, outputs))
            result = there.all_to_all(whole, 0, sent, received, timeout_s=timeout_s)
            _fill_all(outputs, torch.split(result, received))

        return self._run("all_to_all", opts, call, inputs[0].device.type)

    def barrier(self, opts: Any = None) -> _Work:
        """Wait for all ranks."""
        timeout_s = None if opts is None else _seconds(opts.timeout)
        if getattr(opts, "asyncOp", True):
            return _Work(self.coordinator.barrier(timeout_s, async_op=True))
        self.coordinator.barrier(timeout_s)
        return _Work()

    # ------------------------------------------------------------------ point to point

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> _TransferWork:  # noqa: N803 - torch's name
        """Start a send."""
        return _TransferWork(self.coordinator.isend(tensors[0], dstRank, tag=tag))

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> _TransferWork:  # noqa: N803 - torch's name
        """Start a receive."""
        return _TransferWork(self.coordinator.irecv(tensors[0], srcRank, tag=tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> _AnyWork:
        """Receive from any rank, inside the work's `wait`."""
        group = self.coordinator

        def receive() -> int:
            tensor, src = group.recv_any(tensors[0].shape, tensors[0].dtype, tag=tag)
            tensors[0].detach().copy_(tensor)
            return src

        return _AnyWork(receive)


def _reduction(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _fill(output: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copy `result` into `output`, which may have another shape, and return `output`."""
    output.detach().copy_(result.view(output.shape))
    return output


def _fill_all(outputs: Tensors, results: Tensors | torch.Tensor) -> list[torch.Tensor]:
    return [_fill(output, result) for output, result in zip(outputs, results, strict=True)]


def _is_direct(output: torch.Tensor, input_: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return whether a call can write its result of `shape` to the output. torch takes others too, which are copied."""
    return (
        output.is_contiguous()
        and tuple(output.shape) == tuple(shape)
        and output.dtype is input_.dtype
        and not checks.share_memory(output, input_)
    )


def _gather_rows(
    there: DeviceCommunicator, output: torch.Tensor, row: torch.Tensor, timeout_s: Timeout
) -> torch.Tensor:
    """Fill the output with every rank's row, in rank order."""
    if output.is_contiguous() and output.numel() == row.numel() * there.world_size:
        rows = output.detach().view(there.world_size, -1)
        if _is_direct(rows, row, rows.shape):
            there.all_gatherv_into_output(row, rows, 0, timeout_s=timeout_s)
            return output
    return _fill(output, there.all_gather(row, 0, timeout_s=timeout_s))


def _scatter_sum(
    there: DeviceCommunicator,
    output: torch.Tensor,
    input_: torch.Tensor | Tensors,
    op: Any,
    timeout_s: Timeout,
) -> torch.Tensor:
    whole = input_ if isinstance(input_, torch.Tensor) else torch.stack(list(input_))
    rows = whole.reshape(there.world_size, -1)
    row = output.detach().view(1, -1) if output.is_contiguous() else output
    if _is_direct(row, rows, (1, rows.shape[1])):
        reducer(op, there).reduce_scatterv_into_output(rows, row, 0, op=op, timeout_s=timeout_s)
        return output
    return _fill(output, reducer(op, there).reduce_scatter(rows, 0, op, timeout_s=timeout_s))


def register(group: Group, calls: Calls) -> dist.ProcessGroup:
    """Register a group with torch, until the returned process group is destroyed.

    Args:
        group: The group.
        calls: Its gate, which calls by torch pass too.

    Raises:
        UsageError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise UsageError("as_process_group: torch.distributed is not initialised")
    made: Any = CoordinatorProcessGroup(group, calls)
    torch_world: Any = dist.distributed_c10d
    world, tag = torch_world._world, f"ptd:{made.getGroupName()}"
    world.pg_map[made] = (BACKEND, torch_world._get_default_store())
    world.pg_names[made] = made.getGroupName()
    world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(group.ranks)}
    world.pg_backend_config[made] = f"{group.device.type}:{BACKEND}"
    world.pg_to_tag[made] = tag
    world.tags_to_pg.setdefault(tag, []).append(made)
    world.tags_to_pg.setdefault("", []).append(made)
    _register_process_group(GroupName(made.getGroupName()), made)
    return cast("dist.ProcessGroup", made)


def _seconds(timeout: timedelta | None) -> float | None:
    """Return torch's timeout in seconds; None if it is absent, zero or negative, which means unset."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()
