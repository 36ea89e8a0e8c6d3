"""Which groups are current, in plain code and in compiled code."""

import contextvars
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import ParallelGroups, ParallelLayout, UsageError, current_groups, parallel_state
from coordinator.groups import set_default_groups
from coordinator.testing import fake_groups
from tests.harness import run_ranks

ONES = torch.ones(2)


def on_a_thread(target: Callable[[], Any]) -> Any:
    """Return what `target` returns on a new thread, or the error that it raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(target())
        except UsageError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


# --- threads ------------------------------------------------------------------------------------------------------


def test_a_thread_without_groups_is_told_how_to_get_those_of_its_creator() -> None:
    """A with block is visible in its own context. The error in another thread says what makes it visible there."""
    groups = fake_groups(ParallelLayout(tensor=2), 0)
    with groups.as_current():
        refusal = on_a_thread(current_groups)
        assert isinstance(refusal, UsageError)
        assert "with groups.as_current():" in str(refusal)
        assert "copy_context" in str(refusal)
        assert on_a_thread(lambda: contextvars.copy_context().run(current_groups)) is not groups
        context = contextvars.copy_context()
        assert on_a_thread(lambda: context.run(current_groups)) is groups

        def enter() -> ParallelGroups:
            with groups.as_current():
                return current_groups()

        assert on_a_thread(enter) is groups
    # Nothing is entered any more, so nothing is said about threads.
    with pytest.raises(UsageError, match="initialize_model_parallel") as raised:
        current_groups()
    assert "thread" not in str(raised.value)


# --- compiled code ------------------------------------------------------------------------------------------------


def facts(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that tells what the getters answer."""
    stage = 100 if parallel_state.get_pp_group().is_first_rank else 0
    tensor = 10 * parallel_state.get_tensor_model_parallel_world_size()
    place = parallel_state.get_tensor_model_parallel_rank()
    decode = 1000 * parallel_state.get_dcp_world_size_and_rank()[0]
    world = 10000 * parallel_state.get_world_group().world_size
    return x + stage + tensor + place + decode + world


def compiled_getters(rank: int, world_size: int, directory: Path) -> None:
    """Compile getters, and call them for several groups, from several threads."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    run = torch.compile(facts, fullgraph=True, backend=counter)
    one = fake_groups(ParallelLayout(tensor=2, pipeline=2, decode_context=2), 0)
    other = fake_groups(ParallelLayout(tensor=4, pipeline=2), 7)
    alike = fake_groups(ParallelLayout(tensor=2, pipeline=2, decode_context=2), 0)

    def answers(groups: ParallelGroups) -> bool:
        assert current_groups() is groups
        return torch.equal(run(ONES), facts(ONES))

    with one.as_current():
        assert answers(one)
        assert answers(one)
        assert counter.frame_count == 1
        with other.as_current():
            assert answers(other)
            assert counter.frame_count == 2
        assert answers(one)
        with alike.as_current():
            assert answers(alike)
        assert counter.frame_count == 2, "equal facts need no other graph"
    for groups in (other, one, other):
        set_default_groups(groups)
        assert answers(groups)
    made = counter.frame_count
    assert on_a_thread(lambda: answers(other))
    with one.as_current():
        assert on_a_thread(lambda: answers(other))
        context = contextvars.copy_context()
        assert on_a_thread(lambda: context.run(answers, one))
        assert answers(one)
    assert counter.frame_count == made
    set_default_groups(None)
    with pytest.raises(Exception, match="current groups|no exception handler"):
        run(ONES)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.guarantee("G22")
def test_compiled_getters_answer_for_the_context_that_calls() -> None:
    """The graph has no break. With other groups, in other threads and with another default it is compiled again."""
    run_ranks(compiled_getters, 1)


def reduced(x: torch.Tensor) -> torch.Tensor:
    return parallel_state.get_tp_group().all_reduce(x)


def compiled_calls(rank: int, world_size: int, directory: Path) -> None:
    """Compile a collective, and call it for several groups."""
    run = torch.compile(reduced, fullgraph=True, backend="eager")
    two, four, one = (fake_groups(ParallelLayout(tensor=size), 0) for size in (2, 4, 1))
    for _ in range(2):
        for groups in (two, four, one):
            with groups.as_current():
                assert torch.equal(run(ONES), ONES * groups.tp.world_size)
    two.destroy()
    again = fake_groups(ParallelLayout(tensor=2), 0)
    with again.as_current():
        assert torch.equal(run(ONES), ONES * 2)


@pytest.mark.slow
def test_a_compiled_call_goes_to_the_group_that_is_current() -> None:
    """A collective of a group that a getter returned is an operation with the name of that group."""
    run_ranks(compiled_calls, 1)
