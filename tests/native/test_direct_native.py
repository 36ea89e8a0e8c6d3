"""A group's `broadcast_object` as a method of a port: which calls it makes itself, and what it hands on."""

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from shm_broadcast import _core
from tests.native.test_port_native import Unknown, ends, full

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


class General:
    """Notes the calls that are handed on."""

    def __init__(self) -> None:
        self.calls: Calls = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """Note a call."""
        self.calls.append((args, kwargs))
        return "general"


def unexpected(*_: Any) -> NoReturn:
    """Fail: this must not be called."""
    pytest.fail("called")


def served(
    source: int = 0,
    next_stage: Callable[[bool], Any] = unexpected,
    refuse: Callable[[Exception], Any] = unexpected,
) -> tuple[_core.WritePort, _core.ReadPort, General]:
    """Return both ends of a ring that serve a group, and what both hand other calls to."""
    _, writer, reader = ends()
    general = General()
    writer.direct(source, general)
    reader.direct(source, general, next_stage, refuse)
    return writer, reader, general


@pytest.mark.parametrize(
    ("source", "args"), [(0, (7,)), (0, (7, 0)), (0, ()), (3, (7, 3)), (0, (None,)), (2, (None, 2))]
)
def test_an_ordinary_call_is_made_here(source: int, args: tuple[Any, ...]) -> None:
    """The writer gets its own object back, the reader what was sent, whatever it brings."""
    writer, reader, general = served(source)
    value = [1, {"a": (2.5, "b")}] if args and args[0] else None
    assert writer.broadcast_object(*([value, *args[1:]] if args else [])) is value
    assert reader.broadcast_object(*args) == value
    assert general.calls == []
    assert writer.messages == reader.messages == 1


