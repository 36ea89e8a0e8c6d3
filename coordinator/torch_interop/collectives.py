"""The collectives of a group under the names and with the signatures by which torch calls a process group."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from coordinator.calls import Calls
from coordinator.torch_interop import sparse
from coordinator.torch_interop.works import CallWork, seconds
from device_comm import checks, coalesced
from device_comm.base import DeviceCommunicator, Timeout
from device_comm.derived_reductions import Reduction, reducer
from device_comm.health import SLICE_S, Operation
from device_comm.outputs import fill
from device_comm.reduction import ReduceOperation
from device_comm.stages import BUSY, NESTED, in_parts, until, without_place
from device_comm.works import WaiterThreads
from shm_broadcast.errors import CommError, UsageError
from shm_broadcast.interruption import is_held
from shm_broadcast.turn import TakenError, Turn

Tensors: TypeAlias = Sequence[torch.Tensor]
Arguments = ParamSpec("Arguments")
Own = TypeVar("Own", bound="TorchCollectives")
Result = TypeVar("Result")

# torch's enumeration on the left. Comparing its values takes 0.8 us each, which a dict saves.
_PLAIN: Final[dict[Any, ReduceOperation]] = {
    dist.ReduceOp.SUM: ReduceOperation.SUM,
    dist.ReduceOp.AVG: ReduceOperation.MEAN,
    dist.ReduceOp.PRODUCT: ReduceOperation.PRODUCT,
    dist.ReduceOp.MIN: ReduceOperation.MIN,
    dist.ReduceOp.MAX: ReduceOperation.MAX,
}

if TYPE_CHECKING:
    # torch's stub declares other signatures than those that torch calls.
    class ProcessGroupBase:
        """What a process group of ours takes from torch's class."""

        def __init__(self, rank: int, size: int) -> None:
            """Create the part that is torch's."""

        def rank(self) -> int:
            """Return the rank in the group."""

        def size(self) -> int:
            """Return the number of ranks."""
else:
    ProcessGroupBase = dist.ProcessGroup


def _device_of(values: Sequence[Any]) -> str | None:
    """Return the device type of the first tensor in a call's arguments, which may be lists of tensors or of lists."""
    for value in values:
        found = value
        while isinstance(found, (list, tuple)) and found:
            found = found[0]
        if isinstance(found, torch.Tensor):
            return found.device.type
    return None


def _kept(value: Any) -> Any:
    """Return a list of our own, which the caller cannot change while its call is open; another value itself."""
    return [_kept(each) for each in value] if isinstance(value, list) else value


