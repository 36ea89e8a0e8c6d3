"""Classes of every kind that a registered package may hold, and of kinds that it may not; nobody registers them."""

import abc
import dataclasses
import enum
import sys
import threading
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, namedtuple
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


def forbidden(*_args: object, **_kwargs: object) -> Any:
    """Fail: no code of these classes may run when an object is built."""
    raise AssertionError("application code ran")


@dataclasses.dataclass
class Step:
    """A dataclass with private, unset and default fields, a cached property, a class variable and an init variable."""

    ids: list[Any]
    extra: Any = None
    _private: set[int] = dataclasses.field(default_factory=set)
    late: Any = dataclasses.field(init=False, repr=False, compare=False)
    count: int = dataclasses.field(init=False, default=0)
    seed: dataclasses.InitVar[int] = 0
    shared: ClassVar[int] = 5

    def __post_init__(self, seed: int) -> None:
        """Derive a field."""
        self.count = len(self.ids) + seed

    @cached_property
    def longest(self) -> int:
        """Something that is computed once."""
        return max(map(len, map(str, self.ids)))


class LaterStep(Step):
    """A subclass of a dataclass that is none itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """A frozen dataclass with slots, for which `dataclasses` writes `__getstate__`; usable as a key."""

    start: int
    stop: int = 0

    class Kind(enum.Enum):
        """An Enum inside of a class."""

        OPEN = 1

    @dataclasses.dataclass
    class Part:
        """A dataclass inside of a class."""

        of: Any


@dataclasses.dataclass
class Box(Generic[T]):
    """A generic dataclass, whose objects know their parameters."""

    value: T


class Base(abc.ABC):
    """An abstract base."""

    @abc.abstractmethod
    def f(self) -> None:
        """Do nothing."""


@dataclasses.dataclass(kw_only=True)
class Concrete(Base):
    """A dataclass over an abstract base."""

    value: Any

    def f(self) -> None:
        """Do nothing."""


class Scores(NamedTuple):
    """A NamedTuple."""

    ids: Any
    rank: Any = None


Old = namedtuple("Old", "a b")  # noqa: PYI024 - engines have them


class OldSubclass(Old):
    """A subclass of a namedtuple."""


class Params(msgspec.Struct, omit_defaults=True, dict=True):
    """A Struct as vLLM's SamplingParams: it derives fields when it is made, and caches properties."""

    temperature: float = 1.0
    stop: list[int] = []
    _all: set[int] = msgspec.field(default_factory=set)

    def __post_init__(self) -> None:
        """Derive a field, and refuse a value."""
        self._all.update(self.stop)
        if self.temperature < 0:
            raise ValueError("negative")

    @cached_property
    def greedy(self) -> bool:
        """Something that is computed once."""
        return self.temperature == 0


