"""An unsupported object raises UsageError with its path, its type and what to do."""

import dataclasses
import enum
import re
import sys
from array import array
from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch

from shm_broadcast.codec import MAX_DEPTH, decode, encode, register_type, unregister_type
from shm_broadcast.errors import UsageError
from tests.unit.shm_broadcast.codec_samples import Colour, Key, Names, Pair, Point, Request, Table


class Plain:
    """An unregistered class."""

    def __reduce__(self) -> Any:
        """Fail: nothing may call this."""
        raise AssertionError("somebody asked for the pickled form")


class Hidden(int):
    """An unregistered subclass of int."""


PATHS: dict[str, tuple[Any, str]] = {
    "root": (Plain(), "obj is a "),
    "list": ([0, [Plain()]], "obj[1][0] is a "),
    "tuple": ((0, Plain()), "obj[1] is a "),
    "dict value": ({"reqs": [0, 0, 0, Point(Plain())]}, 'obj["reqs"][3].x is a '),
    "field of a field": (Point(0, Key("a", Plain())), "obj.y.number is a "),  # type: ignore[arg-type]
    "named tuple": ([Pair(1, [Plain()])], "obj[0].right[0] is a "),
    "struct": (Request("a", [1, Hidden(2)]), "obj.tokens[1] is a "),
    "dict key": ({"a": {Hidden(3): 1}}, 'obj["a"] key <Hidden> is a '),
    "integer key": ({3: Plain()}, "obj[3] is a "),
    "tuple key": ({("a", 1): Plain()}, 'obj[("a", 1)] is a '),
    "bytes key": ({b"k": Plain()}, "obj[b'k'] is a "),
    "object key": ({Key("a", 1): Plain()}, "obj[<Key>] is a "),
    "set": ({"s": {Hidden(1)}}, 'obj["s"] element <Hidden> is a '),
    "deque": (deque([0, Plain()]), "obj[1] is a "),
    "defaultdict": (defaultdict(int, a=Plain()), 'obj["a"] is a '),
    "list subclass": (Names([Plain()]), "obj[0] is a "),
    "dict subclass": (Table(a=Plain()), 'obj["a"] is a '),
    "odd key": ({'a"\n': Plain()}, r'obj["a\"\n"] is a '),
    "long key": ({"k" * 500: Plain()}, 'obj["kkkk'),
    "iterator": ([iter([])], "obj[0] is a builtins.list_iterator"),
}


@pytest.mark.guarantee("C3")
@pytest.mark.parametrize("name", PATHS)
def test_the_path_is_named(name: str) -> None:
    """The error starts with the object's path and type, and tells how to register it."""
    obj, start = PATHS[name]
    with pytest.raises(UsageError) as caught:
        encode(obj)
    assert str(caught.value).startswith(start)
    assert "register_type(" in str(caught.value)
    assert str(caught.value).endswith("nothing was sent")
    assert len(str(caught.value)) < 600


REMEDIES: dict[str, tuple[Any, str]] = {
    "function": (lambda: None, r"builtins\.function: .*a name that the receiver looks up, or bytes"),
    "builtin function": (len, "a name that the receiver looks up"),
    "method": ("a".upper, "a name that the receiver looks up"),
    "partial": (partial(int, base=2), r"functools\.partial: .*a name that the receiver looks up"),
    "class": (int, r"builtins\.type: .*a name that the receiver looks up"),
    "class with a metaclass": (Colour, "a name that the receiver looks up"),
    "keys": ({1: 2}.keys(), "send a list or set of it"),
    "values": ({1: 2}.values(), "send a list or set of it"),
    "items": (OrderedDict(a=1).items(), "send a list or set of it"),
    "mapping proxy": (MappingProxyType({}), "send a dict of it"),
    "generator": ((n for n in range(2)), "send what it yields, as a list"),
    "module": (re, r"builtins\.module: .*send the name"),
    "array of characters": (array("w" if sys.version_info >= (3, 13) else "u", "ab"), "tounicode"),
    "random generator": (torch.Generator(), "send its seed"),
    "subclass of a parameter": (type("Own", (torch.nn.Parameter,), {})(torch.ones(1)), "send a plain tensor"),
}


@pytest.mark.guarantee("C3")
@pytest.mark.parametrize("name", REMEDIES)
def test_what_to_send_instead_is_named(name: str) -> None:
    """What no registration makes portable is refused with what to send instead."""
    obj, remedy = REMEDIES[name]
    with pytest.raises(UsageError, match=rf'^obj\["k"\]\[0\] is a .*{remedy}.*; nothing was sent$'):
        encode({"k": [obj]})


def test_refused_types_can_be_registered_with_functions() -> None:
    """An application may still send callables in a form of its own."""
    register_type(partial, encode=lambda p: p.args, decode=lambda tree: partial(max, *tree))
    try:
        assert decode(encode(partial(max, 1, 5)).to_bytes())() == 5
    finally:
        unregister_type(partial)


