"""Reductions that are made of other calls, so that every communicator has them: BAND, BOR, BXOR and PREMUL_SUM.

Bits are combined by each rank from all ranks' elements, which is exact in any order; a premultiplied sum is a sum of
products. So the same bits on every rank here too.
"""

from __future__ import annotations

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch
import torch.distributed as dist

from device_comm import checks
from device_comm.base import SUM, DeviceCommunicator
from device_comm.reduction import ReduceOperation, accumulation_dtype
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
    """The sum of what each rank brings times its own factor; `premul_sum` makes one.

    Attributes:
        factor: A number, or a tensor of one element; ranks may bring different ones.
    """

    factor: float | torch.Tensor


Reduction: TypeAlias = ReduceOperation | BitwiseOperation | PremulSum

_COMBINE: Final[dict[BitwiseOperation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    BitwiseOperation.BAND: torch.Tensor.bitwise_and_,
    BitwiseOperation.BOR: torch.Tensor.bitwise_or_,
    BitwiseOperation.BXOR: torch.Tensor.bitwise_xor_,
}


def premul_sum(factor: float | torch.Tensor) -> PremulSum:
    """Return the reduction that multiplies what this rank brings by `factor`, and sums.

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
    """What reduces tensors, with the methods of a communicator: one, or reductions made of its calls."""

    @property
    def all_reduce(self) -> Callable[..., torch.Tensor]:
        """Combine the ranks' tensors."""

    @property
    def all_reduce_(self) -> Callable[..., torch.Tensor]:
        """Combine the ranks' tensors in place."""

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
    """Return what reduces with `op`: the communicator itself, or what is made of its calls.

    Args:
        op: One of ours, its name, or one of `torch.distributed`.
        communicator: The group's.
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
            # The only way in which torch gives the factor away.
            state: Any = op.__getstate__()
            return premul_sum(state[1])
    return None


class _Derived(ABC):
    """What all derived reductions have in common: each is made of the first three calls."""

    def __init__(self, communicator: DeviceCommunicator) -> None:
        self._communicator = communicator

    @abstractmethod
    def all_reduce(
        self, input_: torch.Tensor, op: Any = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor: ...

    @abstractmethod
    def reduce(
        self, input_: torch.Tensor, dst: int = 0, op: Any = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor | None: ...

    @abstractmethod
    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Any = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor: ...

    def all_reduce_(
        self, tensor: torch.Tensor, op: Any = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        checks.check_tensor(tensor, self._communicator.device, "all_reduce_")
        checks.check_writable(tensor, "all_reduce_")
        tensor.detach().copy_(self.all_reduce(tensor, timeout_s=timeout_s))
        return tensor

    def reduce_scatter(
        self, input_: torch.Tensor, dim: int = -1, op: Any = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        return self.reduce_scatterv(input_, dim, timeout_s=timeout_s)

    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Any = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        name, size = "reduce_scatterv_into_output", self._communicator.world_size
        for tensor in (input_, output):
            checks.check_tensor(tensor, self._communicator.device, name)
        at, shape = checks.check_dim(dim, input_), list(input_.shape) or [1]
        shape[at] = (
            self._split(input_, at, sizes)[self._communicator.rank_in_group] if size > 1 else shape[at]
        )
        checks.check_output(output, shape, input_.dtype)
        checks.check_writable(output, name)
        checks.check_no_overlap(input_, output, name)
        result = self.reduce_scatterv(input_, dim, sizes, timeout_s=timeout_s)
        output.detach().copy_(result.view(output.shape))
        return output

    def _split(self, input_: torch.Tensor, at: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
        size = self._communicator.world_size
        if sizes is None:
            checks.check_divisible(input_, at, size)
            return ((input_.shape[at] if input_.dim() else 1) // size,) * size
        counts = checks.check_sizes(sizes, size)
        checks.check_total_size(input_, at, counts)
        return counts


class _Premultiplied(_Derived):
    """Sums of products."""

    def __init__(self, communicator: DeviceCommunicator, factor: float | torch.Tensor) -> None:
        super().__init__(communicator)
        self._factor = factor

    def _product(self, input_: torch.Tensor, name: str) -> torch.Tensor:
        checks.check_tensor(input_, self._communicator.device, name)
        if not (input_.is_floating_point() or input_.is_complex()):
            raise UsageError(f"PREMUL_SUM has no exact meaning for {input_.dtype}")
        wide = accumulation_dtype(input_.dtype)
        factor = self._factor
        if isinstance(factor, torch.Tensor):
            factor = factor.detach().to(device=input_.device, dtype=wide).view(())
        return input_.detach().to(wide) * factor

    def all_reduce(
        self, input_: torch.Tensor, op: Any = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        product = self._product(input_, "all_reduce")
        return self._communicator.all_reduce(product, timeout_s=timeout_s).to(input_.dtype)

    def reduce(
        self, input_: torch.Tensor, dst: int = 0, op: Any = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor | None:
        result = self._communicator.reduce(self._product(input_, "reduce"), dst, timeout_s=timeout_s)
        return None if result is None else result.to(input_.dtype)

    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Any = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        product = self._product(input_, "reduce_scatter")
        return self._communicator.reduce_scatterv(product, dim, sizes, timeout_s=timeout_s).to(input_.dtype)


class _Bitwise(_Derived):
    """Bits, combined by each rank."""

    def __init__(self, communicator: DeviceCommunicator, op: BitwiseOperation) -> None:
        super().__init__(communicator)
        self._op = op

    def _checked(self, input_: torch.Tensor, name: str) -> torch.Tensor:
        checks.check_tensor(input_, self._communicator.device, name)
        dtype = input_.dtype
        if dtype.is_floating_point or dtype.is_complex:
            raise UsageError(f"{self._op.name} has no meaning for {dtype}: view it as an integer dtype")
        return input_.detach()

    def _fold(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        combined = parts[0].clone()
        for part in parts[1:]:
            _COMBINE[self._op](combined, part)
        return combined

    def all_reduce(
        self, input_: torch.Tensor, op: Any = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        source, there = self._checked(input_, "all_reduce"), self._communicator
        if there.world_size == 1:
            return input_
        flat = source.reshape(-1)
        if flat.nbytes <= ONE_SHOT_BYTES or there.world_size == 2:
            rows = there.all_gather(flat.view(1, -1), 0, timeout_s=timeout_s)
            return self._fold(list(rows)).view(source.shape)
        share = -(-flat.numel() // there.world_size)
        padded = torch.nn.functional.pad(flat, (0, share * there.world_size - flat.numel()))
        own = self.reduce_scatterv(padded, 0, timeout_s=timeout_s)
        return there.all_gather(own, 0, timeout_s=timeout_s)[: flat.numel()].view(source.shape)

    def reduce(
        self, input_: torch.Tensor, dst: int = 0, op: Any = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor | None:
        source, there = self._checked(input_, "reduce"), self._communicator
        if there.world_size == 1:
            return there.gather(input_, dst, timeout_s=timeout_s)
        rows = there.gather(source.reshape(1, -1), dst, 0, timeout_s=timeout_s)
        return None if rows is None else self._fold(list(rows)).view(source.shape)

    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: Any = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        source, there = self._checked(input_, "reduce_scatter"), self._communicator
        at = checks.check_dim(dim, source)
        counts = self._split(source, at, sizes)
        if there.world_size == 1:
            return input_
        own = counts[there.rank_in_group]
        received = there.all_to_all(source, at, counts, (own,) * there.world_size, timeout_s=timeout_s)
        return self._fold(torch.split(received, own, at) if own else [received]).contiguous()
