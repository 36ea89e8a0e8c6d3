"""Asynchronous calls beside the caller's stream that are refused or fail; see `test_side_stream.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.errors import CudaError, UsageError
from tests.harness import RankPool, run_ranks
from tests.multiproc.device_comm.test_side_stream import CALLER, device_world
from tests.worlds import meet, outcome_of

# --- captures -------------------------------------------------------------------------------------------------


def in_two_captures(rank: int, world_size: int, directory: Path, native: str) -> list[str]:
    with device_world(rank, world_size, directory, native) as me:
        driver, own = me.driver, torch.full((100,), float(rank + 1))
        handles, graphs, texts = [], [], []
        for stream in (9, 10):
            with me.it.capture(stream):
                me.streams.number = stream
                driver.begin_capture(stream)
                handles.append(me.later(me.it.all_reduce, own))
                handles[-1].wait()
                with pytest.raises(UsageError) as caught:
                    # That of the capture before, or, in the first one, a call of none.
                    handles[-2].wait() if len(handles) > 1 else me.eagerly_later(own)
                texts.append(str(caught.value))
                graphs.append(driver.end_capture(stream))
                me.streams.number = CALLER
        assert [each.launches for each in graphs] == [["push_one_shot"]] * 2
        assert me.later(me.it.all_reduce, own).wait()[0] == 3.0
        return texts


@pytest.mark.guarantee("D76")
def test_what_is_of_one_capture_is_refused_by_another(ranks2: RankPool, native: str) -> None:
    """A handle, and the side stream: the driver would make the capture invalid, or the call could not be ordered."""
    for beside, behind in ranks2.run(in_two_captures, native):
        assert "takes part in a capture" in beside
        assert "another capture" in behind


def unjoined(rank: int, world_size: int, directory: Path, native: str) -> str:
    with device_world(rank, world_size, directory, native) as me:
        own = torch.full((100,), float(rank + 1))

        def capture() -> None:
            with me.it.capture(9):
                me.streams.number = 9
                me.driver.begin_capture(9)
                me.later(me.it.all_reduce, own)
                try:
                    me.driver.end_capture(9)
                finally:
                    me.streams.number = CALLER

        with pytest.raises(CudaError, match="UNJOINED") as caught:
            capture()
        assert me.it.all_reduce(own)[0] == 3.0
        assert me.later(me.it.all_reduce, own).wait()[0] == 3.0
        return str(caught.value)


@pytest.mark.guarantee("D76")
def test_a_capture_with_a_handle_that_nobody_waits_for_fails_and_leaves_the_group(
    ranks2: RankPool, native: str
) -> None:
    """The driver refuses to end it; the calls of the group go on."""
    for text in ranks2.run(unjoined, native):
        assert "904" in text


# --- calls of one rank ----------------------------------------------------------------------------------------


def one_is_left_out(
    rank: int, world_size: int, directory: Path, native: str, step: str
) -> list[dict[str, Any]]:
    with device_world(rank, world_size, directory, native, meets=False) as me:

        def fail(*_: Any) -> None:
            raise RuntimeError("would depend on a capturing blocking stream")

        def asynchronous() -> None:
            me.later(me.it.all_reduce, torch.ones(100)).wait()
            # What a kernel that left early has written is undefined: this says so.
            me.it.check()

        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(me.streams, step, fail)
            seen = [outcome_of(asynchronous)]
        seen.append(outcome_of(lambda: float(me.it.all_reduce(torch.full((100,), 5.0))[0])))
        meet(rank, range(world_size), directory, "told")
        return seen


@pytest.mark.guarantee("D55")
@pytest.mark.guarantee("D76")
@pytest.mark.parametrize("step", ["create", "wait", "keep", "use"])
def test_an_asynchronous_call_that_one_rank_does_not_queue_breaks_the_group(native: str, step: str) -> None:
    """Otherwise the others would take its next call for this one, and every later sum would be silently wrong."""
    (other, later), (own, refused) = run_ranks(one_is_left_out, 2, native, step)
    assert own["kind"] == "CudaError"
    assert other["kind"] == "GroupBrokenError"
    assert [later["kind"], refused["kind"]] == ["GroupBrokenError"] * 2
    for each in (own, other):
        assert "capturing blocking stream" in each["text"]


@pytest.mark.guarantee("D76")
def test_a_call_without_a_mark_behind_it_breaks_the_group(native: str) -> None:
    """All ranks have queued it, but who gets an error makes it again, or goes on without it."""
    _, (own, refused) = run_ranks(one_is_left_out, 2, native, "record")
    assert (own["kind"], refused["kind"]) == ("CudaError", "GroupBrokenError")
