"""The data classes of a registered package are sent without naming each."""

import dataclasses
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import Any

import msgspec
import pytest

from shm_broadcast.codec import (
    CarriedError,
    decode,
    encode,
    register_package,
    register_type,
    registry,
    unregister_package,
    unregister_type,
)
from shm_broadcast.errors import DecodeError, UsageError
from tests.samples import sampled
from tests.unit.shm_broadcast import engine_samples
from tests.unit.shm_broadcast.codec_samples import same
from tests.unit.shm_broadcast.engine_samples import (
    REFUSED,
    Box,
    Core,
    Items,
    Mode,
    OwnError,
    Params,
    Range,
    Scores,
    Step,
    all_carried,
)

PACKAGE = engine_samples.__name__


@pytest.fixture(autouse=True)
def package() -> Iterator[str]:
    """Register the module of the samples for one test."""
    register_package(PACKAGE)
    yield PACKAGE
    unregister_package(PACKAGE)


def carried(obj: object) -> Any:
    return decode(encode(obj).to_bytes())


@pytest.mark.guarantee("C15")
@pytest.mark.parametrize("obj", all_carried(), ids=lambda obj: type(obj).__name__)
def test_each_kind_of_class_is_carried(obj: object) -> None:
    """Dataclasses, Structs, NamedTuples, Flags, and subclasses of containers arrive equal and of their class."""
    for _ in range(2):
        assert same(carried([obj]), [obj])


@pytest.mark.guarantee("C15")
def test_private_and_unset_fields_travel_and_cached_properties_do_not() -> None:
    """All declared fields travel as they are; a field without a value stays so; a cached property is computed again."""
    step = Step([10, 200], seed=5)
    assert step.longest == 3
    arrived = carried(step)
    assert vars(arrived) == {"ids": [10, 200], "extra": None, "_private": set(), "count": 7}
    step.late = "x"
    assert carried(step).late == "x"
    assert arrived.longest == 3
    boxed = Box[int](1)
    assert "__orig_class__" in vars(boxed)
    assert vars(carried(boxed)) == {"value": 1}


@pytest.mark.guarantee("C15")
def test_a_struct_is_built_without_its_post_init() -> None:
    """A Struct arrives field by field; what its `__post_init__` would derive or refuse stays as it was sent."""
    params = Params(0.5, [1])
    params._all = {9}
    params.temperature = -1.0
    assert not params.greedy
    arrived = carried(params)
    assert (type(arrived), arrived.temperature, arrived.stop, arrived._all) == (Params, -1.0, [1], {9})
    assert vars(arrived) == {}
    assert not arrived.greedy
    with pytest.raises(ValueError, match="negative"):
        Params(-1.0)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {"frozen": True},
    "without gc": {"gc": False},
    "weakref": {"weakref": True},
    "keywords": {"kw_only": True},
    "tag": {"tag": True},
    "tag and field": {"tag": "x", "tag_field": "kind", "forbid_unknown_fields": True},
    "dict": {"dict": True},
    "dict, weakref, frozen": {"dict": True, "weakref": True, "frozen": True},
    "array": {"array_like": True, "omit_defaults": True},
    "hash": {"frozen": True, "cache_hash": True},
    "without eq": {"eq": False},
    "order": {"order": True},
    "rename": {"rename": "camel"},
}


def struct_with_code(name: str, base: type, **options: Any) -> Any:
    """Return a Struct class of this test module whose `__post_init__` counts its calls."""
    fields = {"first": Any, "second_one": Any}

    def count(self: Any) -> None:
        type(self).made += 1

    namespace = {
        "__annotations__": fields,
        "second_one": None,
        "__post_init__": count,
        "__module__": __name__,
    }
    metaclass: Any = type(msgspec.Struct)
    cls: Any = metaclass(name, (base,), {**namespace, "__qualname__": name}, **options)
    cls.made = 0
    return cls


