"""A graph capture that fails: on one rank or on all, while others wait in it or in other calls."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.errors import GroupBrokenError
from tests.cuda_worlds import STREAM, cuda_world
from tests.harness import RankPool, run_ranks
from tests.nccl_ranks import HostStreams
from tests.worlds import meet, outcome_of


class _Left(Exception):  # noqa: N818 - no error
    pass


def left_by_an_exception(rank: int, world_size: int, directory: Path, native: str) -> None:
    with cuda_world(rank, world_size, directory, native) as (_, it, driver):
        graph_stream = driver.stream_create()
        streams = it._streams
        assert isinstance(streams, HostStreams)
        own = torch.full((100,), float(rank + 1))
        assert it.all_reduce(own)[0] == 3.0
        for _ in range(2):
            try:
                with it.capture(graph_stream):
                    streams.number = graph_stream
                    driver.begin_capture(graph_stream)
                    it.all_reduce(own)
                    driver.end_capture(graph_stream)
                    streams.number = STREAM
                    raise _Left
            except _Left:
                streams.number = STREAM
            assert it.all_reduce(own)[0] == 3.0
        with it.capture(graph_stream):
            pass
        driver.stream_destroy(graph_stream)


def test_a_capture_that_is_left_by_an_exception_leaves_the_group_as_it_was(
    ranks2: RankPool, native: str
) -> None:
    """Calls then use the earlier stream, and the next capture begins anew."""
    ranks2.run(left_by_an_exception, native)


def left_on_one_rank(rank: int, world_size: int, directory: Path, native: str) -> dict[str, Any]:
    with cuda_world(rank, world_size, directory, native) as (_, it, _driver):
        own = torch.full((100,), float(rank + 1))
        assert it.all_reduce(own)[0] == 3.0

        def capture() -> None:
            with it.capture(9):
                if rank == 1:
                    raise _Left("no memory for the graph")

        found = outcome_of(capture) if rank == 0 else {}
        if rank == 1:
            with pytest.raises(_Left):
                capture()
        assert it.all_reduce(own)[0] == 3.0
        return found


def test_a_capture_that_one_rank_leaves_ends_on_all(ranks2: RankPool, native: str) -> None:
    """The other rank does not wait for it until the deadline, and the group is intact."""
    found, _ = ranks2.run(left_on_one_rank, native)
    assert found["kind"] == "CapabilityError"
    assert "_Left: no memory for the graph" in found["text"]


def awaited_in_a_body(rank: int, world_size: int, directory: Path, native: str) -> dict[str, Any]:
    with cuda_world(rank, world_size, directory, native, meets=False) as (group, it, _driver):
        own = torch.full((100,), float(rank + 1))
        assert it.all_reduce(own)[0] == 3.0

        def capture() -> None:
            with it.capture(STREAM):
                if rank == 1:
                    raise _Left("no memory for the graph")
                it.all_reduce(own)  # a warm-up, which waits for the other rank
                it.all_reduce(own)

        found: dict[str, Any] = {}
        if rank == 0:
            found = outcome_of(capture)
        else:
            with pytest.raises(_Left) as raised:
                capture()
            assert raised.value.__context__ is None
            with pytest.raises(GroupBrokenError) as later:
                it.all_reduce(own)
            assert later.value.__cause__ is raised.value
        meet(rank, range(world_size), directory, "told")
        assert group._health.is_broken
        return found


def test_a_capture_that_one_rank_leaves_while_another_waits_for_it_breaks_the_group(native: str) -> None:
    """The rank raises its own exception after seconds, and the other learns of it long before the deadline of 20 s."""
    found, _ = run_ranks(awaited_in_a_body, 2, native)
    assert (found["kind"], found["peers"]) == ("PeerLostError", [1])
    assert "its graph capture has failed: _Left: no memory for the graph" in found["text"]
    assert found["seconds"] < 12.0


def gathers_in_a_body(rank: int, world_size: int, directory: Path, native: str) -> dict[str, Any]:
    with cuda_world(rank, world_size, directory, native) as (group, it, _driver):
        own = torch.full((100,), float(rank + 1))
        assert it.all_reduce(own)[0] == 3.0

        def capture() -> None:
            with it.capture(STREAM):
                if rank == 1:
                    raise _Left("no memory for the graph")
                group.all_gather_object({"rank": rank})

        found: dict[str, Any] = {}
        if rank == 0:
            found = outcome_of(capture)
        else:
            with pytest.raises(_Left) as raised:
                capture()
            assert raised.value.__context__ is None
        assert it.all_reduce(own)[0] == 3.0
        assert group.all_gather_object(rank) == [0, 1]
        return found


def test_a_failed_capture_answers_no_other_call(ranks2: RankPool, native: str) -> None:
    """A gather of objects of another rank in its capture raises, instead of returning what the failure is told by."""
    found, _ = ranks2.run(gathers_in_a_body, native)
    assert found["kind"] == "DisagreementError"
    assert "rank 0: all_gather_object; rank 1: exchange" in found["text"]
    assert found["seconds"] < 5.0


def order_fails_behind_an_exception(rank: int, world_size: int, directory: Path, native: str) -> None:
    with cuda_world(rank, world_size, directory, native, meets=False) as (_, it, driver):
        own = torch.full((100,), float(rank + 1))
        assert it.all_reduce(own)[0] == 3.0

        def capture() -> None:
            with it.capture(9):
                driver.faults.fail["event_record"] = (driver.calls.get("event_record", 0) + 1, 719)
                raise _Left

        with pytest.raises(_Left):
            capture()
        with pytest.raises(GroupBrokenError, match="719"):
            it.all_reduce(own)
        meet(rank, range(world_size), directory, "seen")


def test_an_error_on_the_way_out_does_not_hide_the_exception_of_a_capture(native: str) -> None:
    """The order behind the captured stream fails, which breaks the group; the caller gets its own exception."""
    run_ranks(order_fails_behind_an_exception, 2, native)
