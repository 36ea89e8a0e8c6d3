"""What the ranks of a stress life send, derived from its seed alone, and what must arrive."""

import math
import random
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from coordinator import ReduceOperation

__all__ = ["MOST_BYTES", "MismatchError", "Model", "check_same", "combined", "joined"]

SUMMED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
MOVED = (*SUMMED, torch.uint8, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
MOST_BYTES = 3 << 20
"""The largest tensor: three records of a channel, twelve slots of a region."""


class MismatchError(AssertionError):
    """Something arrived that the model does not expect."""


class Model:
    """What happens in one step of one life. Every rank derives the same from the same seed."""

    def __init__(self, seed: str, places: str) -> None:
        """Derive everything from `seed`, which names the life and the step.

        Args:
            seed: The seed.
            places: A letter for the host of each rank.
        """
        self.plan = random.Random(seed)
        self.places = places
        self.world_size = len(places)
        self._seed = seed

    @property
    def is_apart(self) -> bool:
        """Whether the ranks are on several hosts."""
        return len(set(self.places)) > 1

    def inner(self, what: str, places: str | None = None) -> "Model":
        """Return the model of a part of the step, with a plan of its own, for ranks at these places or at the same."""
        return Model(str(self.private(what).random()), places or self.places)

    def reduced(self, operation: ReduceOperation, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the reduction that a collective must give: each host's ranks are combined first, then the hosts."""
        hosts = [
            [rank for rank, each in enumerate(self.places) if each == place]
            for place in dict.fromkeys(self.places)
        ]
        return combined(operation, inputs, hosts)

    def rank(self) -> int:
        """Choose a rank."""
        return self.plan.randrange(self.world_size)

    def count(self, most: int = MOST_BYTES // 8) -> int:
        """Choose a number of elements: mostly few, sometimes none, sometimes more than a slot or a record holds."""
        if self.plan.random() < 0.05:
            return 0
        return int(math.exp(self.plan.uniform(0.0, math.log(most * self.plan.choice((0.001, 0.05, 1.0))))))

    def dtype(self, *, summed: bool = False) -> torch.dtype:
        """Choose the dtype of a tensor that is moved, or summed."""
        return self.plan.choice(SUMMED if summed else MOVED)

    @staticmethod
    def dtype_of(source: random.Random) -> torch.dtype:
        """Choose the dtype of a tensor that is moved by another generator than the plan."""
        return source.choice(MOVED)

    def private(self, what: object) -> random.Random:
        """Return a generator for something that only one rank decides, or that must not advance the plan."""
        return random.Random(f"{self._seed}/{what}")

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *whose: object) -> torch.Tensor:
        """Return the tensor that `whose` names; every rank can make those of all others."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{whose}".encode()))
        if dtype.is_complex or dtype in (torch.float32, torch.float64):
            return torch.randn(*shape, dtype=dtype, generator=generator)
        if dtype.is_floating_point:
            return torch.randn(*shape, generator=generator).to(dtype)
        if dtype == torch.bool:
            return torch.randint(0, 2, tuple(shape), generator=generator, dtype=torch.uint8).bool()
        return torch.randint(-100 if dtype != torch.uint8 else 0, 100, tuple(shape), generator=generator).to(
            dtype
        )

    def object(self, *whose: object) -> Any:
        """Return the object that `whose` names."""
        return self._object(self.private(whose), 3)

    def _object(self, source: random.Random, depth: int) -> Any:
        kind = source.randrange(7 if depth == 0 else 11)
        match kind:
            case 0:
                return source.choice((None, True, False, 1.5, -0.0, math.inf, ""))
            case 1:
                return source.randrange(-(1 << 70), 1 << 70)
            case 2:
                return "é" * source.randrange(40)
            case 3 | 4:
                return source.randbytes(self._length(source))
            case 5:
                return bytearray(source.randbytes(self._length(source)))
            case 6:
                number = source.randrange(1 << 30)
                return self.tensor((self._length(source) // 4,), source.choice(MOVED), "in an object", number)
        inner = [self._object(source, depth - 1) for _ in range(source.randrange(5))]
        match kind:
            case 7:
                return inner
            case 8:
                return tuple(inner)
            case 9:
                return {source.randrange(1000) for _ in inner}
        return {f"key {at}" if at % 2 else at: value for at, value in enumerate(inner)}

    def _length(self, source: random.Random) -> int:
        """Choose a length; a buffer of 2048 bytes goes out of band."""
        return source.randrange(source.choice((20, 3000, 3000, 100_000)))


def combined(
    operation: ReduceOperation, inputs: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]] | None = None
) -> torch.Tensor:
    """Return a reduction in rank order, by the hosts of the ranks if these are given; halves in float32, rounded once.

    A mean is divided once at the end.
    """
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    parts = [each.to(wide) for each in inputs]
    total = _folded(
        operation,
        [_folded(operation, [parts[rank] for rank in ranks]) for ranks in hosts or [range(len(parts))]],
    )
    if operation is ReduceOperation.MEAN:
        total /= len(inputs)
    return total.to(dtype)


def _folded(operation: ReduceOperation, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for each in parts[1:]:
        match operation:
            case ReduceOperation.PRODUCT:
                total *= each
            case ReduceOperation.MIN:
                total = torch.minimum(total, each)
            case ReduceOperation.MAX:
                total = torch.maximum(total, each)
            case _:
                total += each
    return total


def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return the tensors one after the other; torch cannot concatenate all 8-bit floats, but their bytes."""
    dtype = tensors[0].dtype
    return torch.cat([each.view(torch.uint8) if dtype.itemsize == 1 else each for each in tensors], dim).view(
        dtype
    )


def check_same(found: Any, expected: Any, what: str) -> None:
    """Compare type, structure and every byte.

    Raises:
        MismatchError: They differ; the text says where and how.
    """
    if type(found) is not type(expected):
        raise MismatchError(
            f"{what}: a {type(found).__name__} arrived instead of a {type(expected).__name__}"
        )
    if isinstance(expected, torch.Tensor):
        _check_tensor(found, expected, what)
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            raise MismatchError(f"{what}: {len(found)} elements instead of {len(expected)}")
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_same(one, other, f"{what}[{at}]")
    elif isinstance(expected, dict):
        check_same(list(found), list(expected), f"{what}: keys")
        for key, value in expected.items():
            check_same(found[key], value, f"{what}[{key!r}]")
    elif found != expected:
        raise MismatchError(f"{what}: {repr(found)[:200]} instead of {repr(expected)[:200]}")


def _check_tensor(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise MismatchError(
            f"{what}: {found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        )
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (found, expected))
    if not torch.equal(one, other):
        wrong = (one != other).nonzero().reshape(-1)
        raise MismatchError(
            f"{what}: {len(wrong)} of {len(one)} bytes differ, the first at {wrong[0]} "
            f"({found.dtype} {tuple(found.shape)})"
        )
