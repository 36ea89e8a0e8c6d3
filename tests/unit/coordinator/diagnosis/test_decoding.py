"""Decoding a page: how much of it, and what a hostile or broken one gives."""

import random
import struct
from collections.abc import Iterator

import msgspec
import pytest

from coordinator.diagnosis.decoding import decode_lateness, decode_page
from coordinator.diagnosis.model import Page
from shm_broadcast import _core
from shm_broadcast.errors import DecodeError
from shm_broadcast.status import layout
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import TABLES, GroupState, Outcome
from shm_broadcast.status.page import OwnPage

MUTATIONS = (4_000, pytest.param(20_000, marks=pytest.mark.thorough))


@pytest.fixture
def page() -> Iterator[OwnPage]:
    """Return a page of this process beside its own, with groups, calls and queues."""
    made = OwnPage()
    made.set_rank(1, 4)
    for number in range(3):
        status = made.group(f"tp:{number}", 1, [4, 7, 8, 9])
        status.set_state(GroupState.USABLE)
        lane = status.lane("device", "process group")
        for call in range(1, 41):
            lane.begin(kind_of("all_reduce" if call % 2 else "send"), call, 4096, 2)
            lane.end(Outcome.DONE if call % 5 else Outcome.FAILED)
        lane.begin(kind_of("barrier"), 41, 0, layout.NOBODY)
    made.add_queue("steps", made.segment, 0, -1)
    yield made
    made.segment.close()
    # The mapping goes with what refers to it.
    vars(made).clear()


def copy_of(page: OwnPage) -> bytes:
    """Return a copy of a page."""
    return _core.status_copy(page.segment.memory)


def test_calls_that_have_ended_are_decoded_only_if_asked_for(page: OwnPage) -> None:
    """All else is equal, and of the calls the newest are taken."""
    copy = copy_of(page)
    whole, newest = decode_page(copy), decode_page(copy, newest=7)
    without = decode_page(copy, records=False)
    assert [record.index for record in whole.records] == list(range(1, 121))
    assert newest.records == whole.records[-7:]
    assert without.records == ()
    assert msgspec.structs.replace(whole, records=()) == without
    assert msgspec.structs.replace(newest, records=()) == without


def test_the_newest_calls_are_found_where_the_ring_has_wrapped(page: OwnPage) -> None:
    """Of more than 4,096 calls the newest are the last ones that were made."""
    lane = page.group("pp:0", 0, [0, 1]).lane("device", "process group")
    for number in range(1, 5001):
        lane.begin(kind_of("barrier"), number, 0, layout.NOBODY)
        lane.end(Outcome.DONE)
    newest = decode_page(copy_of(page), newest=10).records
    assert [record.number for record in newest] == list(range(4991, 5001))


def test_no_text_holds_what_a_terminal_obeys(page: OwnPage) -> None:
    """Names come from other processes, and are printed by all commands. A cause of several lines becomes one."""
    page.group("tp:\x1b[2J\x07ü", 0, [0, 1]).set_state(GroupState.BROKEN, "first\nsecond\x1b")
    *_, group = decode_page(copy_of(page)).groups
    assert (group.name, group.cause) == ("tp:?[2J?ü", "first second?")


def test_lateness_is_what_the_records_say(page: OwnPage) -> None:
    """For the newest calls of each plane, also where the group of a lane is another one by now."""
    copy = bytearray(copy_of(page))
    table = TABLES["records"]
    at = {
        name: sum(struct.calcsize("<" + field.form) for field in list(table.fields.values())[:place])
        for place, name in enumerate(table.fields)
    }
    for place in range(120):
        row = table.offset + place * table.nbytes
        struct.pack_into("<H", copy, row + at["last"], place % 4 if place % 3 else layout.NOBODY)
        struct.pack_into("<I", copy, row + at["late_ns"], place)
    # A call that began before its group was made belongs to an earlier group.
    struct.pack_into("<Q", copy, table.offset + 119 * table.nbytes + at["begin"], 1)
    said = decode_page(bytes(copy))
    for newest in (0, 7, 120, 4096):
        found = decode_lateness(bytes(copy), said, newest)
        expected: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
        for record in reversed(said.records):
            if record.last is not None and record.index > 120 - newest:
                key = record.group, record.epoch, record.plane
                expected.setdefault(key, []).append((record.last, record.late_ns))
        assert found == expected
        assert len(said.records) == 119


def mutated(copy: bytes, random_: random.Random) -> bytearray:
    """Return the page with some changed words; most of them where the page is in use."""
    changed = bytearray(copy)
    for _ in range(random_.randint(1, 8)):
        table = TABLES[random_.choice(list(TABLES))]
        place = random_.randrange(min(table.number, 6))
        at = table.offset + place * table.nbytes + random_.randrange(0, table.nbytes, 4)
        kind = random_.randrange(4)
        if kind == 0:
            changed[at] ^= 1 << random_.randrange(8)
        elif kind == 1:
            struct.pack_into("<I", changed, at, random_.choice((0, 1, 2, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)))
        elif kind == 2:
            end = min(at + random_.choice((8, 64, 320)), len(changed))
            changed[at:end] = random_.randbytes(end - at)
        else:
            struct.pack_into("<Q", changed, at & ~7, random_.choice((0, 1, 2**32, 2**63, 2**64 - 1)))
    return changed


@pytest.mark.parametrize("mutations", MUTATIONS)
def test_a_hostile_page_is_refused_or_decoded(page: OwnPage, mutations: int) -> None:
    """Of 20,000 changed pages each gives a DecodeError or a page that can be written as JSON, and nothing else."""
    copy, random_ = copy_of(page), random.Random(18)
    refused = 0
    for _ in range(mutations):
        try:
            changed = mutated(copy, random_)
            said = decode_page(bytes(changed), newest=8)
        except DecodeError:
            refused += 1
            continue
        assert msgspec.json.decode(msgspec.json.encode(said), type=Page) == said
        decode_lateness(bytes(changed), said, 8)
    # Both happen: the mutations neither spare the page nor make every one of them worthless.
    assert mutations / 20 < refused < mutations * 0.95


def test_a_group_that_was_torn_in_the_middle_does_not_hide_the_page(page: OwnPage) -> None:
    """A process that was killed while it wrote leaves a place that cannot be; the other groups are still shown."""
    changed = bytearray(copy_of(page))
    groups = TABLES["groups"]
    sequence, state = struct.unpack_from("<II", changed, groups.offset)
    struct.pack_into("<4I", changed, groups.offset, sequence | 1, state, 0, 200)
    assert [group.is_torn for group in decode_page(bytes(changed)).groups] == [True, False, False]
    struct.pack_into("<I", changed, groups.offset, sequence & ~1)
    with pytest.raises(DecodeError, match="place 200 in a group of 4"):
        decode_page(bytes(changed))
