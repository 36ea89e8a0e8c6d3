"""Objects that the codec must support, and the comparison of what arrived with what was sent."""

import dataclasses
import datetime as dt
import enum
import math
import struct
import uuid
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import torch

from shm_broadcast.codec import register_type


class Colour(enum.Enum):
    """A plain Enum with values of different types."""

    RED = 1
    BLUE = "blue"
    PAIR = (1, 2)
    ALIAS = RED


class Level(enum.IntEnum):
    """An Enum of integers."""

    LOW = 1
    HIGH = 9


class Mode(enum.StrEnum):
    """An Enum of strings."""

    FAST = enum.auto()
    SLOW = enum.auto()


class Access(enum.Flag):
    """A Flag whose members combine."""

    READ = 1
    WRITE = 2
    EXECUTE = 4


class Bits(enum.IntFlag):
    """A Flag that keeps unknown bits."""

    ONE = 1
    TWO = 2


class Outer:
    """A class around an Enum."""

    class Inner(enum.Enum):
        """An Enum with a qualified name of two parts."""

        A = "a"


@register_type
@dataclasses.dataclass
class Point:
    """A dataclass with a field that is not a constructor argument."""

    x: Any
    y: Any = None
    z: Any = dataclasses.field(default=0, init=False)


@register_type
@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A frozen dataclass with slots, usable as a key."""

    name: str
    number: int


@register_type
class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any = None


@register_type
class Request(msgspec.Struct):
    """A Struct."""

    id: str
    tokens: list[int]
    extra: Any = None


@register_type
class Names(list):
    """A subclass of list."""


@register_type
class Table(dict):
    """A subclass of dict."""


@register_type
class Text(str):
    """A subclass of str."""

    __slots__ = ()


@register_type
class Number(int):
    """A subclass of int."""


@register_type
class Ordered(OrderedDict):
    """A subclass of OrderedDict."""


def _moved() -> OrderedDict[str, int]:
    moved = OrderedDict(a=1, b=2, c=3)
    moved.move_to_end("a")
    return moved


BERLIN = ZoneInfo("Europe/Berlin")
EAST = dt.timezone(dt.timedelta(hours=5, minutes=30), "east")

VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "integer edges": [
        sign * (1 << bits) + step
        for bits in (0, 5, 7, 8, 15, 16, 31, 32, 63, 64)
        for sign in (1, -1)
        for step in (-1, 0, 1)
    ],
    "huge integers": [1 << 4000, -(1 << 4000), (1 << 4000) - 1, -(1 << 127), 1 << 127, -(1 << 64) - 1],
    "floats": [0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308],
    "a nan with a payload": struct.unpack("<d", struct.pack("<Q", 0x7FF8000000ABCDEF))[0],
    "complex": [1 + 2j, complex(-0.0, math.nan), complex(math.inf, -math.inf)],
    "strings": ["", "a", "é日本語🎉", "\0", "x" * 31, "x" * 32, "x" * 255, "x" * 256, "ü" * 40000],
    "lone surrogates": ["\ud800", "a\udfffb", {"\udc80": 1}],
    "bytes": [b"", b"\0", b"x" * 255, b"x" * 256, b"x" * 2047, b"x" * 2048, b"x" * 100001],
    "bytearrays": [bytearray(), bytearray(b"abc"), bytearray(b"x" * 5000)],
    "lists": [[], [[]], list(range(15)), list(range(16)), list(range(70000))],
    "tuples": [(), ((),), (1, "a", [2, (3,)]), tuple(range(20))],
    "sets": [set(), {1, "a", None, (1, 2)}, set(range(300))],
    "frozensets": [frozenset(), frozenset({1, frozenset({2})})],
    "dicts": [{}, {"a": {}}, dict.fromkeys(range(16)), dict.fromkeys(range(70000))],
    "keys of every type": {
        1: "int",
        "1": "str",
        b"1": "bytes",
        None: "none",
        2.5: "float",
        (1, (2,)): "tuple",
        frozenset({1}): "frozenset",
        1j: "complex",
        1 << 70: "big",
        Colour.RED: "enum",
        Key("a", 1): "dataclass",
        uuid.UUID(int=7): "uuid",
        dt.date(2024, 1, 1): "date",
        torch.float32: "torch",
        np.int64(77): "numpy",
        Decimal("1.25"): "decimal",
        "x" * 40: "long",
    },
    "insertion order": {"z": 1, "a": 2, 3: 4, "m": 5},
    "datetimes": [
        dt.datetime(2024, 2, 29, 23, 59, 59, 999999),
        dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
        dt.datetime(2024, 1, 1, tzinfo=EAST),
        dt.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
        dt.datetime.min,
        dt.datetime.max,
    ],
    "dates and times": [dt.date.min, dt.date.max, dt.time(1, 2, 3, 4, tzinfo=dt.UTC, fold=1), dt.time.max],
    "timedeltas": [dt.timedelta.min, dt.timedelta.max, dt.timedelta(microseconds=-1)],
    "time zones": [dt.UTC, EAST, dt.timezone(dt.timedelta(seconds=-1)), BERLIN, ZoneInfo("UTC")],
    "uuids": [uuid.UUID(int=0), uuid.UUID(int=(1 << 128) - 1)],
    "decimals": [
        Decimal(text) for text in ("0", "-0", "1.10", "1E+999999", "NaN", "sNaN12", "-Infinity", "1" * 500)
    ],
    "enums": [Colour.RED, Colour.BLUE, Colour.PAIR, Colour.ALIAS, Level.HIGH, Mode.FAST, Outer.Inner.A],
    "flags": [
        Access.READ,
        Access.READ | Access.WRITE,
        Access(0),
        ~Access.READ,
        Bits.ONE | Bits.TWO,
        Bits(64),
    ],
    "ordered dicts": [OrderedDict(), _moved()],
    "counters": [Counter(), Counter("hello")],
    "deques": [deque(), deque([1, 2, 3]), deque([1, 2], maxlen=5), deque(maxlen=0)],
    "defaultdicts": [defaultdict(None, {1: 2}), defaultdict(list, {"a": [1]}), defaultdict(int)],
    "singletons": [..., NotImplemented, msgspec.UNSET],
    "paths": [Path("/a/b.txt"), Path(), PurePosixPath("x/../y"), PureWindowsPath("c:/d"), Path("\udc80")],
    "ranges": [range(0), range(3, 9, 2), range(3, 10, 2), range(5, -5, -1), range(1 << 70)],
    "slices": [slice(None), slice(1, 9, 2), slice("a", [1], None)],
    "namespaces": [SimpleNamespace(), SimpleNamespace(a=1, b=SimpleNamespace(c=(2,)))],
    "packed arrays": [array(code, [1, 2, 3]) for code in "bBhHiIlLqQfd"]
    + [array("q", range(900)), array("d")],
    "dataclasses": [Point(1, [Point(2)]), Key("a", 1)],
    "named tuples": [Pair(1), Pair(Pair(1, 2), {"a": ()})],
    "structs": [Request("r", [1, 2]), Request("r", [], Point(1))],
    "builtin subclasses": [
        Names([1, Names()]),
        Table(b=1, a=2),
        Text("abc"),
        Number(1 << 80),
        Ordered(b=1, a=2),
    ],
}


PLAIN = frozenset({bool, int, str, bytes, bytearray, type(None)})
"""Classes whose equal objects do not differ at all."""


def same(left: Any, right: Any) -> bool:
    """Return whether two objects are equal in value and exact type, at every level."""
    if type(left) is not type(right):
        return False
    if type(left) in PLAIN:
        return bool(left == right)
    if isinstance(left, torch.Tensor):
        return left.dtype is right.dtype and left.shape == right.shape and raw(left) == raw(right)
    if isinstance(left, np.ndarray | np.generic):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, range | array):
        return repr(left) == repr(right)
    if isinstance(left, SimpleNamespace):
        return same(vars(left), vars(right))
    if isinstance(left, slice):
        return same([left.start, left.stop, left.step], [right.start, right.stop, right.step])
    if isinstance(left, Decimal):
        return bool(left.as_tuple() == right.as_tuple())
    if isinstance(left, dict):
        extra = not isinstance(left, defaultdict) or left.default_factory is right.default_factory
        return extra and same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, deque):
        return left.maxlen == right.maxlen and same(list(left), list(right))
    if isinstance(left, list | tuple) and not isinstance(left, torch.Size):
        kinds = {*map(type, left), *map(type, right)}
        if len(kinds) == 1 and kinds <= PLAIN:
            return bool(left == right)
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, set | frozenset):
        return left == right and {*map(type, left)} == {*map(type, right)}
    if isinstance(left, dt.datetime | dt.time):
        return left == right and left.fold == right.fold and same(left.tzinfo, right.tzinfo)
    if isinstance(left, dt.tzinfo):
        return left == right and str(left) == str(right)
    if dataclasses.is_dataclass(left):
        # A field without a value is as good as `...`.
        return all(
            same(getattr(left, f.name, ...), getattr(right, f.name, ...)) for f in dataclasses.fields(left)
        )
    if isinstance(left, msgspec.Struct):
        return all(same(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__)
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor in C order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = torch.empty(0, dtype=torch.uint8).set_(flat.untyped_storage())
    start = flat.storage_offset() * flat.itemsize
    return data[start : start + flat.nbytes].numpy().tobytes()
