"""What an agreement has made belongs to the caller, or is destroyed, wherever a signal handler raises."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.bootstrap.world import Line
from coordinator.elastic import rebuilding
from coordinator.elastic.ending import NOTHING
from coordinator.elastic.part import Note
from coordinator.elastic.protocol import Complete, Prepared
from coordinator.settings import CoordinatorSettings
from shm_broadcast.liveness import this_process
from tests.handlers import Interrupt, raising_at

PLACES = ("elastic/rebuilding.py", "/contextlib.py")
NOTE = Note(this_process(), {}, {}, 0, 0)
STORE: Any = None
LINE = Line(STORE, 0, 0, (0,), (0,), 1)


class Groups:
    """Groups that are destroyed once."""

    def __init__(self) -> None:
        self.is_destroyed = False

    def destroy(self) -> None:
        self.is_destroyed = True


class Part:
    """A part in an agreement, which destroys its groups when it is closed, unless it has returned them."""

    def __init__(self, made: list[Groups]) -> None:
        self.made = made
        self.held: Groups | None = None

    def build(self) -> None:
        self.held = Groups()
        self.made.append(self.held)

    def change(self, _number: int, _members: object) -> Any:
        return SimpleNamespace(lost=())

    def begin(self, _number: int, _members: object) -> Groups:
        held, self.held = self.held, None
        assert held is not None
        return held

    def close(self) -> None:
        if self.held is not None:
            self.held.destroy()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Groups]:
    """Return what agreements make, which end at once."""
    groups = list[Groups]()
    monkeypatch.setattr(rebuilding, "Part", lambda *_, **_options: Part(groups))
    return groups


def end_with(monkeypatch: pytest.MonkeyPatch, end: object) -> None:
    def run(part: Part) -> object:
        part.build()
        return end

    monkeypatch.setattr(
        rebuilding, "Driver", lambda _store, _me, part, *_: SimpleNamespace(run=lambda _steps: run(part))
    )


def strike_everywhere(call: Callable[[], object], made: list[Groups]) -> None:
    """Strike at every place of a call, and check that its groups are destroyed, or returned, when it ends."""
    for step in count():
        left, returned = list[Groups](), list[object]()

        def run(left: list[Groups] = left, returned: list[object] = returned) -> None:
            try:
                returned.append(call())
            except Interrupt:
                # The traceback still refers to all that the call has made.
                left.extend(group for group in made if not group.is_destroyed)
                raise

        comes = raising_at(step, run, PLACES)
        assert left == [], step
        assert not (returned and made[0].is_destroyed), step
        made.clear()
        if not comes:
            break
    assert step > 10


@pytest.mark.guarantee("G37")
def test_a_change_that_is_struck_anywhere_while_it_is_prepared_is_closed(
    made: list[Groups], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the caller has the plan, which holds the groups."""
    end_with(monkeypatch, Prepared(1, (0,)))
    world = SimpleNamespace(size=1, rank=0, line=lambda: LINE)
    old: Any = SimpleNamespace(world=world, note=lambda *_: NOTE, others=lambda _line: {})
    none: Any = None
    strike_everywhere(
        lambda: rebuilding.prepare(old, none, 0, (), 1, 1.0, none, NOTHING, none, [], none), made
    )


@pytest.mark.guarantee("G37")
def test_a_process_that_is_struck_anywhere_while_it_joins_has_its_groups_or_none(
    made: list[Groups], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part lets go of them before the caller has them."""
    end_with(monkeypatch, Complete(1, (0,), (0, ())))
    none: Any = None
    strike_everywhere(
        lambda: rebuilding.join_members(LINE, CoordinatorSettings(), 1.0, none, lambda: None, 0), made
    )
