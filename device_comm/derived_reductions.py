"""BAND, BOR, BXOR and PREMUL_SUM: reductions made of a communicator's other calls, so every communicator has them.

For bitwise operations each rank combines all ranks' elements itself, which is exact in any order. A premultiplied sum
is a sum of products. Both give the same bits on every rank.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

import torch
import torch.distributed as dist

from device_comm import checks
from device_comm.base import SUM, DeviceCommunicator, Sizes, Timeout
from device_comm.handles import Handle
from device_comm.health import Operation
from device_comm.reduction import ReduceOperation, accumulation_dtype
from device_comm.stages import in_parts
from shm_broadcast.errors import UsageError

# Up to this size every rank gets everything; beyond it each combines a share, and the shares are gathered.
ONE_SHOT_BYTES: Final = 64 << 10


class BitwiseOperation(enum.Enum):
    """Reductions of the bits of integers and of bool."""

    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


@dataclasses.dataclass(frozen=True, eq=False)
class PremulSum:
    """The sum of each rank's tensor times that rank's factor; created by `premul_sum`.

    Attributes:
        factor: A number, or a tensor of one element; it may differ between ranks.
    """

    factor: float | torch.Tensor


Reduction: TypeAlias = ReduceOperation | BitwiseOperation | PremulSum

_COMBINE: Final[dict[BitwiseOperation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    BitwiseOperation.BAND: torch.Tensor.bitwise_and_,
    BitwiseOperation.BOR: torch.Tensor.bitwise_or_,
    BitwiseOperation.BXOR: torch.Tensor.bitwise_xor_,
}


def premul_sum(factor: float | torch.Tensor) -> PremulSum:
    """Return the reduction that multiplies this rank's tensor by `factor` and sums the products of all ranks.

    Products and sums of floating types of 16 bits or fewer are computed in float32 and rounded once, at the end.

    Raises:
        UsageError: The factor is neither a number nor a tensor of one element.
    """
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise UsageError(f"premul_sum: the factor must be one number, not of shape {tuple(factor.shape)}")
    elif isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise UsageError(f"premul_sum: the factor must be a number, not {factor!r}")
    return PremulSum(factor)


class Reducing(Protocol):
    """The reductions of a communicator, for any kind of `op`."""

    @property
    def all_reduce(self) -> Callable[..., torch.Tensor]:
        """Combine the ranks' tensors."""

    @property
    def all_reduce_(self) -> Callable[..., torch.Tensor]:
        """Combine the ranks' tensors in place."""

    @property
    def all_reduce_into_output(self) -> Callable[..., torch.Tensor]:
        """As `all_reduce`, into `output`."""

    @property
    def reduce(self) -> Callable[..., torch.Tensor | None]:
        """Combine the ranks' tensors on rank `dst`."""

    @property
    def reduce_scatter(self) -> Callable[..., torch.Tensor]:
        """Combine the ranks' tensors and keep this rank's part."""

    @property
    def reduce_scatterv(self) -> Callable[..., torch.Tensor]:
        """Combine the ranks' tensors and keep this rank's part, of `sizes[rank]`."""

    @property
    def reduce_scatterv_into_output(self) -> Callable[..., torch.Tensor]:
        """As `reduce_scatterv`, into `output`."""


def reducer(op: object, communicator: DeviceCommunicator) -> Reducing:
    """Return what reduces with `op`: the communicator itself, or one that is derived from it.

    Args:
        op: A `Reduction`, the name of one, or a `torch.distributed.ReduceOp`.
        communicator: The group's communicator.
    """
    if isinstance(op, ReduceOperation):
        return communicator
    derived = _derived(op)
    if derived is None:
        return communicator
    if isinstance(derived, PremulSum):
        return _Premultiplied(communicator, derived.factor)
    return _Bitwise(communicator, derived)


def _derived(op: object) -> BitwiseOperation | PremulSum | None:
    if isinstance(op, (BitwiseOperation, PremulSum)):
        return op
    if isinstance(op, str):
        return BitwiseOperation.__members__.get(op.upper())
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        for name, member in BitwiseOperation.__members__.items():
            if op == getattr(dist.ReduceOp, name):
                return member
        premultiplied: Any = dist.ReduceOp.PREMUL_SUM
        if isinstance(op, dist.ReduceOp) and op == premultiplied:
            # torch offers no other way to read the factor.
            state: Any = op.__getstate__()
            return premul_sum(state[1])
    return None


