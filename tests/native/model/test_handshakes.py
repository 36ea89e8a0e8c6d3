"""The handshakes of the region, its channels and their bells need each of their seq_cst operations, and no more."""

import re
from pathlib import Path

import pytest

from tests.native.model.handshakes import leaving, listening, outcomes, stepping

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "device_comm" / "csrc" / "cpu"
RING_SOURCES = ROOT / "shm_broadcast" / "csrc" / "ring"

# Patterns that find each end of an edge in a header, and its memory order. The fetch_add on the gong is modelled as one
# that orders all: the system call behind it does.
SLEEPING = {
    "poster's fence": r"own\.step\.store\(.*\n.*\n.*\n\s*std::atomic_thread_fence\(std::memory_order_(\w+)\)",
    "sleeper's fence": r"sleeping\(\)\.store\(.*\n.*\n.*\n\s*std::atomic_thread_fence\(std::memory_order_(\w+)\)",
}
LEAVING = {
    "maker's store": r"store\(made \? kReady : kNone, std::memory_order_(\w+)\)",
    "maker's look": r"words_\[rank\]\.load\(std::memory_order_(\w+)\)",
    "leaver's store": r"words_\[rank\]\.store\(1, std::memory_order_(\w+)\)",
    "leaver's look": r"words_\[index\(from, to\)\]\.load\(std::memory_order_(\w+)\)",
}
LISTENING = {
    "writer's change": r"thread listens, or .*\n\s*writer\(\)\.sequence\.fetch_add\(1, std::memory_order_(\w+)\)",
    "listener's look": r"static_cast<void>\(writer\(\)\.sequence\.load\(std::memory_order_(\w+)\)",
}
COUNTING = {
    "writer's look": r"listeners\.load\(std::memory_order_(\w+)\)",
    "listener's count": r"listeners\.fetch_add\(1, std::memory_order_(\w+)\)",
}
LISTENERS_MISTAKES = ("the word is read behind the look", "a listener is counted behind its look")
MISTAKES = (
    "the gong is read behind the second look",
    "`sleeping` is stored behind the second look",
    "even and odd steps have one word",
)


def orders_of(header: str, places: dict[str, str], folder: Path = SOURCES) -> dict[str, str]:
    """Return the memory order of each named operation in a header."""
    source = (folder / header).read_text()
    found = {name: re.findall(pattern, source) for name, pattern in places.items()}
    assert all(len(orders) == 1 for orders in found.values()), f"{header} has changed: {found}"
    return {name: orders[0] for name, orders in found.items()}


def ends_of(ranks: int, steps: int, orders: dict[str, str], mistake: str = "") -> set[tuple[int, ...]]:
    """Return how all ranks can end that take some steps: 1 if they do, 0 if they sleep for ever."""
    programs = [stepping(rank, ranks, steps, orders, mistake) for rank in range(ranks)]
    return {tuple(thread.get("ended") for thread in threads) for threads in outcomes(programs)}


def ends_without(ranks: int, steps: int, orders: dict[str, str]) -> set[tuple[int, ...]]:
    """Return how ranks can end of which rank 0 leaves after its steps and the others take one more: 2 if left alone."""
    programs = [stepping(0, ranks, steps, orders, leaves=True)]
    programs += [stepping(rank, ranks, steps + 1, orders) for rank in range(1, ranks)]
    return {tuple(thread.get("ended") for thread in threads) for threads in outcomes(programs)}


def misses_the_end(orders: dict[str, str]) -> bool:
    """Return whether a channel can be made while neither its maker nor the leaver sees the other."""
    return any(maker.get("saw") == leaver.get("saw") == 0 for maker, leaver in outcomes(leaving(orders)))


@pytest.mark.guarantee("D14", "D70")
@pytest.mark.parametrize(
    ("ranks", "steps"), [(2, 3), (3, 1), pytest.param(3, 2, marks=pytest.mark.thorough)], ids=str
)
def test_no_wake_up_is_lost_with_the_fences_of_the_header(ranks: int, steps: int) -> None:
    """In every interleaving all ranks take all steps, though only the last to post wakes. Three ranks take a minute."""
    assert ends_of(ranks, steps, orders_of("shared_region.hpp", SLEEPING)) == {(1,) * ranks}


@pytest.mark.guarantee("D14")
@pytest.mark.parametrize(
    ("ranks", "steps"), [(2, 1), (2, 2), pytest.param(3, 1, marks=pytest.mark.thorough)], ids=str
)
def test_a_rank_that_leaves_wakes_those_that_need_it(ranks: int, steps: int) -> None:
    """In every interleaving the others take the steps that it took, and learn in the next one that they are alone."""
    assert ends_without(ranks, steps, orders_of("shared_region.hpp", SLEEPING)) == {(1,) + (2,) * (ranks - 1)}


@pytest.mark.guarantee("D14")
@pytest.mark.parametrize("place", SLEEPING)
def test_each_fence_is_needed(place: str) -> None:
    """A rank can sleep for ever if one of the two fences is missing."""
    orders = {**orders_of("shared_region.hpp", SLEEPING), place: "relaxed"}
    assert (0, 1) in ends_of(2, 1, orders)


@pytest.mark.guarantee("D14")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_order_of_going_to_sleep_is_needed(mistake: str) -> None:
    """A wake-up is lost unless a rank reads the gong and says in which step it sleeps before it looks once more."""
    assert (0, 1) in ends_of(2, 2, orders_of("shared_region.hpp", SLEEPING), mistake)


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


def listening_orders() -> dict[str, str]:
    """Return the memory orders of a writer and of a thread that listens to its bell."""
    in_ring = orders_of("ring.hpp", LISTENING, RING_SOURCES)
    return in_ring | orders_of("bell.hpp", COUNTING, RING_SOURCES)


def misses_a_message(writers: int, orders: dict[str, str], mistake: str = "") -> bool:
    """Return whether a thread that listens to its bell can sleep for ever though all writers have published."""
    return any(threads[0].get("ended") != 1 for threads in outcomes(listening(writers, orders, mistake)))


@pytest.mark.guarantee("D73")
@pytest.mark.parametrize("writers", [1, 2, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_thread_that_listens_gets_the_message_of_each_writer(writers: int) -> None:
    """In every interleaving one of both sees the other, though a writer sounds the bell only if a thread listens."""
    assert not misses_a_message(writers, listening_orders())


@pytest.mark.guarantee("D73")
@pytest.mark.parametrize("order", ["relaxed", "weaker by one"])
@pytest.mark.parametrize("place", [*LISTENING, *COUNTING])
def test_each_seq_cst_of_the_bell_is_needed(place: str, order: str) -> None:
    """If one of the four operations is weaker, a thread can sleep though its message is there."""
    is_store = place in {"writer's change", "listener's count"}
    nearly = "release" if is_store else "acquire"
    assert misses_a_message(1, {**listening_orders(), place: nearly if order != "relaxed" else order})


@pytest.mark.guarantee("D73")
@pytest.mark.parametrize("mistake", LISTENERS_MISTAKES)
def test_the_order_of_beginning_to_listen_is_needed(mistake: str) -> None:
    """A message is missed unless a thread reads the word and counts itself before it looks."""
    assert misses_a_message(1, listening_orders(), mistake)
