"""A peer that names classes of a registered package gets what its permission covers, or DecodeError."""

import dataclasses
import gc
import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast.codec import (
    CarriedError,
    decode,
    encode,
    packages,
    register_package,
    registry,
    unregister_package,
)
from shm_broadcast.errors import DecodeError
from tests.hostile_frames import frame_of, hook, packed, refused, tried
from tests.unit.shm_broadcast import engine_samples
from tests.unit.shm_broadcast.engine_samples import REFUSED, Dying, Lazy, Params, Step, all_carried, forbidden

pytestmark = pytest.mark.usefixtures("the_next_message_arrives")

PACKAGE = engine_samples.__name__
FIELDS = packed({"a": 1})


@pytest.fixture(autouse=True, scope="module")
def package() -> Iterator[None]:
    """Register the samples' module, and a package that has no module yet, for the tests of this file."""
    register_package(PACKAGE)
    register_package("hostile_target")
    yield
    unregister_package(PACKAGE)
    unregister_package("hostile_target")


def named(name: object, body: bytes = FIELDS) -> bytes:
    """Return a frame with an object of a class of this name."""
    return frame_of(hook(19, name, body))


def sizes() -> tuple[int, ...]:
    return len(registry.by_class), len(registry.by_name), len(packages._allowed), len(sys.modules)


NAMES: dict[str, tuple[str, str]] = {
    "function of the system": ("os:system", "which is not registered"),
    "function under the old form": ("os.system", "which is not registered"),
    "dataclass elsewhere": ("tests.unit.shm_broadcast.codec_samples:Outer", "which is not registered"),
    "package that begins alike": (f"{PACKAGE}_evil:Step", "which is not registered"),
    "package above": ("tests.unit:Step", "which is not registered"),
    "prefix without a dot": ("hostile_targets:Step", "which is not registered"),
    "no module": (":Step", "which is not registered"),
    "no colon": (f"{PACKAGE}.Step", "which is not registered"),
    "module that is not imported": ("hostile_target.deep:Step", "has not imported hostile_target.deep"),
    "package that is not imported": ("hostile_target:Step", "has not imported hostile_target"),
    "submodule that is none": (f"{PACKAGE}.Range:Kind", "has not imported"),
    "no class": (f"{PACKAGE}:", "defines no such class"),
    "unknown class": (f"{PACKAGE}:Missing", "defines no such class"),
    "function": (f"{PACKAGE}:forbidden", "defines no such class"),
    "imported module": (f"{PACKAGE}:threading", "defines no such class"),
    "class through a module": (f"{PACKAGE}:threading.Thread", "defines no such class"),
    "imported class": (f"{PACKAGE}:UserDict", "defines no such class"),
    "imported special form": (f"{PACKAGE}:Any", "defines no such class"),
    "instance": (f"{PACKAGE}:T", "defines no such class"),
    "dictionary of the module": (f"{PACKAGE}:__dict__", "defines no such class"),
    "builtins of the module": (f"{PACKAGE}:__builtins__.eval", "defines no such class"),
    "method": (f"{PACKAGE}:Step.__init__", "defines no such class"),
    "class of a class": (f"{PACKAGE}:Step.__class__", "defines no such class"),
    "base of a class": (f"{PACKAGE}:LaterStep.__base__", "defines no such class"),
    "inherited class": (f"{PACKAGE}:OwnError.__mro__", "defines no such class"),
    "two colons": (f"{PACKAGE}:Step:Step", "defines no such class"),
    "dots": (f"{PACKAGE}:..Step..", "defines no such class"),
    "zero byte": (f"{PACKAGE}:Step\0", "defines no such class"),
    "local class": (f"{PACKAGE}:all_carried.<locals>.Step", "defines no such class"),
    "deep": (f"{PACKAGE}:" + ".".join(["Range"] * 100), "defines no such class"),
    "too deep": (f"{PACKAGE}:" + ".".join(["Range"] * 100_000), "which is not registered"),
    "huge": (f"{PACKAGE}:" + "a" * 1_000_000, "which is not registered"),
    "huge module": ("hostile_target." + "a" * 1_000_000 + ":Step", "which is not registered"),
    "Enum as an object": (f"{PACKAGE}:Range.Kind", "its base"),
    "Flag as an object": (f"{PACKAGE}:Mode", "its base int"),
    "exception": (f"{PACKAGE}:OwnError", "its base ValueError"),
    "abstract class": (f"{PACKAGE}:Base", "it is no dataclass"),
    "metaclass": (f"{PACKAGE}:Meta", "its base StructMeta"),
}


