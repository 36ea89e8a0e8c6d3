"""What a store holds that no rank of this version has written, and odd values of callers, end in errors of ours."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from coordinator.addresses.interfaces import interface_address
from coordinator.bootstrap.agreement import outcomes
from coordinator.bootstrap.agreement.agreeing import agree, decline
from coordinator.bootstrap.agreement.attendance import Attendance
from coordinator.bootstrap.agreement.views import Place, Places, View
from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.bootstrap.connections import open_tcp_store
from coordinator.bootstrap.group_names import GroupNames
from coordinator.bootstrap.world import Line, World
from coordinator.diagnosis.metrics.exporter import MetricsServer
from coordinator.elastic import joiners
from coordinator.elastic.driver import Deadlines, Driver, ask
from coordinator.elastic.exclusion import exclusion_in
from coordinator.elastic.part import Joiner, Note
from coordinator.elastic.protocol import Presence, agree_on_members, settle
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CapabilityError, NativeError, SettingsError, UsageError
from shm_broadcast.liveness import open_pidfd, this_process
from tests.ports import free_port

# No JSON, no UTF-8, and JSON of another kind.
FOREIGN: list[str | bytes] = ["{", b"\xff", "[]"]
WAITING = 1 << 31


class Bytes:
    """A store whose values may be any bytes: torch's Python functions take text only."""

    def __init__(self, value: str | bytes) -> None:
        self._value = value if isinstance(value, bytes) else value.encode()

    def get(self, _key: str) -> bytes:
        return self._value

    def check(self, _keys: list[str]) -> bool:
        return True

    def add(self, _key: str, _amount: int) -> int:
        return 1

    def set(self, _key: str, _value: str) -> None:
        """Keep the value that is there."""

    def compare_set(self, _key: str, _expected: str, _desired: str) -> bytes:
        return self._value


def foreign(value: str | bytes) -> Any:
    return Bytes(value)


@pytest.mark.parametrize("value", FOREIGN)
def test_a_foreign_value_in_a_store_is_a_native_error(value: str | bytes) -> None:
    """The raw error of a decoder says nothing of the store."""
    store = foreign(value)
    line = Line(store, 0, 0, (0, 1), (0, 1), 2)
    world = World(0, 2, store, line=line)
    driver = Driver(store, 0, Idle(), Deadlines(10.0), "here")
    calls: list[Callable[[], Any]] = [
        lambda: ask_store(lambda: msgspec.json.decode(store.get("key"), type=dict), "here", 10.0),
        lambda: GroupNames(store, 0, 10.0).take("tp"),
        lambda: world.first_use("queue", 10.0),
        lambda: ask(store, settle(1), "here", 10.0),
        lambda: driver.run(settle(1)),
    ]
    for call in calls:
        with pytest.raises(NativeError, match="holds a value that no rank of this version has written"):
            call()


class Idle:
    """Does nothing for an agreement."""

    def dead(self) -> frozenset[int]:
        return frozenset()

    def choose(self, alive: tuple[int, ...]) -> None:
        """Choose nobody."""

    def judge(self, chosen: object, notes: object) -> str:
        return ""

    def tear_down(self) -> None:
        """Stop nothing."""

    def build(self, number: int, members: tuple[int, ...]) -> None:
        """Create nothing."""

    def discard(self) -> None:
        """Destroy nothing."""


def test_a_foreign_presence_ends_an_attempt_in_a_native_error() -> None:
    """A member of another version must not end the others' call in the raw error of a decoder."""
    store = dist.HashStore()
    store.set("1/present/1", "{")
    driver = Driver(store, 0, Idle(), Deadlines(10.0), "here")
    with pytest.raises(NativeError, match="no rank of this version has written"):
        driver.run(agree_on_members(0, 0, (0, 1)))