def test_self_containing_objects_are_named() -> None:
    """An object that contains itself raises an error that names both places."""
    loop: dict[str, Any] = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(UsageError, match=r'^obj\["a"\]\[0\] is obj again: the object contains itself'):
        encode(loop)
    point = Point(1)
    point.y = [point, point]
    with pytest.raises(UsageError, match=r'^obj\["p"\]\.y\[0\] is obj\["p"\] again'):
        encode({"p": point})


@pytest.mark.guarantee("C4")
def test_deep_trees_are_refused_with_their_path() -> None:
    """A tree one level too deep raises an error with its path, at any actual depth."""
    for depth in (MAX_DEPTH + 1, 100_000):
        tree: Any = 0
        for _ in range(depth):
            tree = [tree]
        with pytest.raises(UsageError, match=rf"^obj\[0\].*deeper than {MAX_DEPTH} levels") as caught:
            encode(tree)
        assert len(str(caught.value)) < 300
        while tree:
            tree = tree.pop()


def test_a_local_enum_must_be_registered() -> None:
    """A member of an Enum that a receiver cannot find by name is refused until the Enum is registered."""

    class Local(enum.Enum):
        A = 1

    with pytest.raises(UsageError, match=r"cannot find this Enum"):
        encode(Local.A)
    register_type(Local, name="tests.local")
    try:
        assert decode(encode(Local.A).to_bytes()) is Local.A
    finally:
        unregister_type(Local)


def test_pieces_without_a_meaning_elsewhere_are_refused() -> None:
    """A factory that is a function, a missing field and an undeclared attribute are refused."""
    with pytest.raises(UsageError, match="default_factory"):
        encode(defaultdict(lambda: 1))
    names = Names([1])
    names.__dict__["extra"] = 1
    with pytest.raises(UsageError, match="attributes besides its builtin content"):
        encode(names)

    @register_type(name="tests.holes")
    @dataclasses.dataclass
    class Holes:
        a: int

    hole = Holes(1)
    del hole.a
    try:
        with pytest.raises(UsageError, match=r"obj\[0\].*its field 'a' has no value"):
            encode([hole])
    finally:
        unregister_type(Holes)


def test_errors_of_the_applications_own_code_are_usage_errors() -> None:
    """An error of an encode function becomes a UsageError with the path and the cause."""

    def fail(_obj: object) -> object:
        raise KeyError("missing")

    register_type(Plain, encode=fail, decode=lambda _tree: Plain())
    try:
        with pytest.raises(UsageError, match=r"^obj\[0\] is a .*KeyError: 'missing'"):
            encode([Plain()])
    finally:
        unregister_type(Plain)


def test_containers_that_change_meanwhile_are_refused() -> None:
    """A list, dict or set that an encode function changes raises an error and never crashes."""
    victims: list[Any] = [[Plain(), 1, 2], {1: Plain(), 2: 3}, {Plain(), 4, 5}]
    for victim in victims:
        for change in (
            lambda v: v.clear(),
            lambda v: v.update({9: 9, 8: 8}) if hasattr(v, "update") else v.append(1),
        ):
            if isinstance(victim, set):
                victim |= {Plain(), 4, 5}
            elif isinstance(victim, dict):
                victim |= {1: Plain(), 2: 3}
            else:
                victim[:] = [Plain(), 1, 2]

            def encode_and_change(_obj: object, victim: Any = victim, change: Any = change) -> object:
                change(victim)
                return None

            register_type(Plain, encode=encode_and_change, decode=lambda _tree: Plain())
            try:
                with pytest.raises(UsageError, match="changed while it was encoded"):
                    encode({"v": victim})
            finally:
                unregister_type(Plain)


def test_keys_that_share_a_hash_are_refused() -> None:
    """Both sides refuse more than 128 keys with one hash and accept fewer."""
    step = (1 << 61) - 1
    assert len(decode(encode({(1 << 64) * step + n * step: n for n in range(128)}).to_bytes())) == 128
    with pytest.raises(UsageError, match="share one hash"):
        encode({"k": {(1 << 64) * step + n * step: n for n in range(129)}})
    with pytest.raises(UsageError, match="share one hash"):
        encode({(1 << 64) * step + n * step for n in range(129)})
    assert decode(encode({n: n for n in range(1000)}).to_bytes())[999] == 999


def test_enum_values_beyond_their_class_are_refused() -> None:
    """A member that is missing from its class's table cannot be sent."""
    rogue = object.__new__(Colour)
    rogue._name_ = "ROGUE"
    rogue._value_ = 77
    with pytest.raises(UsageError, match="not a member of its Enum"):
        encode(rogue)
