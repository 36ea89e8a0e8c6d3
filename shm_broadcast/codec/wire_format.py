"""Types and numbers of the codec's wire format that Python and the native core share."""

from collections.abc import Callable
from typing import Any, Final

__all__ = ["MAX_DIMENSIONS", "Builder", "Code", "DataBuilder", "Describer", "Description", "Refusal"]

Description = tuple[int, object, object]
"""What the native encoder writes for a type that it does not know: (code, meta, body)."""

Describer = Callable[[Any], Description]
"""Returns the description of an object of one type."""

Builder = Callable[[object, object], object]
"""Builds an object from (meta, body)."""

DataBuilder = Callable[[object, object, bool], object]
"""Builds an object from (meta, raw data, whether to copy)."""

MAX_DIMENSIONS: Final = 64
"""Most dimensions of an array or tensor: numpy's limit, and `kMaxDimensions` of the native core."""


class Code:
    """Extension codes of types that Python builds. The native core owns codes below 16; from 64 on the body is raw."""

    SUBSTITUTE: Final = 0
    BIG_INT: Final = 16
    COMPLEX: Final = 17
    ENUM: Final = 18
    REGISTERED: Final = 19
    DEQUE: Final = 20
    DEFAULT_DICT: Final = 21
    DATETIME: Final = 22
    DATE: Final = 23
    TIME: Final = 24
    TIMEDELTA: Final = 25
    TIMEZONE: Final = 26
    ZONE_INFO: Final = 27
    UUID: Final = 28
    DECIMAL: Final = 29
    SINGLETON: Final = 30
    EXCEPTION: Final = 31
    PATH: Final = 32
    RANGE: Final = 33
    SLICE: Final = 34
    NAMESPACE: Final = 35
    PACKED_ARRAY: Final = 36
    NUMPY_DTYPE: Final = 40
    NUMPY_TEXT: Final = 41
    TORCH_DTYPE: Final = 48
    TORCH_SIZE: Final = 49
    TORCH_DEVICE: Final = 50
    NUMPY_ARRAY: Final = 64
    NUMPY_SCALAR: Final = 65
    TORCH_TENSOR: Final = 80


class Refusal(Exception):  # noqa: N818 - never leaves the codec; becomes a UsageError with a path
    """An object cannot be sent; the codec adds its path and raises a `UsageError`.

    Attributes:
        cls: The object's class, once known.
    """

    def __init__(self, reason: str, cls: type | None = None) -> None:
        """Store the reason and the class."""
        super().__init__(reason)
        self.cls = cls
