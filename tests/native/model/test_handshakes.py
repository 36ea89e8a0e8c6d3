"""The handshakes of the region and its channels need each of their seq_cst operations, and need no more."""

import re
from pathlib import Path

import pytest

from tests.native.model.handshakes import leaving, outcomes, parking, posting

SOURCES = Path(__file__).parents[3] / "device_comm" / "csrc" / "cpu"

# Patterns that find each end of an edge in a header, and its memory order. The fetch_add on the bell is left out of
# `post->parked`: the system calls around it order it anyway, and no wake-up is lost without its seq_cst.
PARKING = {
    "poster's fence": r"own\.step\.store\(.*\n\s*std::atomic_thread_fence\(std::memory_order_(\w+)\)",
    "sleeper's fence": r"parked\.store\(1, .*\n.*\n\s*std::atomic_thread_fence\(std::memory_order_(\w+)\)",
}
LEAVING = {
    "maker's store": r"store\(made \? kReady : kNone, std::memory_order_(\w+)\)",
    "maker's look": r"words_\[rank\]\.load\(std::memory_order_(\w+)\)",
    "leaver's store": r"words_\[rank\]\.store\(1, std::memory_order_(\w+)\)",
    "leaver's look": r"words_\[index\(from, to\)\]\.load\(std::memory_order_(\w+)\)",
}
MISTAKES = ("the bell is read behind the second look", "parked is set behind the second look")


def orders_of(header: str, places: dict[str, str]) -> dict[str, str]:
    """Return the memory order of each named operation in a header."""
    source = (SOURCES / header).read_text()
    found = {name: re.findall(pattern, source) for name, pattern in places.items()}
    assert all(len(orders) == 1 for orders in found.values()), f"{header} has changed: {found}"
    return {name: orders[0] for name, orders in found.items()}


def loses_a_wake_up(orders: dict[str, str], mistake: str = "") -> bool:
    """Return whether a rank can sleep for ever although the other one has posted."""
    return any(sleeper.sleeps for _, sleeper in outcomes([posting(orders), parking(orders, mistake)]))


def misses_the_end(orders: dict[str, str]) -> bool:
    """Return whether a channel can be made while neither its maker nor the leaver sees the other."""
    return any(maker.get("saw") == leaver.get("saw") == 0 for maker, leaver in outcomes(leaving(orders)))


@pytest.mark.guarantee("D14")
def test_no_wake_up_is_lost_with_the_fences_of_the_header() -> None:
    """In every interleaving of a post and a park the sleeping rank wakes up."""
    assert not loses_a_wake_up(orders_of("shared_region.hpp", PARKING))


@pytest.mark.guarantee("D14")
@pytest.mark.parametrize("place", PARKING)
def test_each_fence_is_needed(place: str) -> None:
    """A rank can sleep for ever if one of the two fences is missing."""
    assert loses_a_wake_up({**orders_of("shared_region.hpp", PARKING), place: "relaxed"})


@pytest.mark.guarantee("D14")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_order_of_parking_is_needed(mistake: str) -> None:
    """A wake-up is lost unless a rank reads the bell and sets `parked` before it looks once more."""
    assert loses_a_wake_up(orders_of("shared_region.hpp", PARKING), mistake)


@pytest.mark.guarantee("D15")
def test_a_maker_or_a_leaver_sees_the_other() -> None:
    """With the memory orders of the header at least one of the two ranks sees what the other has done."""
    assert not misses_the_end(orders_of("channels.hpp", LEAVING))


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("order", ["relaxed", "weaker by one"])
@pytest.mark.parametrize("place", LEAVING)
def test_each_seq_cst_of_the_table_is_needed(place: str, order: str) -> None:
    """If one of the four operations is weaker, it can happen that neither rank sees the other."""
    nearly = "release" if place.endswith("store") else "acquire"
    assert misses_the_end(
        {**orders_of("channels.hpp", LEAVING), place: nearly if order != "relaxed" else order}
    )
