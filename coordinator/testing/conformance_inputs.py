"""Inputs of the conformance checks, and the comparison of results.

Every input is a function of rank, shape, dtype and a salt, so each rank can compute the others' inputs and the
expected result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from device_comm.process_group import as_bytes
from device_comm.reduction import ReduceOperation, reduce_in_rank_order

DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)

# Above 64 KiB, where communicators may switch algorithms, and not a multiple of a usual world size.
LARGE_BYTES: Final = 66_003

# No usual shape has more elements than this.
_LEAST_LENGTH: Final = 1 << 17


def large_shape(dtype: torch.dtype) -> tuple[int]:
    """Return a 1-D shape of more than `LARGE_BYTES` bytes with an odd number of elements."""
    return (LARGE_BYTES // dtype.itemsize // 2 * 2 + 3,)


@dataclasses.dataclass(frozen=True)
class Case:
    """What distinguishes one checked call of a method from its other calls.

    Attributes:
        shape: Shape of this rank's input or, where the call fills a tensor, of that tensor.
        dtype: Its dtype.
        layout: Its layout, a name in `LAYOUTS`.
        op: The operation of a reduction.
        dim: The dimension along which the call works.
        passes_dim: Whether the call is given `dim`, which otherwise is the method's default.
        sizes: The split sizes that the call is given.
        root: The rank that the call names as source or destination.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    op: ReduceOperation = ReduceOperation.SUM
    dim: int = 0
    passes_dim: bool = True
    sizes: tuple[int, ...] | None = None
    root: int = 0

    def __str__(self) -> str:
        """Return the dtype, the shape and the layout."""
        return f"{self.dtype} {self.shape} {self.layout}"

    @property
    def dims(self) -> tuple[int, ...]:
        """Return `dim` if the call is given it."""
        return (self.dim,) if self.passes_dim else ()


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of all ranks.

    Attributes:
        rank: This process's rank in the group.
        world_size: Number of ranks.
        device: Device of this rank's inputs.
        alike: Whether every rank has this rank's inputs, as in a fake group.
    """

    rank: int
    world_size: int
    device: torch.device
    alike: bool
    # Cache of `of`: the checks use few inputs many times, and computing them would dominate the run.
    _made: dict[tuple[Any, ...], torch.Tensor] = dataclasses.field(
        default_factory=dict, repr=False, compare=False, init=False
    )

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
        """Return the input of `rank`, in host memory."""
        key = (self.rank if self.alike else rank, tuple(shape), dtype, salt)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = _values(*key)
        return made.clone()

    def own(self, shape: Sequence[int], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
        """Return this rank's input, on the device."""
        return self.of(self.rank, shape, dtype, salt).to(self.device)

    def all(self, shape: Sequence[int], dtype: torch.dtype, salt: int = 0) -> list[torch.Tensor]:
        """Return every rank's input, in host memory, in rank order."""
        return [self.of(rank, shape, dtype, salt) for rank in range(self.world_size)]

    def uneven(
        self, shape: Sequence[int], dim: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return every rank's input where rank i has `sizes[i]` in dimension `dim`."""
        shapes = [[*shape[:dim], size, *shape[dim + 1 :]] for size in sizes]
        if not self.alike:
            return [self.of(rank, each, dtype) for rank, each in enumerate(shapes)]
        own = self.of(self.rank, shapes[self.rank], dtype)
        return [repeated(own, dim, size) for size in sizes]


def repeated(part: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return what a rank of a fake group brings: `part`, repeated along `dim` up to `size`; zeros if it is empty."""
    count = part.shape[dim]
    if count:
        return torch.cat([part] * -(-max(size, 1) // count), dim).narrow(dim, 0, size)
    shape = list(part.shape)
    shape[dim] = size
    return part.new_zeros(shape)


def _values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int) -> torch.Tensor:
    if dtype.is_complex:
        real = _values(rank, shape, dtype.to_real(), salt)
        return torch.complex(real, _values(rank, shape, dtype.to_real(), salt + 77))
    numel = torch.Size(shape).numel()
    length = max(_LEAST_LENGTH, 1 << max(numel - 1, 0).bit_length())
    if dtype.is_floating_point:
        values = _reals(rank, salt, length)[:numel].clone()
        _place_specials(values, rank)
        return values.to(dtype).view(shape)
    mixed = _integers(rank, salt, length)[:numel]
    if dtype is torch.bool:
        return (mixed % 3 == 0).view(shape)
    limits = torch.iinfo(dtype)
    span = min(int(limits.max) - int(limits.min) + 1, 1 << 31)  # a power of two
    return ((mixed & (span - 1)) + max(int(limits.min), -(1 << 30))).to(dtype).view(shape)


# All shapes of a rank and a salt share these numbers: making them for each shape took half of a rank's processor time.
@functools.lru_cache(maxsize=32)
def _integers(rank: int, salt: int, length: int) -> torch.Tensor:
    places = torch.arange(length, dtype=torch.int64) + 1
    mixed = (places * 2654435761 + rank * 40503 * 65537 + salt * 97003) % 2147483647
    return (mixed * 48271) % 2147483647


@functools.lru_cache(maxsize=32)
def _reals(rank: int, salt: int, length: int) -> torch.Tensor:
    """Return numbers with full mantissas and several magnitudes: another order of summation changes their sum."""
    mixed = _integers(rank, salt, length)
    return ((mixed % 2003) - 1001) / 487.3 * torch.exp2(((mixed >> 11) % 7 - 3).double())


def _place_specials(values: torch.Tensor, rank: int) -> None:
    """Put zeros of both signs, NaN, infinities and a tiny number near the end of a tensor of 32 elements or more."""
    if values.numel() < 32:
        return
    infinity = float("inf")
    values[-1] = -0.0
    values[-2] = -0.0 if rank % 2 else 0.0
    values[-3] = 0.0 if rank % 2 else -0.0
    values[-6] = 1e-40
    if rank == 0:
        values[-4] = float("nan")
    values[-5] = -infinity if rank else infinity
    values[3] = values[-2]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values as every second element of a larger buffer."""
    buffer = tensor.new_zeros((*tensor.shape, 2))
    buffer[..., 1] = tensor
    return buffer[..., 1]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with the order of the dimensions in memory reversed."""
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, contiguous, one element after the start of their storage."""
    buffer = tensor.new_zeros(tensor.numel() + 1)
    view = buffer[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def conjugated(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values; if they are complex, as a lazily conjugated view of their conjugates."""
    return tensor.conj_physical().conj() if tensor.is_complex() else tensor.clone()


LAYOUTS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "contiguous": torch.clone,
    "strided": strided,
    "transposed": transposed,
    "shifted": shifted,
    "conjugated": conjugated,
}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's elements as bytes [elements, itemsize], in C order and host memory."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()
    return as_bytes(plain).view(plain.numel(), plain.itemsize)


def reduction(
    parts: Sequence[torch.Tensor], op: ReduceOperation, *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the expected result and the absolute tolerance per element; None requires equal bits."""
    expected = reduce_in_rank_order(parts, op)
    dtype = expected.dtype
    if exact or not (dtype.is_floating_point or dtype.is_complex):
        return expected, None
    if op in (ReduceOperation.MIN, ReduceOperation.MAX):
        return expected, torch.zeros(expected.shape, dtype=torch.float64)
    wide = [(part.to(torch.complex128) if dtype.is_complex else part.double()).abs() for part in parts]
    kind = ReduceOperation.PRODUCT if op is ReduceOperation.PRODUCT else ReduceOperation.SUM
    limits = torch.finfo(dtype)
    return expected, reduce_in_rank_order(wide, kind) * (2 * len(parts) * limits.eps) + limits.tiny


def difference(result: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor | None = None) -> str | None:
    """Return a description of how values differ, or None if they are equal.

    NaN equals NaN. Without `slack` all other values must have equal bits. With `slack`, zeros of both signs are equal,
    and where a complex result is not finite any value passes, because its components depend on the order.
    """
    got = result.detach().cpu()
    if slack is None:
        wrong = (raw(got) != raw(expected)).any(1) & ~(got.isnan() & expected.isnan()).reshape(-1)
    else:
        got_wide, wide = _components(got), _components(expected)
        far = ~((got_wide - wide).abs() <= slack.reshape(-1, 1))
        unequal = (got_wide != wide) & ~(got_wide.isnan() & wide.isnan())
        wrong = (far & unequal).any(1)
        if expected.is_complex():
            wrong &= wide.isfinite().all(1)
    count = int(wrong.sum())
    if count == 0:
        return None
    at = int(wrong.nonzero()[0])
    got_text, expected_text = (_element(each, at) for each in (got, expected))
    return (
        f"{count} of {wrong.numel()} elements are wrong; element {at} is {got_text}, expected {expected_text}"
    )


def _components(tensor: torch.Tensor) -> torch.Tensor:
    """Return [elements, components] in double precision."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj().to(torch.complex128)).reshape(-1, 2)
    return tensor.double().reshape(-1, 1)


def _element(tensor: torch.Tensor, at: int) -> str:
    value = tensor.reshape(-1)[at]
    return repr((value.float() if value.is_floating_point() else value).item())