def routed(
    method: Callable[Concatenate[Own, Arguments], Result],
) -> Callable[Concatenate[Own, Arguments], Result]:
    """Make a method keep its lists, and pass a call on tensors of another device type on to what serves that type."""

    @functools.wraps(method)
    def call(self: Own, /, *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        device = _device_of(args)
        if device is None or device == self.device_type:
            # A blocking call is over before its caller can change anything.
            is_open = getattr(options.get("opts", args[-1] if args else None), "asyncOp", True)
            return method(self, *(map(_kept, args) if is_open else args), **options)
        there: Callable[Arguments, Result] = getattr(self.beside(device), method.__name__)
        return there(*args, **options)

    return call


class TorchCollectives(ProcessGroupBase):
    """The collectives that torch calls, by torch's names. Ranks are ranks in the group.

    Attributes:
        device_type: Device type of the tensors that the group moves itself.
        default_s: Deadline of a call that states none, in seconds; None for the group's.
    """

    device_type: str = "cpu"
    default_s: Timeout = None

    def __init__(
        self,
        rank: int,
        size: int,
        calls: Calls,
        communicator: Callable[[], DeviceCommunicator],
        threads: WaiterThreads | None,
    ) -> None:
        """Make calls of a group that exists.

        Args:
            rank: Rank in the group.
            size: Number of ranks.
            calls: The group's gate.
            communicator: Returns its device plane.
            threads: Where callbacks of futures run; None: on the group's own thread, where they must not wait.
        """
        super().__init__(rank, size)
        self._calls = calls
        self._communicator = communicator
        self._threads = threads
        # A blocking call in one thread and the group's own thread may meet; torch's groups allow that.
        self._turn = threading.RLock()
        # Entered again and again: making one takes 0.4 us of the 8 us of a small sum.
        self._in_line = Turn(self._turn, SLICE_S)

    def beside(self, device: str) -> dist.ProcessGroup:
        """Return the process group of the same ranks for tensors on `device`."""
        raise UsageError(
            f"{self._where}: the tensors are on {device}, this group's device is {self.device_type}"
        )

    def translated(self, error: CommError, within_s: Timeout = None) -> Exception:
        """Return what torch's callers get for `error`; `within_s` is the call's own deadline, if it has one."""
        del within_s
        return error

    @property
    def _where(self) -> str:
        return f"process group (rank {self.rank()} of {self.size()})"

    def _run(
        self,
        name: str,
        opts: Any,
        call: Callable[[DeviceCommunicator, Timeout], Any],
        outputs: Sequence[Any],
        *inputs: Any,
        is_loop: bool = False,
    ) -> CallWork:
        """Make or queue a call of the group's communicator, with the deadline that `opts` states.

        `outputs` and `inputs` hold all tensors that the call uses. `is_loop` says that it makes a collective for each
        output, so that an error between two of them leaves it halfway.
        """
        own_s = None if opts is None else seconds(opts.timeout)
        timeout_s = self.default_s if own_s is None else own_s
        translate = self.translated if timeout_s is None else partial(self.translated, within_s=timeout_s)
        try:
            is_several = is_loop and len(outputs) > 1
            make = partial(self._in_turn, name, call, self._communicator(), is_several, (outputs, inputs))
            is_later = getattr(opts, "asyncOp", True)
            made = self._calls.run(name, make, timeout_s=timeout_s, async_op=is_later)
        except CommError as error:
            raise translate(error) from error
        return CallWork(made if is_later else None, outputs, self._threads, translate)

    def _in_turn(
        self,
        name: str,
        call: Callable[[DeviceCommunicator, Timeout], Any],
        there: DeviceCommunicator,
        is_several: bool,
        _tensors: object,
        *,
        timeout_s: Timeout,
    ) -> None:
        """Make the call, which may be several of the communicator, behind those of other threads, within the deadline.

        An asynchronous call finds its tensors in the arguments, to keep their memory.
        """
        health = there.context.health
        if is_held(self._turn):
            raise without_place(health, name, NESTED)
        # Only a call that has to wait asks for the time: this is a part of each small sum.
        end: float | None = None
        while True:
            try:
                with self._in_line:
                    limit_s = timeout_s if end is None else until(end)
                    if is_several:
                        in_parts(health, Operation("device", name, 0), partial(call, there, limit_s))
                    else:
                        call(there, limit_s)
                    return
            except TakenError:
                health.check_usable(name)
                now = time.monotonic()
                end = now - SLICE_S + (timeout_s or there.context.timeout_s) if end is None else end
                if now >= end:
                    raise without_place(health, name, BUSY) from None

    # ------------------------------------------------------------------ reductions

    @routed
    def allreduce(self, tensors: Tensors, opts: Any = None) -> CallWork:
        """All-reduce each tensor in place; sparse tensors of the COO layout too, with SUM."""
        op = _reduction(opts)

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            for tensor in tensors:
                if tensor.layout is torch.sparse_coo:
                    sparse.all_reduce_(there, tensor, op, timeout_s)
                else:
                    reducer(op, there).all_reduce_(tensor, op, timeout_s=timeout_s)

        return self._run("all_reduce", opts, call, tensors, is_loop=True)

    @routed
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> CallWork:
        """All-reduce several tensors in place, in one round for each dtype."""
        op = _reduction(opts)

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            _fill_all(tensors, coalesced.all_reduce(there, tensors, op, timeout_s=timeout_s))

        return self._run("all_reduce_coalesced", opts, call, tensors)

    @routed
    def reduce(self, tensors: Tensors, opts: Any) -> CallWork:
        """Reduce to the root, in place there; the other ranks' tensors stay as they are."""
        op, root = _reduction(opts), opts.rootRank

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            for tensor in tensors:
                result = reducer(op, there).reduce(tensor, root, op, timeout_s=timeout_s)
                if result is not None:
                    _fill(tensor, result)

        return self._run("reduce", opts, call, tensors, is_loop=True)

    @routed
    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[torch.Tensor | Tensors], opts: Any = None
    ) -> CallWork:
        """Reduce each input, a tensor or a list of one tensor per rank, and keep this rank's part."""
        op = _reduction(opts)

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                _scatter_sum(there, output, whole, op, timeout_s)

        return self._run("reduce_scatter", opts, call, outputs, inputs, is_loop=True)

    @routed
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> CallWork:
        """Reduce several tensors, and keep this rank's part of the first dimension of each."""
        return self.reduce_scatter(outputs, inputs, opts)

    @routed
    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> CallWork:
        """Do `reduce_scatter_single_coalesced`, by torch's older name."""
        return self.reduce_scatter(outputs, inputs, opts)

    @routed
    def reduce_scatter_single(self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None) -> CallWork:
        """Reduce, and keep this rank's part of the first dimension."""
        return self.reduce_scatter([output], [input_], opts)

    @routed
    def _reduce_scatter_base(self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None) -> CallWork:
        return self.reduce_scatter([output], [input_], opts)

    # ------------------------------------------------------------------ moving data

    @routed
    def broadcast(self, tensors: Tensors, opts: Any) -> CallWork:
        """Overwrite each tensor with the root's."""
        root = opts.rootRank

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            for tensor in tensors:
                there.broadcast(tensor, root, timeout_s=timeout_s)

        return self._run("broadcast", opts, call, tensors, is_loop=True)

    @routed
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> CallWork:
        """Gather every rank's tensor into a list of one tensor per rank."""

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                _fill_all(parts, there.all_gather(own.unsqueeze(0), 0, timeout_s=timeout_s))

        return self._run("all_gather", opts, call, outputs, inputs, is_loop=True)

    @routed
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> CallWork:
        """Gather every rank's tensors; `outputs` holds for each rank a list of one tensor per input."""

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            rows = [own.unsqueeze(0) for own in inputs]
            for at, whole in enumerate(coalesced.all_gather(there, rows, 0, timeout_s=timeout_s)):
                _fill_all([each[at] for each in outputs], whole)

        return self._run("all_gather_coalesced", opts, call, outputs, inputs)

    @routed
    def all_gather_single(self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None) -> CallWork:
        """Gather every rank's tensor into one tensor, in rank order."""
        return self.all_gather_single_coalesced([output], [input_], opts)

    @routed
    def _allgather_base(self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None) -> CallWork:
        return self.all_gather_single_coalesced([output], [input_], opts)

    @routed
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CallWork:
        """Do `all_gather_single` for several tensors."""

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            for output, own in zip(outputs, inputs, strict=True):
                _gather_rows(there, output, own.reshape(1, -1), timeout_s)

        return self._run("all_gather", opts, call, outputs, inputs, is_loop=True)

    @routed
    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> CallWork:
        """Do `all_gather_single_coalesced`, by torch's older name."""
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    @routed
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> CallWork:
        """Gather every rank's tensor on the root, into a list of one tensor per rank."""
        root = opts.rootRank

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            rows = there.gather(inputs[0].unsqueeze(0), root, 0, timeout_s=timeout_s)
            _fill_all(outputs[0] if outputs else (), () if rows is None else rows)

        return self._run("gather", opts, call, outputs, inputs)

    @routed
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> CallWork:
        """Fill the output with this rank's tensor of the root's list."""
        source = torch.cat([each.reshape(-1) for each in inputs[0]]) if inputs else None
        root = opts.rootRank

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            landing = outputs[0].detach().new_empty(outputs[0].numel())
            _fill(outputs[0], there.scatter(landing, source, root, timeout_s=timeout_s))

        return self._run("scatter", opts, call, outputs, source)

    @routed
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> CallWork:
        """Send the i-th part of the first dimension to rank i."""
        size = self.size()
        sent = list(input_split_sizes) or [input_.shape[0] // size] * size
        received = list(output_split_sizes) or [output.shape[0] // size] * size

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            if _is_direct(output, input_, (sum(received), *input_.shape[1:])):
                there.all_to_all_into_output(input_, output, 0, sent, received, timeout_s=timeout_s)
                return
            _fill(output, there.all_to_all(input_, 0, sent, received, timeout_s=timeout_s))

        return self._run("all_to_all", opts, call, [output], input_)

    @routed
    def alltoall_base(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> CallWork:
        """Do `all_to_all_single`, by torch's older name."""
        return self.all_to_all_single(output, input_, output_split_sizes, input_split_sizes, opts)

    @routed
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CallWork:
        """Send the i-th tensor to rank i; all have the same dtype."""

        def call(there: DeviceCommunicator, timeout_s: Timeout) -> None:
            whole = torch.cat([each.reshape(-1) for each in inputs])
            sent, received = ([each.numel() for each in tensors] for tensors in (inputs, outputs))
            result = there.all_to_all(whole, 0, sent, received, timeout_s=timeout_s)
            _fill_all(outputs, torch.split(result, received))

        return self._run("all_to_all", opts, call, outputs, inputs)


def _reduction(opts: Any) -> Reduction:
    if opts is None:
        return ReduceOperation.SUM
    op = opts.reduceOp
    # `reducer` reads torch's other operations.
    chosen: Reduction = _PLAIN.get(op.op, op)
    return chosen


def _fill(output: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copy `result` into `output`, which may have another shape, and return `output`."""
    fill(output, result)
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


__all__ = ["ProcessGroupBase", "Tensors", "TorchCollectives", "routed"]