@pytest.mark.guarantee("C16")
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_means_no_class_of_the_package_is_refused(name: str) -> None:
    """Each name is refused with the reason, briefly, and leaves nothing behind."""
    wire_name, reason = NAMES[name]
    before = sizes()
    text = refused(named(wire_name))
    assert reason in text
    assert len(text) < 1000
    assert sizes() == before


@pytest.mark.guarantee("C16")
@pytest.mark.parametrize("name", REFUSED)
def test_a_class_with_code_of_its_own_is_refused_on_arrival(name: str) -> None:
    """A class that could run code is refused by its name too, and no object of it comes to be."""
    obj, reason = REFUSED[name]
    Dying.died.clear()
    before = sizes()
    text = refused(named(f"{PACKAGE}:{type(obj).__qualname__}"))
    assert reason in text
    assert sizes() == before
    assert Dying.died == []


@pytest.mark.guarantee("C16")
def test_no_module_is_imported_for_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the package that lies ready to be imported is not."""
    (tmp_path / "hostile_target").mkdir()
    for name in ("__init__", "deep"):
        (tmp_path / "hostile_target" / f"{name}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("hostile_target", "hostile_target.deep", "hostile_target.__init__"):
        assert "has not imported" in refused(named(f"{module}:Step"))
        assert module not in sys.modules


@pytest.mark.guarantee("C16")
def test_neither_modules_nor_metaclasses_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `__getattr__` of a module or class, no descriptor and no lie about a name is looked at."""

    class Asked(type):
        def __getattr__(cls, name: str) -> Any:
            raise AssertionError(f"somebody asked for {name}")

        __module__ = property(forbidden)
        __qualname__ = "Asked"

    class Trap(metaclass=Asked):
        hidden = property(forbidden)

        @classmethod
        def made(cls) -> type:
            raise AssertionError("somebody called")

    @dataclasses.dataclass
    class Elsewhere:
        a: int = 0

    class Deceiver(type(Step)):  # type: ignore[misc]
        __module__ = property(lambda _cls: "hostile_target")

    module = Lazy("hostile_target")
    values = {"Trap": Trap, "Step": Step, "Elsewhere": Elsewhere, "system": os.system, "os": os}
    for name, value in values.items():
        vars(module)[name] = value
    monkeypatch.setitem(sys.modules, "hostile_target", module)
    monkeypatch.setitem(sys.modules, "hostile_target.none", None)
    monkeypatch.setitem(sys.modules, "hostile_target.object", Step([]))
    for name in (
        "Missing",
        "Trap",
        "Trap.hidden",
        "Trap.made",
        "Trap.missing",
        "Step",
        "Elsewhere",
        "system",
        "os.path",
    ):
        assert "defines no such class" in refused(named(f"hostile_target:{name}"))
    for name in ("none", "object"):
        assert "has not imported" in refused(named(f"hostile_target.{name}:ids"))
    lying: Any = Deceiver("Lying", (), {"__annotations__": {"a": int}, "__module__": __name__})
    vars(module)["Lying"] = dataclasses.dataclass(lying)
    assert "defines no such class" in refused(named("hostile_target:Lying"))


