"""Objects of a class are sent only if both sides registered it."""

import dataclasses
import enum
import sys
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from shm_broadcast.codec import decode, encode, register_type, unregister_type
from shm_broadcast.errors import DecodeError, UsageError
from tests.unit.shm_broadcast.codec_samples import Key, Point, Request


class Fraction:
    """A class of a kind that the codec does not know."""

    def __init__(self, top: int, bottom: int) -> None:
        """Store both parts."""
        self.top, self.bottom = top, bottom


@pytest.fixture
def fraction() -> Any:
    """Register Fraction with encode and decode functions for one test."""
    register_type(
        Fraction, name="fraction", encode=lambda f: (f.top, f.bottom), decode=lambda tree: Fraction(*tree)
    )
    yield Fraction
    unregister_type(Fraction)


def test_functions_carry_any_class(fraction: Any) -> None:
    """A class with encode and decode functions is sent through them."""
    arrived = decode(encode([fraction(1, 3)]).to_bytes())[0]
    assert (type(arrived), arrived.top, arrived.bottom) == (Fraction, 1, 3)


@pytest.mark.usefixtures("fraction")
@pytest.mark.parametrize("tree", [(1, 2, 3), None, "ab", {}], ids=repr)
def test_a_decode_function_that_refuses_is_a_decode_error(tree: object) -> None:
    """An error of a decode function becomes a DecodeError that names the class."""
    register_type(Fraction, name="fraction", encode=lambda _f: tree, decode=_strict)
    frame = encode(Fraction(1, 2)).to_bytes()
    with pytest.raises(DecodeError, match="the decode function of fraction refused"):
        decode(frame)


def _strict(tree: Any) -> Fraction:
    top, bottom = tree
    return Fraction(int(top), bottom)


@pytest.mark.usefixtures("fraction")
def test_a_decode_function_must_return_the_class() -> None:
    """A decode function that returns another class raises DecodeError."""
    frame = encode(Fraction(1, 2)).to_bytes()
    register_type(Fraction, name="fraction", encode=lambda _f: 1, decode=lambda _tree: "x")  # type: ignore[arg-type, return-value]
    with pytest.raises(DecodeError, match="returned a str"):
        decode(frame)


@pytest.mark.guarantee("C5")
def test_an_unknown_class_is_named() -> None:
    """A message with an unregistered class raises a DecodeError that names it."""

    @register_type(name="tests.passing")
    @dataclasses.dataclass
    class Passing:
        a: int

    frame = encode([Passing(1)]).to_bytes()
    assert decode(frame) == [Passing(1)]
    unregister_type(Passing)
    with pytest.raises(DecodeError, match=r"tests\.passing, which is not registered here.*register_type"):
        decode(frame)


