"""Communicators that each break one clause of the contract."""

from typing import Any

import torch

from coordinator.testing import FakeCommunicator
from device_comm.fused.fp8 import quantised_rows
from device_comm.handles import CompletedHandle
from device_comm.process_group import ProcessGroupCommunicator
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from shm_broadcast.errors import UsageError


class ReducesInPlace(FakeCommunicator):
    def _all_reduce(self, input_: Any, op: Any, timeout_s: Any) -> Any:
        return input_.copy_(super()._all_reduce(input_, op, timeout_s))


class SpoilsItsInput(FakeCommunicator):
    def _all_gather(self, input_: Any, *arguments: Any) -> Any:
        result = super()._all_gather(input_, *arguments)
        input_.zero_()
        return result


class ReturnsItsInput(FakeCommunicator):
    def _all_reduce(self, input_: Any, op: Any, timeout_s: Any) -> Any:
        if op is ReduceOperation.MAX:
            return input_
        return super()._all_reduce(input_, op, timeout_s)


class ReusesItsBuffer(FakeCommunicator):
    buffer = torch.zeros(1 << 20)

    def _all_reduce(self, input_: Any, op: Any, timeout_s: Any) -> Any:
        result = super()._all_reduce(input_, op, timeout_s)
        if result.dtype != torch.float32:
            return result
        return self.buffer[: result.numel()].copy_(result.view(-1)).view(result.shape)


class IgnoresDim(FakeCommunicator):
    def _all_gather(self, input_: Any, dim: Any, *arguments: Any) -> Any:
        return super()._all_gather(input_, 0, *arguments)


class IgnoresLayout(FakeCommunicator):
    def _all_gather(self, input_: Any, *arguments: Any) -> Any:
        memory = input_.as_strided(input_.shape, torch.empty(input_.shape).stride())
        return super()._all_gather(memory, *arguments)


class KeepsZeroDimensions(FakeCommunicator):
    def _gather(self, input_: Any, dst: int, dim: int, timeout_s: Any) -> Any:
        result = super()._gather(input_, dst, dim, timeout_s)
        return result[0] if result is not None and input_.dim() == 0 else result


class ReturnsViews(FakeCommunicator):
    def _all_gather(self, input_: Any, dim: int, *arguments: Any) -> Any:
        moved = super()._all_gather(input_.reshape(input_.shape or 1).movedim(dim, 0), 0, *arguments)
        return moved.movedim(0, dim)


class GathersEverywhere(FakeCommunicator):
    def _gather(self, input_: Any, dst: int, dim: int, timeout_s: Any) -> Any:
        return super()._gather(input_, self.rank_in_group, dim, timeout_s)


class ComputesNarrowly(FakeCommunicator):
    def _all_reduce(self, input_: Any, op: Any, timeout_s: Any) -> Any:
        if input_.dtype is torch.bfloat16 and op is ReduceOperation.PRODUCT:
            return input_ * input_ * input_ * input_
        return super()._all_reduce(input_, op, timeout_s)


class LosesNaN(FakeCommunicator):
    def _all_reduce(self, input_: Any, op: Any, timeout_s: Any) -> Any:
        result = super()._all_reduce(input_, op, timeout_s)
        return result.nan_to_num() if op is ReduceOperation.MAX and result.dtype is torch.float32 else result