def test_a_failed_call_keeps_its_error_where_the_store_holds_a_foreign_decision() -> None:
    """Whether the others go on without this rank is asked beside that error."""
    store = dist.HashStore()
    store.set("1/members", "{")
    assert exclusion_in(World(0, 2, store, line=Line(store, 0, 0, (0, 1), (0, 1), 2)))("here") is None


@pytest.mark.guarantee("E8")
def test_a_process_whose_note_cannot_be_read_keeps_nobody_else_from_joining() -> None:
    """One such process ended `pending_members` and each `prepare` on all ranks."""
    store = dist.HashStore()
    line = Line(store, 0, 0, (0, 1), (0, 1), 2)
    store.add("joiners", 3)
    note = Note(this_process(), {}, {}, 0, WAITING + 2)
    text = msgspec.json.encode(note).decode()
    store.set(f"joining/{WAITING}", msgspec.json.encode(Presence((), '{"of": "another version"}')).decode())
    store.set(f"joining/{WAITING + 1}", "{")
    store.set(f"joining/{WAITING + 2}", msgspec.json.encode(Presence((), text)).decode())
    assert joiners.pending(line, (0, 1), "here", 10.0) == (Joiner(WAITING + 2, WAITING + 2),)
    for member in (WAITING, WAITING + 1):
        assert store.get(f"refused/{member}").startswith(b"the members cannot read")


def test_an_outcome_with_another_number_of_places_is_a_native_error() -> None:
    """Ranks would count as being elsewhere, or be missing."""
    store, places = dist.HashStore(), Places([Place(0, 0, 0, is_hidden=True)] * 3, ["here"])
    outcomes.decide(store, outcomes.Complete(places.encode()))
    with pytest.raises(NativeError, match="3 places for 1 ranks"):
        agree(store, "group 'tp:0'", 0, [0], View({}, this_process(), "127.0.0.1"), 10.0)


def test_a_foreign_list_of_ranks_on_a_kernel_is_a_decoders_error() -> None:
    """`agree` says of these that no rank has written the value."""
    with pytest.raises(msgspec.MsgspecError):
        Attendance(foreign("0 one "), 0, [0, 1]).mates("kernel")


def test_a_rank_that_declines_keeps_its_error_where_the_outcome_is_foreign() -> None:
    """The outcome cannot be decoded, so nobody can be told."""
    for value in FOREIGN:
        decline(foreign(value), "group 'tp:0'", 0, CapabilityError("no descriptor"))


def test_no_process_has_a_number_that_the_kernel_cannot_take() -> None:
    """A view in the store may name any number; `pidfd_open` raised an `OverflowError`."""
    with pytest.raises(ProcessLookupError, match="no process has the number"):
        open_pidfd(1 << 40)


def test_a_limit_of_three_million_years_is_one_that_never_passes() -> None:
    """It is accepted as a setting, and was too large for a `timedelta`."""
    settings = CoordinatorSettings(create_timeout_s=1e14)
    store = open_tcp_store("127.0.0.1", free_port(), 0, 1, True, settings, None)
    view, found = View({}, this_process(), "127.0.0.1"), list[object]()
    thread = threading.Thread(
        target=lambda: found.append(agree(dist.PrefixStore("x", store), "it", 1, [0, 1], view, 1e14))
    )
    thread.start()
    agree(dist.PrefixStore("x", store.clone()), "it", 0, [0, 1], view, 1e14)  # type: ignore[attr-defined]
    thread.join(20.0)
    assert found


def test_an_interface_whose_name_is_no_text_is_a_settings_error() -> None:
    """An environment variable may hold any byte, and a caller any text."""
    for name in ("\udcff", "\ud800"):
        with pytest.raises(SettingsError, match="there is no such interface"):
            interface_address(name)


def test_a_name_that_no_host_can_have_is_refused_for_metrics() -> None:
    """Python encodes names before it looks them up."""
    with pytest.raises(UsageError, match="metrics cannot be served on"):
        MetricsServer("a..b:9464")