@pytest.mark.guarantee("C16")
def test_only_the_canonical_name_of_a_class_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class under a second name, or through another class, is refused, so the table has one entry for it at most."""
    monkeypatch.setattr(engine_samples, "Alias", Step, raising=False)
    monkeypatch.setattr(engine_samples.Concrete, "Alias", Step, raising=False)
    other = ModuleType("hostile_target.other")
    other.Step = Step  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, other.__name__, other)
    for name in (f"{PACKAGE}:Alias", f"{PACKAGE}:Concrete.Alias", "hostile_target.other:Step"):
        assert "defines no such class" in refused(named(name))


BODIES: dict[str, tuple[str, Any, str]] = {
    "no fields": ("Step", {}, "has the fields"),
    "a field is missing": ("Step", {"ids": [], "extra": 0, "count": 0}, "has the fields"),
    "a field more": ("Core", {"id": "a", "params": None, "tag": 0, "x": 1}, "has the fields"),
    "a private name more": ("Range", {"start": 1, "stop": 2, "__class__": 3}, "has the fields"),
    "fields by number": ("Range", {0: 1, 1: 2}, "has the fields"),
    "a list": ("Params", [1.0, [], set()], "has the fields"),
    "nothing": ("Params", None, "has the fields"),
    "fewer fields of a Struct": ("Params", {"temperature": 1.0}, "has the fields"),
    "too long for a tuple": ("Scores", {"ids": 1, "rank": 2, "more": 3}, "has the fields"),
    "a tuple": ("Scores", (1, 2), "has the fields"),
    "list as a dict": ("Names", {"a": 1}, "cannot be built from a dict"),
    "str as a list": ("Text", ["a"], "cannot be built from a list"),
    "UserDict around a list": ("Items", {"data": [1]}, "cannot be built around a list"),
    "UserDict around a UserDict": (
        "Items",
        {"data": engine_samples.Items()},
        "cannot be built around a Items",
    ),
    "UserList around a dict": ("Rows", {"data": {}}, "cannot be built around a dict"),
    "UserDict with an attribute": ("Items", {"data": {}, "get": 1}, "has the fields"),
}


@pytest.mark.guarantee("C16")
@pytest.mark.parametrize("name", BODIES)
def test_fields_that_do_not_fit_are_refused(name: str) -> None:
    """An object of a package is built from exactly its fields."""
    cls, body, reason = BODIES[name]
    assert reason in refused(named(f"{PACKAGE}:{cls}", packed(body)))


@pytest.mark.guarantee("C16")
def test_any_value_in_a_field_is_only_data() -> None:
    """Fields hold whatever the peer sent, and no code of the class has looked at it."""
    body = packed({"temperature": "hot", "stop": None, "_all": {"a": 1}})
    arrived = decode(named(f"{PACKAGE}:Params", body))
    assert (type(arrived), arrived.temperature, arrived.stop) == (Params, "hot", None)


@pytest.mark.guarantee("C16")
@pytest.mark.parametrize("names", [100, pytest.param(500, marks=pytest.mark.thorough)])
def test_names_do_not_make_the_table_grow(names: int) -> None:
    """Thousands of names that are refused leave neither entries nor memory behind."""
    frames = [named(f"{PACKAGE}:Missing{n}") for n in range(names)]
    frames += [named(f"hostile_target.m{n}:Step") for n in range(names)]
    frames += [named(f"{PACKAGE}:{type(obj).__qualname__}") for obj, _ in REFUSED.values()] * (names // 25)
    for frame in frames:
        tried(frame)
    before = sizes()
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            for frame in frames:
                tried(frame)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    assert sizes() == before
    assert grown < 65536


PLAIN_TREES: dict[str, tuple[bytes, str]] = {
    "exception without a name": (hook(31, None, packed(["a"])), "needs a str"),
    "exception without a text": (hook(31, "E", packed([])), "needs its text"),
    "exception with a number": (hook(31, "E", packed(["a", 1])), "needs its text"),
    "exception of text": (hook(31, "E", packed("a")), "needs a list"),
    "path of another class": (hook(32, "WindowsPath", packed("a")), "class of paths"),
    "path of a number": (hook(32, "PosixPath", packed(1)), "needs a str"),
    "path in another form": (hook(32, "PosixPath", packed("a//b")), "normal form"),
    "empty path": (hook(32, "PurePosixPath", packed("")), "normal form"),
    "range of two": (hook(33, None, packed([1, 2])), "3 integers"),
    "range of bools": (hook(33, None, packed([True, 2, 1])), "3 integers"),
    "range without a step": (hook(33, None, packed([1, 2, 0])), "no valid frame"),
    "slice of two": (hook(34, None, packed([1, 2])), "3 parts"),
    "slice of text": (hook(34, None, packed("abc")), "needs a list"),
    "namespace of a list": (hook(35, None, packed([])), "needs a dict"),
    "namespace with a number": (hook(35, None, packed({1: 2})), "no str"),
    "array of characters": (hook(36, "u", packed(bytes(4))), "not a supported type"),
    "array of nothing": (hook(36, "", packed(b"")), "not a supported type"),
    "array of two types": (hook(36, "bB", packed(b"")), "not a supported type"),
    "array that is cut": (hook(36, "q", packed(bytes(7))), "no valid frame"),
    "array of text": (hook(36, "q", packed("a")), "needs a bytes"),
}


@pytest.mark.guarantee("C10")
@pytest.mark.parametrize("name", PLAIN_TREES)
def test_a_malformed_value_of_the_standard_library_is_refused(name: str) -> None:
    """Exceptions, paths, ranges, slices, namespaces and arrays are checked part by part."""
    tree, reason = PLAIN_TREES[name]
    assert reason in refused(frame_of(tree))


@pytest.mark.guarantee("C17")
def test_a_peer_cannot_choose_the_class_of_an_exception() -> None:
    """Whatever class a peer names, a CarriedError arrives that only says so."""
    for name in (
        "SystemExit",
        "builtins.KeyboardInterrupt",
        f"{PACKAGE}.OwnError",
        "os.system",
        "",
        "x" * 100_000,
    ):
        arrived = decode(frame_of(hook(31, name, packed(["text", "note"]))))
        assert type(arrived) is CarriedError
        assert (arrived.type_name, arrived.text, arrived.__notes__) == (name, "text", ["note"])


def test_names_in_a_namespace_stay_data() -> None:
    """Special names in a SimpleNamespace are entries of its dictionary and nothing more."""
    arrived = decode(frame_of(hook(35, None, packed({"__class__": 1, "__dict__": 2, "": 3}))))
    assert type(arrived).__name__ == "SimpleNamespace"
    assert vars(arrived) == {"__class__": 1, "__dict__": 2, "": 3}


qualnames = st.lists(
    st.sampled_from(
        ["Step", "Range", "Kind", "Part", "Dying", "__class__", "__dict__", "forbidden", "", "os"]
    )
    | st.text(max_size=5),
    max_size=4,
).map(".".join)
wire_names = st.tuples(
    st.sampled_from([PACKAGE, PACKAGE.rpartition(".")[0], "os", "hostile_target", "builtins", ""])
    | st.text(max_size=5),
    st.sampled_from([":", ".", "::", ""]),
    qualnames,
).map("".join)
bodies: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "ids", "start", "stop", "of", "data"]) | st.text(max_size=3), inner
        )
        | st.sampled_from(all_carried())
    ),
    max_leaves=6,
)


@pytest.mark.guarantee("C16")
@given(wire_names, bodies)
def test_any_name_and_fields_give_an_allowed_object_or_decode_error(name: str, body: Any) -> None:
    """Whatever a peer names, an object arrives whose class is one of the package's data classes, or none does."""
    try:
        arrived = decode(named(name, packed(body)))
    except DecodeError:
        return
    assert f"{type(arrived).__module__}:{type(arrived).__qualname__}" == name
    assert type(arrived) in {*map(type, all_carried()), engine_samples.Range.Part}


@pytest.mark.guarantee("C10")
@pytest.mark.filterwarnings("ignore")
def test_every_flipped_byte_of_objects_of_a_package_is_harmless() -> None:
    """A frame of such objects with one changed byte gives an object or DecodeError."""
    frame = bytearray(encode(all_carried()[:12]).to_bytes())
    for position in range(len(frame)):
        kept = frame[position]
        for change in (0x01, 0x80, 0xFF):
            frame[position] = kept ^ change
            tried(bytes(frame))
        frame[position] = kept
