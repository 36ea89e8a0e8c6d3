"""Names of groups: how a rank counts them in the store, and how often it asks."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from coordinator.bootstrap.group_names import GroupNames
from tests.counting_store import CountingStore, Traffic

LIMIT_S = 20.0


def counting(base: Any) -> tuple[Any, Traffic]:
    traffic = Traffic()
    return CountingStore(lambda: base, traffic), traffic


def names(store: Any, rank: int = 0) -> GroupNames:
    return GroupNames(store, rank, LIMIT_S)


def view(*groups: str) -> str:
    return msgspec.json.encode({"protocol": "1", "groups": ", ".join(groups)}).decode()


@pytest.mark.guarantee("D92")
def test_a_name_takes_one_operation() -> None:
    """The first one too; and one for a round of several groups."""
    store, traffic = counting(dist.HashStore())
    own = names(store, 3)
    assert own.take("tp") == "tp:0"
    assert own.take("tp") == "tp:1"
    assert own.take_round("layout", ["tp", "pp"]) == ("layout:0", ["tp:2", "pp:0"])
    assert own.take_round("layout", ["tp", "pp"]) == ("layout:1", ["tp:3", "pp:1"])
    assert traffic.names == ["compare_set"] * 4


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_names_go_on_where_the_store_does(kind: str, tmp_path: Path) -> None:
    """What has been counted over another connection counts: the store knows better than this process."""
    stores: list[Any] = (
        [dist.HashStore()] * 3
        if kind == "hash"
        else [dist.FileStore(str(tmp_path / "store"), -1) for _ in range(3)]
    )
    first, second, third = (counting(store)[0] for store in stores)
    assert names(first).take("tp") == "tp:0"
    assert names(second).take("tp") == "tp:1"
    assert names(third, 1).take("tp") == "tp:0"
    assert names(first).take("tp") == "tp:2"


def test_names_begin_anew_where_the_store_has_lost_them() -> None:
    """As in a store that was emptied for the next run."""
    base = dist.HashStore()
    store, _ = counting(base)
    assert names(store).take("tp") == "tp:0"
    base.delete_key("group_coordinator/created/0")
    assert names(store).take("tp") == "tp:0"
    assert names(store).take("tp") == "tp:1"


def test_ranks_that_have_counted_differently_have_the_same_names_after_they_disagreed() -> None:
    """Whatever was counted on one of them only: each counts all that any of them asked for."""
    base = dist.HashStore()
    first, second = names(base, 0), names(base, 1)
    first.take("tp")
    asked = [first.take_round("layout", ["tp", "eplb"]), second.take_round("layout", ["tp"])]
    assert [groups for _, groups in asked] == [["tp:1", "eplb:0"], ["tp:0"]]
    views = [view(*groups) for _, groups in asked]
    for each in (first, second):
        each.catch_up(views)
        assert each.take_round("layout", ["tp", "eplb"]) == ("layout:1", ["tp:2", "eplb:1"])


def test_ranks_catch_up_in_a_later_epoch_too() -> None:
    """The number of a name is followed by the epoch there."""
    own = GroupNames(dist.HashStore(), 0, LIMIT_S, epoch=2)
    own.catch_up(
        [view("tp:4@2"), msgspec.json.encode({"protocol": "1"}).decode(), view(), view("no name", "pp:x")]
    )
    assert own.take("tp") == "tp:5@2"


class HeldStore(CountingStore):
    """A store whose answers are held back, as those of a process that is stopped."""

    def __init__(self, released: threading.Event) -> None:
        super().__init__(dist.HashStore, Traffic())
        self.released = released

    def compare_set(self, *args: Any) -> Any:
        self.released.wait()
        return self._store.compare_set(*args)


def run_aside(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_store_that_does_not_answer_holds_up_no_other_world() -> None:
    """Its thread waits as long as the store is silent; names in another world are counted meanwhile."""
    released = threading.Event()
    with ExitStack() as end:
        silent: Any = HeldStore(released)
        thread = run_aside(lambda: names(silent).take("tp"))
        end.callback(thread.join)
        end.callback(released.set)
        assert names(dist.HashStore()).take("tp") == "tp:0"


def test_threads_that_count_at_the_same_time_get_names_of_their_own() -> None:
    """Each that finds the count of another one counts again."""
    store, taken = dist.HashStore(), list[str]()
    threads = [run_aside(lambda: taken.extend(names(store).take("tp") for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(f"tp:{number}" for number in range(200))
