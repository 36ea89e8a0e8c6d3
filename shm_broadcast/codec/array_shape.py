"""Check the shape of every array and tensor in a message before memory is allocated for it."""

import math
from collections.abc import Sequence

from shm_broadcast.codec.wire_format import MAX_DIMENSIONS
from shm_broadcast.errors import DecodeError

__all__ = ["checked_shape"]

_LARGEST = (1 << 63) - 1


def checked_shape(shape: Sequence[object], itemsize: int, nbytes: int) -> list[int]:
    """Return `shape` if an array of that shape holds exactly `nbytes`.

    Args:
        shape: Dimensions as the peer sent them.
        itemsize: Bytes per element.
        nbytes: Bytes that arrived.

    Raises:
        DecodeError: A dimension is not a non-negative 63-bit integer, there are more than `MAX_DIMENSIONS`, or
            the sizes disagree.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise DecodeError(f"an array has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    sizes = [size for size in shape if type(size) is int and 0 <= size <= _LARGEST]
    if len(sizes) != len(shape):
        raise DecodeError("a dimension of an array is not a natural number")
    if itemsize * math.prod(size for size in sizes if size) > _LARGEST:
        raise DecodeError("an array is larger than the address space")
    if math.prod(sizes) * itemsize != nbytes:
        raise DecodeError(f"an array of shape {sizes} and {itemsize} bytes per element got {nbytes} bytes")
    return sizes
