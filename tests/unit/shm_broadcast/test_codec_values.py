"""Values arrive equal, and with the same type."""

import copy
import dataclasses
import math
import sys
from array import array
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast.codec import CarriedError, decode, encode, register_type, unregister_type
from shm_broadcast.errors import DecodeError
from tests.unit.shm_broadcast.codec_samples import VALUES, Access, Colour, Point, same


def carried(obj: object) -> Any:
    """Encode and decode an object."""
    return decode(encode(obj).to_bytes())


@pytest.mark.guarantee("C1")
@pytest.mark.parametrize("name", VALUES)
def test_a_value_arrives_equal_and_of_its_type(name: str) -> None:
    """Every sample arrives with its value and exact type."""
    assert same(carried(VALUES[name]), VALUES[name])


def test_nan_payload_bits_survive() -> None:
    """A NaN keeps its bits."""
    assert same(carried([math.nan, -math.nan]), [math.nan, -math.nan])


def test_a_memoryview_arrives_as_bytes() -> None:
    """A memoryview arrives as the bytes that it shows, strided or not."""
    assert carried([memoryview(b"abc"), memoryview(b"abcdef")[::2]]) == [b"abc", b"ace"]
    assert carried(memoryview(b"x" * 9000)) == b"x" * 9000


@pytest.mark.guarantee("C17")
def test_an_exception_arrives_as_what_it_says() -> None:
    """An exception arrives as a CarriedError with the class's name, the text and the notes; no class is built."""
    sent = KeyError("missing")
    sent.add_note("on rank 3")
    arrived = carried([sent])[0]
    assert type(arrived) is CarriedError
    assert (arrived.type_name, arrived.text, arrived.__notes__) == ("KeyError", "'missing'", ["on rank 3"])
    assert str(arrived) == "KeyError: 'missing'"
    assert str(carried(ValueError())) == "ValueError"
    assert carried(DecodeError("bad")).type_name == "shm_broadcast.errors.DecodeError"
    assert carried(KeyboardInterrupt()).type_name == "KeyboardInterrupt"


@pytest.mark.guarantee("C17")
def test_an_exception_that_travels_on_stays_what_it_was() -> None:
    """A CarriedError that is sent again, or pickled, keeps the name, the text and the notes."""
    sent = OSError(2, "no such file")
    sent.add_note("a\ud800")
    first = carried(sent)
    for again in (carried(first), copy.copy(first)):
        assert vars(again) == vars(first)
        assert str(again) == "FileNotFoundError: [Errno 2] no such file"


@pytest.mark.guarantee("C17")
def test_strange_notes_of_an_exception_are_sent_as_text() -> None:
    """Notes that are no list of strings arrive as text."""
    sent = ValueError("a")
    sent.__notes__ = [1, "b"]  # type: ignore[list-item]
    assert carried(sent).__notes__ == ["1", "b"]
    sent.__notes__ = 7  # type: ignore[assignment]
    assert carried(sent).__notes__ == ["7"]


def test_a_registered_exception_is_built_by_its_functions() -> None:
    """An exception with functions of the application arrives as its own class."""

    class OwnError(Exception):
        pass

    register_type(OwnError, name="tests.own", encode=str, decode=OwnError)
    try:
        assert type(carried(OwnError("a"))) is OwnError
    finally:
        unregister_type(OwnError)


def test_a_field_that_was_never_set_arrives_unset() -> None:
    """A dataclass field that its constructor leaves without a value arrives without one."""

    @register_type(name="tests.late")
    @dataclasses.dataclass
    class Late:
        a: int
        b: int = dataclasses.field(init=False)
        c: list[int] = dataclasses.field(init=False, default_factory=list)

    try:
        arrived = carried(Late(1))
        assert vars(arrived) == {"a": 1, "c": []}
        late = Late(2)
        late.b = 3
        assert vars(carried(late)) == {"a": 2, "b": 3, "c": []}
    finally:
        unregister_type(Late)


def test_shared_objects_arrive_as_copies() -> None:
    """An object referenced twice arrives as two objects."""
    inner = [1]
    arrived = carried([inner, inner])
    assert arrived == [[1], [1]]
    assert arrived[0] is not arrived[1]


def test_enum_members_are_the_receivers_own() -> None:
    """A member arrives as the same object that the loaded class has."""
    assert carried(Colour.PAIR) is Colour.PAIR
    assert carried(Access.READ | Access.EXECUTE) is Access.READ | Access.EXECUTE


def test_dataclasses_are_built_without_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither __init__ nor __post_init__ of a dataclass runs on arrival."""
    frame = encode(Point(1, 2)).to_bytes()

    def explode(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("application code ran")

    monkeypatch.setattr(Point, "__init__", explode)
    monkeypatch.setattr(Point, "__post_init__", explode, raising=False)
    assert decode(frame).y == 2


def test_ordered_dict_keeps_its_own_order() -> None:
    """An OrderedDict keeps its own order, not that of insertion."""
    moved = OrderedDict(a=1, b=2)
    moved.move_to_end("a")
    assert list(carried(moved)) == ["b", "a"]


def test_depth_up_to_the_limit_arrives() -> None:
    """A tree of exactly the maximum depth arrives."""
    tree: list[Any] = []
    for _ in range(255):
        tree = [tree]
    assert same(carried(tree), tree)


def test_no_reference_is_leaked() -> None:
    """Encoding and decoding leave the reference counts of shared objects unchanged."""
    marker = "a key that no other test uses"
    obj = {marker: [(marker, 1.5, None)], "t": {marker}, "x": frozenset([marker])}
    frame = encode(obj).to_bytes()
    decode(frame)
    before = sys.getrefcount(marker), sys.getrefcount(None)
    for _ in range(200):
        decode(encode(obj).to_bytes())
    after = sys.getrefcount(marker), sys.getrefcount(None)
    assert after[0] == before[0]
    assert abs(after[1] - before[1]) < 100


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
    | st.decimals()
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.dates()
    | st.timedeltas()
    | st.uuids()
    | st.sampled_from(Colour)
    | st.slices(9)
    | st.builds(range, st.integers(), st.integers(), st.integers(min_value=1))
    | st.builds(array, st.just("h"), st.lists(st.integers(-(1 << 15), (1 << 15) - 1)))
)
keys = st.recursive(
    st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False) | st.uuids(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
trees: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(keys, inner)
        | st.tuples(inner, inner)
        | st.sets(keys)
        | st.builds(Point, inner, inner)
        | st.builds(bytearray, st.binary())
        | st.builds(deque, st.lists(inner))
        | st.builds(SimpleNamespace, a=inner, b=inner)
    ),
    max_leaves=30,
)


@pytest.mark.guarantee("C1")
@pytest.mark.slow
@given(trees)
def test_any_tree_arrives_unchanged(tree: object) -> None:
    """Any tree of supported types arrives with its values and types."""
    assert same(carried(tree), tree)