class WritesBesides(FakeCommunicator):
    def all_reduce_(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        tensor.untyped_storage().fill_(1)
        return super().all_reduce_(tensor, *arguments, **named)


class CopiesInsteadOfInPlace(FakeCommunicator):
    def all_reduce_(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        return self.all_reduce(tensor, *arguments, **named)


class TakesTheFirstPart(FakeCommunicator):
    def _reduce_scatter(self, input_: Any, dim: int, sizes: Any, op: Any, timeout_s: Any) -> Any:
        whole = super()._all_reduce(input_, op, timeout_s).reshape(input_.shape or 1)
        return whole.narrow(dim, 0, sizes[self.rank_in_group]).contiguous()


class SplitsEvenly(FakeCommunicator):
    def reduce_scatterv(self, input_: Any, dim: int = -1, sizes: Any = None, *rest: Any, **named: Any) -> Any:
        return self.reduce_scatter(input_, dim, *rest, **named)


class PadsSizes(FakeCommunicator):
    def _all_gather(self, input_: Any, dim: int, sizes: Any, timeout_s: Any) -> Any:
        return super()._all_gather(input_, dim, (max(sizes),) * len(sizes), timeout_s)


class ReturnsAnotherOutput(FakeCommunicator):
    def reduce_scatterv_into_output(self, *arguments: Any, **named: Any) -> Any:
        return super().reduce_scatterv_into_output(*arguments, **named).clone()


class ReturnsWithoutWriting(FakeCommunicator):
    """Forgets that a contiguous output is not written by the call that returns a new tensor."""

    def _all_gather_into(self, output: Any, input_: Any, *arguments: Any) -> None:
        self._all_gather(input_, *arguments)


class WritesPastTheLayout(FakeCommunicator):
    """Takes an output for contiguous memory, whatever its strides."""

    def _all_to_all_into(self, output: Any, input_: Any, *arguments: Any) -> None:
        result = self._all_to_all(input_, *arguments)
        output.as_strided((output.numel(),), (1,)).copy_(result.view(-1))


class SumsIntoItsInput(FakeCommunicator):
    def _all_reduce_into(self, output: Any, input_: Any, *arguments: Any) -> None:
        super()._all_reduce_into(output, input_, *arguments)
        input_.copy_(output)


class RefusesInPlace(FakeCommunicator):
    def reduce_scatterv_into_output(self, input_: Any, output: Any, *arguments: Any, **named: Any) -> Any:
        if output.untyped_storage().data_ptr() == input_.untyped_storage().data_ptr():
            raise UsageError("an output in the input")
        return super().reduce_scatterv_into_output(input_, output, *arguments, **named)


class BroadcastsIntoACopy(FakeCommunicator):
    def _broadcast(self, tensor: Any, src: int, timeout_s: Any) -> Any:
        return tensor.clone()


class SendsByReference(FakeCommunicator):
    def _isend(self, tensor: Any, dst: int, timeout_s: Any) -> Any:
        super()._isend(tensor, dst, timeout_s)
        tensor.zero_()
        return CompletedHandle()


class ReceivesFlat(FakeCommunicator):
    def recv(self, size: Any, dtype: Any, *arguments: Any, **named: Any) -> Any:
        return super().recv(size, dtype, *arguments, **named).view(-1)


class ForgetsScatteredDestinations(FakeCommunicator):
    def _irecv(self, tensor: Any, src: int, timeout_s: Any) -> Any:
        return super()._irecv(tensor.contiguous(), src, timeout_s)


class Once:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        if self.handle is None:
            raise RuntimeError("waited for twice")
        self.handle.wait()
        self.handle = None


class HandlesOnce(FakeCommunicator):
    def _irecv(self, tensor: Any, src: int, timeout_s: Any) -> Any:
        return Once(super()._irecv(tensor, src, timeout_s))


class NeverComplete(CompletedHandle):
    def is_completed(self) -> bool:
        return False


class HandlesNeverComplete(FakeCommunicator):
    def _isend(self, tensor: Any, dst: int, timeout_s: Any) -> Any:
        super()._isend(tensor, dst, timeout_s)
        return NeverComplete()


class ReducesEverywhere(FakeCommunicator):
    def _reduce(self, input_: Any, dst: int, op: Any, timeout_s: Any) -> Any:
        return self._all_reduce(input_, op, timeout_s)


class ReducesIntoItsInput(FakeCommunicator):
    """Writes the sum into its input, as `torch.distributed.reduce` does."""

    def _reduce(self, input_: Any, dst: int, op: Any, timeout_s: Any) -> Any:
        result = super()._reduce(input_, dst, op, timeout_s)
        return result if result is None else input_.copy_(result)


class ReducesBySumOnly(FakeCommunicator):
    def _reduce(self, input_: Any, dst: int, op: Any, timeout_s: Any) -> Any:
        return super()._reduce(input_, dst, ReduceOperation.SUM, timeout_s)


class AcceptsAnyDestination(FakeCommunicator):
    def reduce(self, input_: Any, dst: Any = 0, op: Any = ReduceOperation.SUM, **named: Any) -> Any:
        return super().reduce(input_, dst if dst in range(self.world_size) else 0, op, **named)


class ScattersTheFirstPart(FakeCommunicator):
    def _scatter(self, output: Any, input_: Any, src: int, dim: int, sizes: Any, timeout_s: Any) -> None:
        if input_ is not None:
            output.copy_(input_.narrow(dim, 0, sizes[self.rank_in_group]).reshape(output.shape))


class ScattersIntoACopy(FakeCommunicator):
    def scatter(self, output: Any, *arguments: Any, **named: Any) -> Any:
        return super().scatter(output, *arguments, **named).clone()


class SpoilsWhatItScatters(FakeCommunicator):
    def _scatter(self, output: Any, input_: Any, *arguments: Any) -> None:
        super()._scatter(output, input_, *arguments)
        if input_ is not None:
            input_.zero_()


class ScattersBesides(FakeCommunicator):
    def _scatter(self, output: Any, input_: Any, *arguments: Any) -> None:
        if input_ is not None and not output.is_contiguous():
            output.untyped_storage().fill_(1)
        super()._scatter(output, input_, *arguments)


class ScattersByList(FakeCommunicator):
    """Demands an input on every rank."""

    def scatter(self, output: Any, input_: Any = None, src: Any = 0, *rest: Any, **named: Any) -> Any:
        if input_ is None and src in range(self.world_size) and src != self.rank_in_group:
            raise UsageError("scatter: expected a tensor")
        return super().scatter(output, input_, src, *rest, **named)


class AcceptsOverlaps(FakeCommunicator):
    def scatter(self, output: Any, input_: Any = None, *rest: Any, **named: Any) -> Any:
        aside = input_.clone() if isinstance(input_, torch.Tensor) else input_
        return super().scatter(output, aside, *rest, **named)


class ExchangesEvenly(FakeCommunicator):
    def all_to_all(
        self, input_: Any, dim: int = 0, send_sizes: Any = None, recv_sizes: Any = None, **named: Any
    ) -> Any:
        return super().all_to_all(input_, dim, recv_sizes and send_sizes, recv_sizes and send_sizes, **named)


class TakesItsFirstParts(FakeCommunicator):
    def _all_to_all(self, input_: Any, dim: int, sent: Any, received: Any, timeout_s: Any) -> Any:
        return input_.reshape(input_.shape or 1).narrow(dim, 0, sum(received)).clone()


class ReturnsWhatItSends(FakeCommunicator):
    """Returns its input, whose shape is right wherever all parts are equal."""

    def _all_to_all(self, input_: Any, dim: int, sent: Any, received: Any, timeout_s: Any) -> Any:
        return input_.copy_(super()._all_to_all(input_, dim, sent, received, timeout_s))


class ExchangesAlongTheFirst(FakeCommunicator):
    def _all_to_all(self, input_: Any, dim: int, *arguments: Any) -> Any:
        return super()._all_to_all(input_.movedim(dim, 0), 0, *arguments).movedim(0, dim)


class GuessesSizes(FakeCommunicator):
    def all_to_all(
        self, input_: Any, dim: int = 0, send_sizes: Any = None, recv_sizes: Any = None, **named: Any
    ) -> Any:
        return super().all_to_all(input_, dim, send_sizes, recv_sizes or send_sizes, **named)


class QuantisesBeforeRounding(FakeCommunicator):
    """Normalises in float32 throughout, which is more precise and has other bits."""

    def _all_reduce_add_rms_norm_fp8(
        self, input_: Any, residual: Any, weight: Any, eps: Any, scale: Any, timeout_s: Any
    ) -> Any:
        _, total = self._all_reduce_add_rms_norm(input_, residual, weight, eps, timeout_s)
        wide = total.float()
        normed = wide * torch.rsqrt((wide * wide).mean(1, keepdim=True) + eps) * weight.float()
        return *quantised_rows(normed, scale), total


class SwapsNibbles(FakeCommunicator):
    def _all_reduce_add_rms_norm_nvfp4(self, *arguments: Any) -> Any:
        packed, *others = super()._all_reduce_add_rms_norm_nvfp4(*arguments)
        return packed >> 4 | packed << 4, *others


class ForgetsTheSharedExpert(FakeCommunicator):
    def _moe_finalize_all_reduce(
        self, expert_out: Any, rows: Any, weights: Any, shared: Any, timeout_s: Any
    ) -> Any:
        return super()._moe_finalize_all_reduce(expert_out, rows, weights, None, timeout_s)


class AcceptsAnyScale(FakeCommunicator):
    def all_reduce_add_rms_norm_fp8(
        self, input_: Any, residual: Any, weight: Any, eps: Any, scale: Any = None, **named: Any
    ) -> Any:
        given = None if isinstance(scale, torch.Tensor) and scale.numel() != 1 else scale
        return super().all_reduce_add_rms_norm_fp8(input_, residual, weight, eps, given, **named)


class AcceptsEverything(FakeCommunicator):
    def gather(self, input_: Any, dst: Any = 0, dim: int = -1, *, timeout_s: Any = None) -> Any:
        return self._gather(input_, dst, dim, timeout_s)


class RaisesTypeError(FakeCommunicator):
    def broadcast(self, tensor: Any, src: Any = 0, **named: Any) -> Any:
        if not isinstance(src, int):
            raise TypeError("src")
        return super().broadcast(tensor, src, **named)


class BreaksByARefusal(FakeCommunicator):
    offended = False

    def all_reduce(self, *arguments: Any, **named: Any) -> Any:
        if self.offended:
            raise RuntimeError("offended")
        return super().all_reduce(*arguments, **named)

    def all_reduce_(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super().all_reduce_(*arguments, **named)
        except UsageError:
            self.offended = True
            raise


class DestroyedOnce(FakeCommunicator):
    alive = True

    def destroy(self) -> None:
        if not self.alive:
            raise RuntimeError("destroyed already")
        self.alive = False


WRONG_FAKES: dict[type[FakeCommunicator], set[str]] = {
    ReducesInPlace: {"all_reduce: input unchanged"},
    SpoilsItsInput: {"all_gather: input unchanged"},
    ReturnsItsInput: {"all_reduce: value", "all_reduce: new memory"},
    ReusesItsBuffer: {"all_reduce: new memory"},
    IgnoresDim: {"all_gather: shape"},
    IgnoresLayout: {"all_gather: value", "all_gather: no error"},
    KeepsZeroDimensions: {"gather: shape"},
    ReturnsViews: {"all_gather: contiguous"},
    GathersEverywhere: {"gather: shape"},
    ComputesNarrowly: {"all_reduce: value"},
    LosesNaN: {"all_reduce: value"},
    WritesBesides: {"all_reduce_: value", "all_reduce_: nothing else written"},
    CopiesInsteadOfInPlace: {"all_reduce_: returns its argument"},
    TakesTheFirstPart: {"reduce_scatter: value"},
    SplitsEvenly: {"reduce_scatterv: shape", "reduce_scatterv: no error"},
    PadsSizes: {"all_gatherv: shape"},
    ReturnsAnotherOutput: {"reduce_scatterv_into_output: returns its argument"},
    BroadcastsIntoACopy: {"broadcast: returns its argument"},
    SendsByReference: {"send: input unchanged"},
    ReceivesFlat: {"recv: shape"},
    ForgetsScatteredDestinations: {"irecv: value"},
    HandlesOnce: {"irecv: no error"},
    HandlesNeverComplete: {"irecv: handle"},
    ReducesEverywhere: {"reduce: shape"},
    ReducesIntoItsInput: {"reduce: input unchanged"},
    ReducesBySumOnly: {"reduce: value", "reduce: no error"},
    AcceptsAnyDestination: {"reduce: refusal"},
    ScattersTheFirstPart: {"scatter: value"},
    ScattersIntoACopy: {"scatter: returns its argument"},
    SpoilsWhatItScatters: {"scatter: input unchanged"},
    ScattersBesides: {"scatter: nothing else written"},
    ScattersByList: {"scatter: no error"},
    AcceptsOverlaps: {"scatter: refusal"},
    ExchangesEvenly: {"all_to_all: shape"},
    TakesItsFirstParts: {"all_to_all: value"},
    ReturnsWhatItSends: {"all_to_all: input unchanged"},
    ExchangesAlongTheFirst: {"all_to_all: contiguous"},
    GuessesSizes: {"all_to_all: refusal"},
    ReturnsWithoutWriting: {"all_gatherv_into_output: value"},
    WritesPastTheLayout: {"all_to_all_into_output: value"},
    SumsIntoItsInput: {"all_reduce_into_output: input unchanged"},
    RefusesInPlace: {"reduce_scatterv_into_output: no error"},
    QuantisesBeforeRounding: {"all_reduce_add_rms_norm_fp8: value"},
    SwapsNibbles: {"all_reduce_add_rms_norm_nvfp4: value"},
    ForgetsTheSharedExpert: {"moe_finalize_all_reduce: value"},
    AcceptsAnyScale: {"all_reduce_add_rms_norm_fp8: refusal"},
    AcceptsEverything: {"gather: refusal"},
    RaisesTypeError: {"broadcast: refusal"},
    BreaksByARefusal: {"all_reduce_: usable after a refusal"},
    DestroyedOnce: {"destroy: no error"},
}
"""What each is to be convicted of; where two clauses are broken at once, either may be found first."""


# --- those that only other ranks can convict ------------------------------------------------------------------


class SumsBackwards(ProcessGroupCommunicator):
    """Sums in reverse rank order: all ranks agree, but on other bits."""

    def parts_in_order(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return parts[::-1]

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        gathered = self._all_gather(input_.reshape(1, -1), 0, (1,) * self.world_size, timeout_s)
        return reduce_in_rank_order(self.parts_in_order(list(gathered)), op).view(input_.shape)


class SumsFromItself(SumsBackwards):
    """Sums like a ring that starts at each rank itself, so the bits differ between ranks."""

    def parts_in_order(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return parts[self.rank_in_group :] + parts[: self.rank_in_group]


class GathersInTheWrongOrder(ProcessGroupCommunicator):
    def _all_gather(self, input_: Any, dim: int, sizes: Any, timeout_s: Any) -> Any:
        result = super()._all_gather(input_, dim, sizes, timeout_s)
        if self.rank_in_group == 1 and len(set(sizes)) == 1:
            return torch.cat(list(reversed(result.split(sizes[0], dim))), dim)
        return result


class ForgetsTheLastRank(ProcessGroupCommunicator):
    def _broadcast(self, tensor: Any, src: int, timeout_s: Any) -> Any:
        if src != self.rank_in_group == self.world_size - 1:
            super()._broadcast(tensor.clone(), src, timeout_s)
            return tensor
        return super()._broadcast(tensor, src, timeout_s)


class ReducesFromItself(ProcessGroupCommunicator):
    """Reduces like a tree that starts at the root, so the bits depend on the destination."""

    def _reduce(self, input_: Any, dst: int, op: Any, timeout_s: Any) -> Any:
        gathered = list(self._all_gather(input_.reshape(1, -1), 0, (1,) * self.world_size, timeout_s))
        if self.rank_in_group != dst:
            return None
        return reduce_in_rank_order(gathered[dst:] + gathered[:dst], op).view(input_.shape)


class ScattersBackwards(ProcessGroupCommunicator):
    def _scatter(self, output: Any, input_: Any, src: int, dim: int, sizes: Any, timeout_s: Any) -> None:
        if input_ is not None and len(set(sizes)) == 1:
            parts = input_.reshape(input_.shape or 1).split(sizes[0] or 1, dim)
            input_ = torch.cat(parts[::-1], dim)
        super()._scatter(output, input_, src, dim, sizes, timeout_s)


class ExchangesInTheOrderOfArrival(ProcessGroupCommunicator):
    """Rank 1 puts its own part first because it is available at once."""

    def _all_to_all(self, input_: Any, dim: int, sent: Any, received: Any, timeout_s: Any) -> Any:
        result = super()._all_to_all(input_, dim, sent, received, timeout_s)
        if self.rank_in_group != 1 or result.numel() == 0:
            return result
        parts = list(result.split(list(received), dim))
        return torch.cat([parts.pop(1), *parts], dim)


class SendsBackwards(ProcessGroupCommunicator):
    def _isend(self, tensor: Any, dst: int, timeout_s: Any) -> Any:
        return super()._isend(tensor.flip(0) if tensor.shape == (2, 3) else tensor, dst, timeout_s)


class BlocksInIrecv(ProcessGroupCommunicator):
    def _irecv(self, tensor: Any, src: int, timeout_s: Any) -> Any:
        handle = super()._irecv(tensor, src, timeout_s)
        handle.wait()
        return handle


WRONG_OVER_GLOO = {
    SumsBackwards: ("all_reduce: value", [0, 1, 2]),
    SumsFromItself: ("all_reduce: value", [1, 2]),
    GathersInTheWrongOrder: ("all_gather: value", [1]),
    ForgetsTheLastRank: ("broadcast: value", [2]),
    ReducesFromItself: ("reduce: value", [1, 2]),
    ScattersBackwards: ("scatter: value", [0, 2]),
    ExchangesInTheOrderOfArrival: ("all_to_all: value", [1]),
    SendsBackwards: ("irecv: value", [0, 1, 2]),
}
"""Of what each is convicted, and on which of three ranks."""