@pytest.mark.guarantee("C15")
@pytest.mark.parametrize(("name", "derived"), sampled(3, product(CONFIGURATIONS, (False, True))))
def test_structs_of_every_configuration_are_whole_without_their_post_init(
    name: str, derived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Struct that was built without its `__post_init__` is like one from its constructor, and leaves no memory."""
    cls = struct_with_code("Sample", msgspec.Struct, **CONFIGURATIONS[name])
    if derived:
        cls = struct_with_code("Sample", cls)
    monkeypatch.setattr(sys.modules[__name__], "Sample", cls, raising=False)
    register_package(__name__)
    try:
        sent = cls(first=1, second_one=[2])
        frame = encode(sent).to_bytes()
        assert cls.made == 1
        arrived = decode(frame)
        assert (type(arrived), cls.made) == (cls, 1)
        assert repr(arrived) == repr(sent)
        assert gc.is_tracked(arrived) is gc.is_tracked(sent)
        assert msgspec.json.encode(arrived) == msgspec.json.encode(sent)
        if CONFIGURATIONS[name].get("eq", True):
            assert arrived == sent
        if CONFIGURATIONS[name].get("frozen"):
            assert hash(carried(cls(first=1))) == hash(cls(first=1))
            with pytest.raises(AttributeError, match="immutable"):
                arrived.first = 3
        else:
            arrived.first = 3
        before = sys.getrefcount(cls)
        for _ in range(2000):
            decode(frame)
        gc.collect()
        assert abs(sys.getrefcount(cls) - before) < 20
    finally:
        unregister_package(__name__)


@pytest.mark.guarantee("C15")
@pytest.mark.parametrize("name", REFUSED)
def test_a_class_with_code_or_state_of_its_own_is_refused(name: str) -> None:
    """A class whose objects are more than their fields is refused with the reason, and what to do."""
    obj, reason = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        encode([obj])
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"obj[0] is a {PACKAGE}.")
    assert f"call register_type({type(obj).__qualname__})" in str(caught.value)
    assert type(obj) not in registry.by_class


@pytest.mark.guarantee("C15")
def test_attributes_that_would_be_lost_are_refused() -> None:
    """An object with an attribute that its class does not declare is refused, with the name of the attribute."""
    for obj in (Step([]), Params(), Items(), engine_samples.OldSubclass(1, 2)):
        vars(obj)["hidden"] = 1
        with pytest.raises(UsageError, match=r"^obj\[0\] is a .*its attribute 'hidden' is no field"):
            encode([obj])
        del vars(obj)["hidden"]
        encode([obj])


@pytest.mark.guarantee("C15")
def test_a_class_that_a_receiver_cannot_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class in a function, a replaced class and a class under another name are refused."""

    @dataclasses.dataclass
    class Hidden:
        a: int = 0

    Hidden.__module__ = PACKAGE
    with pytest.raises(UsageError, match=r"cannot find this class as .*<locals>\.Hidden in"):
        encode(Hidden())
    Hidden.__qualname__ = "Range"
    with pytest.raises(UsageError, match="cannot find this class as Range"):
        encode(Hidden())
    monkeypatch.setattr(engine_samples, "Renamed", Hidden, raising=False)
    with pytest.raises(UsageError, match="cannot find this class as Range"):
        encode(Hidden())


@pytest.mark.guarantee("C15")
def test_exceptions_of_a_package_arrive_as_what_they_say() -> None:
    """An exception of a package is not built either."""
    arrived = carried(OwnError("a"))
    assert type(arrived) is CarriedError
    assert arrived.type_name == f"{PACKAGE}.OwnError"


def module_of(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Return a new module of this name, with a dataclass `Data`, that counts as imported during the test."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec("import dataclasses\n@dataclasses.dataclass\nclass Data:\n    a: int = 0\n", vars(module))
    return module


@pytest.mark.guarantee("C15")
def test_a_package_is_what_stands_below_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules below are included, packages whose names merely begin alike are not."""
    inside, above, evil = (
        module_of(monkeypatch, name) for name in ("engine.v1.core", "engine", "engine_evil")
    )
    register_package("engine.v1")
    try:
        frame = encode(inside.Data(3)).to_bytes()
        assert decode(frame) == inside.Data(3)
        for outside in (above, evil):
            with pytest.raises(UsageError, match="this type is not carried"):
                encode(outside.Data())
    finally:
        unregister_package("engine.v1")
    with pytest.raises(
        DecodeError, match=r"engine\.v1\.core:Data, which is not registered.*register_package\('engine'\)"
    ):
        decode(frame)
    with pytest.raises(UsageError, match=r"register_package\(\)"):
        encode(inside.Data(3))


@pytest.mark.guarantee("C15")
def test_a_package_may_be_registered_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that has not imported the module says so, imports nothing, and carries on once it has."""
    register_package("engine")
    try:
        module = module_of(monkeypatch, "engine.core")
        frame = encode(module.Data(1)).to_bytes()
        unregister_package("engine")
        register_package("engine")
        monkeypatch.delitem(sys.modules, "engine.core")
        with pytest.raises(DecodeError, match=r"has not imported engine\.core; import it"):
            decode(frame)
        assert "engine.core" not in sys.modules
        monkeypatch.setitem(sys.modules, "engine.core", module)
        assert decode(frame) == module.Data(1)
    finally:
        unregister_package("engine")


@pytest.mark.guarantee("C15")
def test_a_module_that_was_imported_again_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reload the new class takes the place of the old one."""
    register_package("engine")
    try:
        first = module_of(monkeypatch, "engine.core")
        assert type(carried(first.Data())) is first.Data
        second = module_of(monkeypatch, "engine.core")
        assert type(carried(second.Data())) is second.Data
        assert first.Data not in registry.by_class
        with pytest.raises(UsageError, match="cannot find this class"):
            encode(first.Data())
    finally:
        unregister_package("engine")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (7, "the name of a package"),
        ([], "the name of a package"),
        ("", "the name of a package"),
        ("vllm.", "the name of a package"),
        (".vllm", "the name of a package"),
        ("vllm-x", "the name of a package"),
        ("vllm:Data", "the name of a package"),
        ("v" * 2000, "the name of a package"),
        ("__main__", "another program in each process"),
        ("__mp_main__", "another program in each process"),
        *(
            (name, "cannot be allowed as a whole")
            for name in ("builtins", "os", "os.path", "subprocess", "_io")
        ),
        *(
            (name, "cannot be allowed as a whole")
            for name in ("torch", "torch.nn", "numpy", "msgspec", "zmq")
        ),
        *(
            (name, "cannot be allowed as a whole")
            for name in ("shm_broadcast", "coordinator.queues", "device_comm")
        ),
    ],
    ids=lambda value: repr(value)[:30],
)
@pytest.mark.guarantee("C15")
def test_what_is_no_package_of_an_application_is_a_usage_error(name: Any, reason: str) -> None:
    """Names that are none, the standard library, our packages and those that we build on are refused."""
    with pytest.raises(UsageError, match=reason):
        register_package(name)
    with pytest.raises(UsageError, match="is not registered"):
        unregister_package(name)


def test_registering_a_package_twice_is_fine() -> None:
    """The second registration changes nothing; one call takes it back."""
    register_package("engine")
    register_package("engine")
    unregister_package("engine")
    with pytest.raises(UsageError, match="is not registered"):
        unregister_package("engine")


@pytest.mark.guarantee("C15")
def test_a_class_that_is_registered_by_itself_is_sent_so(package: str) -> None:
    """`register_type` wins before and after the class was met, in both directions; unregistering gives it back."""
    by_package = encode(Scores(1, 2)).to_bytes()
    assert f"{package}:Scores".encode() in by_package
    register_type(Scores, name="tests.scores")
    try:
        itself = encode(Scores(1, 2)).to_bytes()
        assert b"tests.scores" in itself
        for frame in (by_package, itself):
            assert decode(frame) == Scores(1, 2)
        with pytest.raises(UsageError, match="already registered as 'tests.scores'"):
            register_type(Scores)
    finally:
        unregister_type(Scores)
    assert encode(Scores(1, 2)).to_bytes() == by_package
    with pytest.raises(DecodeError, match=r"tests\.scores, which is not registered"):
        decode(itself)
    with pytest.raises(UsageError, match="is not registered"):
        unregister_type(Scores)


@pytest.mark.guarantee("C15")
def test_a_decode_function_is_never_passed_by() -> None:
    """A class with functions of the application is not built from its bare fields."""
    frame = encode(Core("a")).to_bytes()
    register_type(Core, encode=lambda core: core.id, decode=Core)
    try:
        assert carried(Core("b")) == Core("b")
        with pytest.raises(DecodeError, match="as a class of its package, but here it is registered as"):
            decode(frame)
    finally:
        unregister_type(Core)


@pytest.mark.guarantee("C15")
def test_a_registered_struct_still_runs_its_post_init() -> None:
    """Who wants the `__post_init__` of a Struct to run on arrival registers the Struct."""
    params = Params(0.5)
    params.temperature = -1.0
    register_type(Params)
    try:
        with pytest.raises(DecodeError, match="ValueError: negative"):
            carried(params)
    finally:
        unregister_type(Params)
    assert carried(params).temperature == -1.0


def test_a_name_of_another_registered_class_is_not_taken(package: str) -> None:
    """A name that the application has given to a class stays with it."""

    @dataclasses.dataclass
    class Own:
        a: int

    register_type(Own, name=f"{package}:Range")
    try:
        assert carried(Own(1)) == Own(1)
        with pytest.raises(UsageError, match="belongs to another registered class"):
            encode(Range(1))
    finally:
        unregister_type(Own)
    assert carried(Range(1)) == Range(1)


def test_the_path_goes_through_fields_of_a_package() -> None:
    """An error inside of an object of a package names the field."""
    with pytest.raises(UsageError, match=r"^obj\[0\]\.extra\[1\] is a builtins\.function"):
        encode([Step([], [0, lambda: 1])])


def test_flags_of_a_package_need_no_registration(package: str) -> None:
    """Members of Enums are found in loaded modules, with or without a package."""
    unregister_package(package)
    try:
        assert carried(Mode.A | Mode.B) is Mode.A | Mode.B
    finally:
        register_package(package)


@pytest.mark.guarantee("C15")
def test_threads_that_meet_classes_at_once_agree() -> None:
    """First meetings, registrations and their end in several threads at once leave one consistent table."""
    objects = all_carried()
    frames = [encode(obj).to_bytes() for obj in objects]
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def meet() -> None:
        start.wait()
        for _ in range(60):
            for obj, frame in zip(objects, frames, strict=True):
                try:
                    assert same(decode(frame), obj)
                    assert same(carried(obj), obj)
                except BaseException as error:
                    # The name that the class had when it was encoded may be gone when it is decoded.
                    if not isinstance(error, DecodeError) or "tests.range, which is not" not in str(error):
                        errors.append(error)

    def disturb() -> None:
        start.wait()
        for _ in range(150):
            register_package("elsewhere")
            unregister_package("elsewhere")  # forgets every class that was met
            register_type(Range, name="tests.range")
            unregister_type(Range)

    threads = [threading.Thread(target=meet) for _ in range(3)] + [threading.Thread(target=disturb)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert {entry.name: entry for entry in registry.by_class.values()} == registry.by_name


@pytest.mark.slow
@pytest.mark.guarantee("C15")
def test_a_forked_child_meets_classes_though_a_thread_was_at_it() -> None:
    """A child that is forked while another thread changes the table can meet classes and register them."""
    held = threading.Event()

    def hold() -> None:
        with registry._lock:
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # ends a child that waits for ever
        # No assertion: the child must not run pytest's reports.
        os._exit(0 if same(carried(Range(1)), Range(1)) else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