class Core(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A Struct without code."""

    id: str
    params: Params | None = None
    tag: Any = None


class SubCore(Core, frozen=False):
    """A Struct that derives from another one."""

    more: int = 0


class Names(list):
    """A subclass of list."""


class Text(str):
    """A subclass of str."""

    __slots__ = ()


class Items(UserDict[str, Any]):
    """A UserDict with a constructor of its own."""

    def __init__(self, *args: Any) -> None:
        """Take what UserDict takes."""
        super().__init__(*args)


class Rows(UserList[Any]):
    """A UserList."""


class Mode(enum.IntFlag):
    """A Flag."""

    A = 1
    B = 2


class OwnError(ValueError):
    """An exception of the package."""


def all_carried() -> list[Any]:
    """Return an object of each kind that is carried."""
    return [
        Step([1, 2], {"a": (1,)}, {3}, 4),
        LaterStep([Step([])]),
        Range(1),
        {Range(1, 2): Range.Part(Range.Kind.OPEN)},
        Box([1]),
        Concrete(value=Box("a")),
        Scores([1], 2),
        Old(1, 2),
        OldSubclass(1, 2),
        Params(0.5, [7]),
        Core("a", Params()),
        SubCore("a", None, 3, more=4),
        Names([1, Names()]),
        Text("abc"),
        Items({"a": Items()}),
        Rows([1, Rows()]),
        Mode.A | Mode.B,
    ]


@dataclasses.dataclass
class Reduced:
    """Has a form of its own in pickles."""

    a: int = 0
    __reduce__ = forbidden


@dataclasses.dataclass
class ReducedEx:
    """Has a form of its own in pickles."""

    a: int = 0
    __reduce_ex__ = forbidden


@dataclasses.dataclass
class Stateful:
    """Has a state of its own."""

    a: int = 0
    __getstate__ = forbidden


class Inherited(Stateful):
    """Inherits a state of its own."""


@dataclasses.dataclass
class Restored:
    """Restores a state of its own."""

    a: int = 0
    __setstate__ = forbidden


@dataclasses.dataclass
class Newed:
    """Makes its objects itself."""

    a: int = 0

    def __new__(cls, *_args: Any) -> Any:
        """Make an object."""
        return object.__new__(cls)


class NewedTuple(Scores):
    """A NamedTuple with a constructor of its own."""

    def __new__(cls, *args: Any) -> Any:
        """Make an object."""
        return tuple.__new__(cls, args)


class NewedText(str):
    """A str with a constructor of its own."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> Any:
        """Make an object."""
        return str.__new__(cls, *args)


@dataclasses.dataclass
class Dying:
    """Does something when its object goes."""

    a: int = 0
    died: ClassVar[list[int]] = []

    def __del__(self) -> None:
        """Leave a trace."""
        self.died.append(self.a)


@dataclasses.dataclass
class Guarded:
    """Has a field that is a property."""

    a: int = 0


Guarded.a = property(lambda self: 1, forbidden)  # type: ignore[assignment]


class GuardedItems(UserDict[str, int]):
    """A UserDict whose content is a property."""

    data = property(lambda self: {}, forbidden)


class Slot:
    """Has a slot."""

    __slots__ = ("hidden",)


@dataclasses.dataclass
class Slotted(Slot):
    """Has a slot that is no field."""

    a: int = 0


@dataclasses.dataclass
class Local(threading.local):
    """Has a base that is not made by a class statement."""

    a: int = 0


class Defaults(defaultdict[str, int]):
    """A subclass of a builtin type that is no plain container."""


class Tally(Counter[str]):
    """A subclass of Counter, which says how it is pickled."""


@dataclasses.dataclass
class Output(OrderedDict[str, int]):
    """A dataclass that is a dict too."""

    a: int = 0


class Meta(type(msgspec.Struct)):  # type: ignore[misc]
    """A metaclass whose calls are code."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Do more than make an object."""
        return super().__call__(*args, **kwargs)


class Called(msgspec.Struct, metaclass=Meta):
    """A Struct with a metaclass."""

    a: int = 0


class Plain:
    """No data class at all."""


class Lazy(ModuleType):
    """A module that would import on access."""

    def __getattr__(self, name: str) -> Any:
        """Fail: nothing may ask."""
        raise AssertionError(f"somebody asked for {name}")


REFUSED: dict[str, tuple[Any, str]] = {
    "__reduce__": (Reduced(), "Reduced defines __reduce__"),
    "__reduce_ex__": (ReducedEx(), "ReducedEx defines __reduce_ex__"),
    "__getstate__": (Stateful(), "Stateful defines __getstate__"),
    "inherited": (Inherited(), "Stateful defines __getstate__"),
    "__setstate__": (Restored(), "Restored defines __setstate__"),
    "__new__": (Newed(), "Newed defines __new__"),
    "__new__ of a NamedTuple": (NewedTuple(1, 2), "NewedTuple defines __new__"),
    "__new__ of a str": (NewedText("a"), "NewedText defines __new__"),
    "__del__": (Dying(), "Dying defines __del__"),
    "property": (Guarded.__new__(Guarded), "setting its field 'a' runs a property"),
    "property of a UserDict": (
        GuardedItems.__new__(GuardedItems),
        "setting its field 'data' runs a property",
    ),
    "hidden slot": (Slotted(), "its slot 'hidden' is no field"),
    "native base": (Local(), "_local defines __new__"),
    # Native classes have become ordinary ones in later versions of Python.
    "defaultdict": (
        Defaults(int),
        "defaultdict defines __reduce__"
        if sys.version_info >= (3, 12)
        else "its base defaultdict is not supported",
    ),
    "counter": (Tally("a"), "Counter defines __reduce__"),
    "dataclass and dict": (Output(), "it is no dataclass"),
    "metaclass": (Called(), "its metaclass Meta may run code"),
    "plain class": (Plain(), "it is no dataclass"),
    "module": (Lazy("lazy"), "its base module is not supported"),
}
"""An object of each kind that is refused, and why."""
