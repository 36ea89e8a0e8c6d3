"""A search tries every interleaving of the ring's protocol at small sizes, and finds bugs that are put in."""

from functools import cache

import pytest

from tests.native.model.ring_model import BUGS, NEARLY, Scenario, explore

RIGHT = {
    "one reader, wrap-around, skips, full ring": Scenario((2, 1, 2, 1, 2)),
    "an idle writer": Scenario((2, 1, 2, 1), closes=False),
    "two readers, a ring of one record": Scenario((2, 2), units=2, readers=2),
    "two readers, an idle writer": Scenario((1, 1), units=1, readers=2, closes=False),
    "another thread closes": Scenario((2, 1, 2), closer=True),
    "another thread closes the writer of two readers": Scenario((1,), units=1, readers=2, closer=True),
    "another thread closes while a record is held": Scenario(
        (2, 1, 2, 2), closer=True, lingers=True, closes=False
    ),
    "a record is held for ever": Scenario((2, 1, 2, 2), lingers=True, closes=False),
    "a reader leaves": Scenario((2, 1, 2, 2), leaves=True),
    "one of two readers leaves": Scenario((1, 1), units=1, readers=2, leaves=True),
    "a reader is killed": Scenario((2, 1, 2, 2), reader_dies=True),
    "one of two readers is killed": Scenario((1, 1), units=1, readers=2, reader_dies=True, closes=False),
    "the writer is killed": Scenario((2, 1, 2, 2), writer_dies=True),
    "the writer of two readers is killed": Scenario(
        (1, 1), units=1, readers=2, writer_dies=True, closes=False
    ),
    "streams, wrap-around, skips, full ring": Scenario((2, 1, 2, 1, 2), streams=True),
    "streams and an idle writer": Scenario((2, 1, 2, 2), streams=True, closes=False),
    "two readers of a stream": Scenario((2,), units=2, readers=2, streams=True, closes=False),
    "another thread closes within a stream": Scenario((2, 2), streams=True, closer=True),
    "a reader leaves within a stream": Scenario((2, 1, 2, 2), streams=True, leaves=True),
    "a reader is killed within a stream": Scenario((2, 1, 2, 2), streams=True, reader_dies=True),
    "the writer is killed within a stream": Scenario((2, 1, 2, 2), streams=True, writer_dies=True),
    "announced messages": Scenario((2, 1, 2, 2), announces=True, closes=False),
    "announced messages for two readers": Scenario((1,), units=1, readers=2, announces=True),
    "announced streams, and the writer is killed": Scenario(
        (2, 1, 2), streams=True, announces=True, writer_dies=True
    ),
}
# These visit most states: each takes three to five seconds of processor time.
LARGE = {
    "two readers, a ring of one record",
    "another thread closes the writer of two readers",
    "one of two readers leaves",
}
WRONG = dict.fromkeys(BUGS, Scenario((2, 1, 2, 2), closes=False)) | {
    BUGS[5]: Scenario((2, 1)),
    BUGS[6]: Scenario((2, 1, 2, 2), closes=False, lingers=True),
    BUGS[7]: Scenario((2, 1, 2), closes=False, closer=True, lingers=True),
    BUGS[8]: Scenario((2, 2, 3), units=6),
    BUGS[10]: Scenario((2, 1, 2, 2), closes=False, streams=True),
    BUGS[11]: Scenario((2, 2, 2), closes=False, streams=True),
    BUGS[12]: Scenario((2, 1), closes=False, streams=True),
    BUGS[13]: Scenario((2, 1), closer=True),
}


@pytest.mark.guarantee("B1", "B2", "B11")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.thorough if each in LARGE else ()) for each in RIGHT]
)
def test_no_interleaving_goes_wrong(name: str) -> None:
    """In no interleaving is a record overwritten, torn, lost or reordered, or a process asleep that could go on."""
    found = explore(RIGHT[name])
    assert not found.problem, "\n".join([found.problem, *found.steps])
    assert found.states > 1000


@cache
def problem_of(scenario: Scenario) -> str:
    """Return what the search finds wrong; many bugs are shown in the same scenario, which is right without them."""
    return explore(scenario).problem


@pytest.mark.guarantee("B11")
@pytest.mark.parametrize("bug", BUGS)
def test_the_search_finds_each_bug(bug: str) -> None:
    """The search reports a protocol with one of these bugs, with the steps that lead to the failure."""
    assert problem_of(WRONG[bug]) == ""
    found = explore(WRONG[bug]._replace(bug=bug))
    assert found.problem
    assert len(found.steps) >= 5


@pytest.mark.guarantee("B11")
@pytest.mark.parametrize("name", NEARLY)
def test_either_of_the_two_guards_of_a_parking_reader_suffices(name: str) -> None:
    """A reader misses nothing with only its second look, or with only the kernel's look at the sequence."""
    assert explore(Scenario((2, 1, 2, 2), closes=False, bug=name)).problem == ""