@pytest.mark.guarantee("C5")
def test_an_enum_is_found_only_in_loaded_modules(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Enum of a module that is not loaded raises DecodeError, and the module is not imported."""
    (tmp_path / "unloaded_enum.py").write_text("import enum\nclass E(enum.Enum):\n    A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import unloaded_enum  # type: ignore[import-not-found]

    frame = encode(unloaded_enum.E.A).to_bytes()
    assert decode(frame) is unloaded_enum.E.A
    monkeypatch.delitem(sys.modules, "unloaded_enum")
    with pytest.raises(DecodeError, match="unloaded_enum:E"):
        decode(frame)
    assert "unloaded_enum" not in sys.modules


def test_fields_must_agree() -> None:
    """A record whose fields differ from the receiver's class raises a DecodeError that names both."""

    @dataclasses.dataclass
    class First:
        a: int

    @dataclasses.dataclass
    class Second:
        a: int
        b: int

    register_type(First, name="tests.versioned")
    frame = encode(First(1)).to_bytes()
    unregister_type(First)
    register_type(Second, name="tests.versioned")
    with pytest.raises(DecodeError, match=r"fields \['a', 'b'\], the message has \['a'\]"):
        decode(frame)
    unregister_type(Second)


def test_registering_twice_is_fine() -> None:
    """A class may be registered again under its name, also as a decorator."""
    assert register_type(Point) is Point
    assert register_type()(Point) is Point
    assert register_type(Key, name=f"{Key.__module__}.Key") is Key


class Slotted(list):
    """A subclass of a builtin type with its own slot."""

    __slots__ = ("extra",)


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass that is also a dict."""

    a: int = 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"cls": 3}, "needs a class"),
        ({"cls": int}, "needs no registration"),
        ({"cls": str}, "cannot be registered"),
        ({"cls": object}, "cannot be registered"),
        ({"cls": type}, "cannot be registered"),
        ({"cls": enum.EnumType}, "cannot be registered"),
        ({"cls": Fraction}, "without encode= and decode="),
        ({"cls": Slotted}, "without encode= and decode="),
        ({"cls": Output}, "without encode= and decode="),
        ({"cls": Fraction, "encode": str}, "both encode= and decode="),
        ({"cls": Fraction, "decode": str}, "both encode= and decode="),
        ({"cls": Point, "name": "other"}, "already registered as"),
        ({"cls": Key, "name": f"{Point.__module__}.Point"}, "belongs to another class"),
        ({"cls": Slotted, "name": ""}, "is not a printable name"),
        ({"cls": Slotted, "name": 3}, "is not a printable name"),
        ({"cls": np.ndarray}, "needs no registration"),
        ({"cls": torch.nn.Parameter}, "needs no registration"),
        ({"cls": type(Path())}, "needs no registration"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_registered_is_a_usage_error(arguments: dict[str, Any], reason: str) -> None:
    """A class that cannot be sent, or a taken name, raises UsageError and changes nothing."""
    with pytest.raises(UsageError, match=reason):
        register_type(**arguments)
    assert decode(encode(Point(1)).to_bytes()) == Point(1)


def test_unregistering_an_unknown_class_is_a_usage_error() -> None:
    """Unregistering a class that is not registered raises UsageError."""
    with pytest.raises(UsageError, match="is not registered"):
        unregister_type(Fraction)


def test_subclasses_of_a_registered_class_are_not_included() -> None:
    """Only objects of exactly the registered class are sent."""

    class Special(Point):
        pass

    with pytest.raises(UsageError, match="Special"):
        encode(Special(1))


def test_a_struct_runs_its_post_init() -> None:
    """A Struct is built by its constructor, as msgspec offers nothing else."""
    seen = []

    class Seen(msgspec.Struct):
        a: int

        def __post_init__(self) -> None:
            seen.append(self.a)

    register_type(Seen, name="tests.seen")
    frame = encode(Seen(5)).to_bytes()
    decode(frame)
    unregister_type(Seen)
    assert seen == [5, 5]


def test_a_subclass_of_user_dict_is_sent_by_its_content() -> None:
    """A subclass of UserDict is built around the dict that it holds, without its constructor."""

    class Settings(UserDict[str, int]):
        def __init__(self) -> None:
            super().__init__(made=1)

    register_type(Settings, name="tests.settings")
    settings = Settings()
    settings["a"] = 2
    del settings["made"]
    arrived = decode(encode(settings).to_bytes())
    unregister_type(Settings)
    assert (type(arrived), arrived.data) == (Settings, {"a": 2})


def test_a_bad_value_for_a_subclass_is_a_decode_error() -> None:
    """A subclass of a builtin type is built only from that type."""

    class Bag(list):
        pass

    class Box(NamedTuple):
        a: int

    register_type(Box, name="tests.shape")
    frame = encode(Box(1)).to_bytes()
    unregister_type(Box)
    register_type(Bag, name="tests.shape")
    with pytest.raises(DecodeError, match="cannot be built from a dict"):
        decode(frame)
    unregister_type(Bag)
    assert decode(encode(Request("a", [])).to_bytes()) == Request("a", [])