@pytest.mark.parametrize(
    ("source", "args", "kwargs"),
    [
        (0, (7, 1), {}),
        (0, (7, True), {}),
        (1, (7, True), {}),
        (1, (7,), {}),
        (0, (7, 0.0), {}),
        (0, (7, 1 << 70), {}),
        (0, (7, "0"), {}),
        (0, (7, 0, None), {}),
        (0, (), {"obj": 7}),
        (0, (7,), {"src": 0}),
        (0, (7,), {"timeout_s": 1.0}),
        (0, (7, 0), {"type": int, "nonsense": None}),
    ],
)
def test_any_other_call_is_handed_on_as_it_is(
    source: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Another rank, keywords, what is no rank: the general way knows what to do or to raise."""
    writer, reader, general = served(source)
    assert writer.broadcast_object(*args, **kwargs) == "general"
    assert reader.broadcast_object(*args, **kwargs) == "general"
    assert general.calls == [(args, kwargs)] * 2
    assert writer.messages == 0


@pytest.mark.parametrize(
    ("prepare", "obj"),
    [(lambda port: port.hold(True), 1), (lambda port: port.close(), 1), (full, bytes(1000)), (id, Unknown())],
    ids=["held", "closed", "no room", "unknown"],
)
def test_what_is_not_sent_is_handed_on(prepare: Callable[[_core.WritePort], object], obj: object) -> None:
    """With nothing changed."""
    writer, _, general = served()
    prepare(writer)
    before = writer.messages
    assert writer.broadcast_object(obj) == "general"
    assert general.calls == [((obj,), {})]
    assert writer.messages == before


@pytest.mark.parametrize("prepare", [lambda port: port.hold(True), lambda port: port.close()])
def test_a_reader_that_cannot_be_used_hands_on(prepare: Callable[[_core.ReadPort], object]) -> None:
    """Held by a lease or a failure, or closed."""
    writer, reader, general = served()
    writer.send(1)
    prepare(reader)
    assert reader.broadcast_object() == "general"
    assert general.calls == [((), {})]


def test_a_reader_asks_how_to_wait_until_there_is_a_message() -> None:
    """First at the beginning of the wait, then as one that has waited."""
    asked: list[bool] = []

    def next_stage(has_waited: bool) -> tuple[int, int]:
        asked.append(has_waited)
        if len(asked) == 3:
            writer.send("at last")
        return 1000, 1000

    writer, reader, _ = served(next_stage=next_stage)
    assert reader.broadcast_object() == "at last"
    assert asked == [False, True, True]


class RefusalError(Exception):
    """What `refuse` raises."""


def refuse(error: Exception) -> NoReturn:
    """Raise for an error."""
    raise RefusalError(str(error)) from error


def ends_with(error: BaseException) -> Callable[[bool], NoReturn]:
    """Return a `next_stage` that ends the call."""

    def next_stage(_has_waited: bool) -> NoReturn:
        raise error

    return next_stage


def test_what_ends_the_wait_is_refused_and_ctrl_c_goes_through() -> None:
    """The error keeps its cause and its traceback."""
    _, reader, general = served(next_stage=ends_with(ValueError("closed")), refuse=refuse)
    with pytest.raises(RefusalError, match="closed") as caught:
        reader.broadcast_object()
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.__traceback__ is not None
    _, reader, _ = served(next_stage=ends_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        reader.broadcast_object()
    assert general.calls == []


@pytest.mark.parametrize("stage", [None, (1,), (1, -2), (1, "2"), (1, 2, 3)])
def test_a_stage_that_is_none_is_refused(stage: Any) -> None:
    """Instead of waited for."""
    _, reader, _ = served(next_stage=lambda _: stage, refuse=refuse)
    with pytest.raises(RefusalError):
        reader.broadcast_object()


def test_an_error_that_is_not_raised_again_is_not_lost() -> None:
    """A `refuse` that returns is an error itself."""
    _, reader, _ = served(next_stage=ends_with(ValueError("closed")), refuse=id)
    with pytest.raises(RuntimeError, match="swallowed"):
        reader.broadcast_object()


def test_a_message_that_cannot_be_decoded_is_refused_and_the_next_one_arrives() -> None:
    """As on the general way."""
    memory, writer, reader = ends()
    writer.direct(0, unexpected)
    reader.direct(0, unexpected, unexpected, refuse)
    _core.ring_write(memory, b"nonsense" * 8, (), 0, 0, 0)
    writer.broadcast_object("good")
    with pytest.raises(RefusalError):
        reader.broadcast_object()
    assert reader.broadcast_object() == "good"


def test_a_port_serves_one_group_with_the_functions_that_it_needs() -> None:
    """And says so when it serves none."""
    _, writer, reader = ends()
    for port in (writer, reader):
        with pytest.raises(RuntimeError, match="serves no group"):
            port.broadcast_object(1)
    with pytest.raises(ValueError, match="needs other functions"):
        reader.direct(0, unexpected)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="needs other functions"):
        writer.direct(0, unexpected, unexpected, unexpected)  # type: ignore[call-arg]
    writer.direct(0, unexpected)
    with pytest.raises(ValueError, match="serves a group"):
        writer.direct(0, unexpected)


def test_a_closed_port_serves_by_the_general_way_alone() -> None:
    """And lets go of what holds it."""
    _, _, reader = ends()
    general = General()
    reader.close()
    reader.direct(0, general, unexpected, unexpected)
    assert reader.broadcast_object() == "general"

    def next_stage(_has_waited: bool) -> NoReturn:
        reader.close()
        raise ValueError("closed meanwhile")

    _, reader, general = served(next_stage=next_stage, refuse=refuse)
    with pytest.raises(RefusalError, match="closed meanwhile"):
        reader.broadcast_object()
    alive = weakref.ref(next_stage)
    del next_stage
    assert alive() is None
    assert reader.broadcast_object() == "general"


def test_the_call_is_described_as_that_of_a_group() -> None:
    """Its parameters are the same."""
    from coordinator import GroupCoordinator

    _, writer, reader = ends()
    wanted = list(inspect.signature(GroupCoordinator.broadcast_object).parameters)[1:]
    for port in (writer, reader):
        assert list(inspect.signature(port.broadcast_object).parameters) == wanted
        assert "Return rank `src`'s object" in (port.broadcast_object.__doc__ or "")


def test_what_holds_its_own_port_is_collected() -> None:
    """A group holds the port, which holds the group."""
    writer, reader, general = served()
    alive = weakref.ref(general)
    general.calls.append(((writer, reader), {}))
    del writer, reader, general
    gc.collect()
    assert alive() is None