class _Derived(DeviceCommunicator):
    """A communicator whose reductions are made of another communicator's calls. It passes all else on to that one."""

    def __init__(self, communicator: DeviceCommunicator) -> None:
        super().__init__(communicator.context)
        self._communicator = communicator

    def _check_reduction(
        self, name: str, tensor: torch.Tensor, op: object, timeout_s: float | None
    ) -> ReduceOperation:
        """Check the arguments; the operation is not `op` but the one that this communicator was made for."""
        checks.check_tensor(tensor, self.device, name)
        checks.check_timeout(timeout_s)
        self._check_dtype(tensor.dtype)
        return SUM

    @abstractmethod
    def _check_dtype(self, dtype: torch.dtype) -> None:
        """Raise `UsageError` unless the reduction has a meaning for `dtype`."""

    def _all_gather(self, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout) -> torch.Tensor:
        return self._communicator.all_gatherv(input_, dim, sizes, timeout_s=timeout_s)

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: Timeout) -> torch.Tensor:
        return self._communicator.broadcast(tensor, src, timeout_s=timeout_s)

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: Timeout) -> Handle:
        return self._communicator.isend(tensor, dst, timeout_s=timeout_s)

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: Timeout) -> Handle:
        return self._communicator.irecv(tensor, src, timeout_s=timeout_s)

    def destroy(self) -> None:
        """Nothing to release: the other communicator is its group's."""


class _Premultiplied(_Derived):
    """Sums of products."""

    def __init__(self, communicator: DeviceCommunicator, factor: float | torch.Tensor) -> None:
        super().__init__(communicator)
        self._factor = factor

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise UsageError(f"PREMUL_SUM has no exact meaning for {dtype}")

    def _product(self, input_: torch.Tensor) -> torch.Tensor:
        wide = accumulation_dtype(input_.dtype)
        factor = self._factor
        if isinstance(factor, torch.Tensor):
            factor = factor.detach().to(device=input_.device, dtype=wide).view(())
        return input_.detach().to(wide) * factor

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: Timeout) -> torch.Tensor:
        return self._communicator.all_reduce(self._product(input_), timeout_s=timeout_s).to(input_.dtype)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor | None:
        result = self._communicator.reduce(self._product(input_), dst, timeout_s=timeout_s)
        return None if result is None else result.to(input_.dtype)

    def _reduce_scatter(
        self, input_: torch.Tensor, dim: int, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor:
        product = self._product(input_)
        return self._communicator.reduce_scatterv(product, dim, sizes, timeout_s=timeout_s).to(input_.dtype)


class _Bitwise(_Derived):
    """Bits, combined by each rank."""

    def __init__(self, communicator: DeviceCommunicator, op: BitwiseOperation) -> None:
        super().__init__(communicator)
        self._op = op

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype.is_floating_point or dtype.is_complex:
            raise UsageError(f"{self._op.name} has no meaning for {dtype}: view it as an integer dtype")

    def _fold(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        first, *others = parts
        return functools.reduce(_COMBINE[self._op], others, first.clone())

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: Timeout) -> torch.Tensor:
        size = self.world_size
        if size == 1:
            return input_
        flat = input_.detach().reshape(-1)
        if flat.nbytes <= ONE_SHOT_BYTES or size == 2:
            rows = self._all_gather(flat.view(1, -1), 0, (1,) * size, timeout_s)
            return self._fold(rows).view(input_.shape)
        share = -(-flat.numel() // size)
        padded = torch.nn.functional.pad(flat, (0, share * size - flat.numel()))

        def stages() -> torch.Tensor:
            own = self._reduce_scatter(padded, 0, (share,) * size, op, timeout_s)
            return self._all_gather(own, 0, (share,) * size, timeout_s)

        shares = in_parts(self.context.health, Operation("device", "all_reduce", 0), stages)
        return shares[: flat.numel()].view(input_.shape)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor | None:
        if self.world_size == 1:
            return input_
        row = input_.detach().reshape(1, -1)
        rows = self._communicator.gather(row, dst, 0, timeout_s=timeout_s)
        return None if rows is None else self._fold(rows).view(input_.shape)

    def _reduce_scatter(
        self, input_: torch.Tensor, dim: int, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor:
        if self.world_size == 1:
            return input_
        own = sizes[self.rank_in_group]
        received = self._communicator.all_to_all(
            input_.detach(), dim, sizes, (own,) * self.world_size, timeout_s=timeout_s
        )
        return self._fold(torch.split(received, own, dim) if own else [received]).contiguous()
