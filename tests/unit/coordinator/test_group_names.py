"""Names of groups: how a rank counts them in the store, and how often it asks."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.bootstrap.group_names import next_names, unique_name, use_names
from tests.counting_store import CountingStore, Traffic

LIMIT_S = 20.0


def counting(base: Any) -> tuple[Any, Traffic]:
    traffic = Traffic()
    return CountingStore(lambda: base, traffic), traffic


@pytest.mark.guarantee("D92")
def test_a_name_takes_one_operation() -> None:
    """The first one too; and two for a round of several groups, of which the second is asked once all have agreed."""
    store, traffic = counting(dist.HashStore())
    assert unique_name("tp", store, 3, LIMIT_S) == "tp:0"
    assert unique_name("tp", store, 3, LIMIT_S) == "tp:1"
    assert next_names("layout", ["tp", "pp"], store, 3, LIMIT_S) == ("layout:0", ["tp:2", "pp:0"])
    use_names(["tp", "pp"], store, 3, LIMIT_S)
    assert next_names("layout", ["tp", "pp"], store, 3, LIMIT_S) == ("layout:1", ["tp:3", "pp:1"])
    assert traffic.names == ["compare_set"] * 5


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_names_go_on_where_the_store_does(kind: str, tmp_path: Path) -> None:
    """What has been counted over another connection counts: the store knows better than this process."""
    stores: list[Any] = (
        [dist.HashStore()] * 3
        if kind == "hash"
        else [dist.FileStore(str(tmp_path / "store"), -1) for _ in range(3)]
    )
    first, second, third = (counting(store)[0] for store in stores)
    assert unique_name("tp", first, 0, LIMIT_S) == "tp:0"
    assert unique_name("tp", second, 0, LIMIT_S) == "tp:1"
    assert unique_name("tp", third, 1, LIMIT_S) == "tp:0"
    assert unique_name("tp", first, 0, LIMIT_S) == "tp:2"


def test_names_begin_anew_where_the_store_has_lost_them() -> None:
    """As in a store that was emptied for the next run."""
    base = dist.HashStore()
    store, _ = counting(base)
    assert unique_name("tp", store, 0, LIMIT_S) == "tp:0"
    base.delete_key("group_coordinator/created/0")
    assert unique_name("tp", store, 0, LIMIT_S) == "tp:0"
    assert unique_name("tp", store, 0, LIMIT_S) == "tp:1"
