"""What PTX's memory model says of the staged all-gather, which moves parts without a flag for each word."""

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.native.model.ptx_gather import Gather
from tests.native.model.ptx_model import executions
from tests.native.model.test_ptx_protocol import CUDA, body_of, operation_of


def hole(gather: Gather, **changes: object) -> str:
    """Return the kind of the first failure that the model admits, or "" if it admits none."""
    return next(replace(gather, **changes).failures(), "").partition(":")[0]  # type: ignore[arg-type]


def has_executions(gather: Gather) -> bool:
    """Return whether the model admits any execution, without which a missing hole means nothing."""
    return next(executions(gather.program()), None) is not None


@pytest.mark.parametrize("boundary", ["stream", "both", "fenced", "continued"])
def test_a_gather_brings_the_parts_of_its_launch(boundary: str) -> None:
    """One staging area serves one launch after the other, and the kernel behind each finds the whole output."""
    assert has_executions(Gather(boundary=boundary))
    assert not hole(Gather(boundary=boundary))


def test_the_barriers_order_weak_accesses_too() -> None:
    """The parts need no strong accesses: the flags and both `__syncthreads` order them."""
    assert not hole(Gather(), stage="st.weak", read="ld.weak")


@pytest.mark.parametrize("pull", [0, 1])
def test_a_captured_pull_may_use_the_same_staging_area(pull: int) -> None:
    """The copy of its input, and what the gather stages, are each read before the other replaces it."""
    both = Gather(pull=pull)
    assert has_executions(both)
    assert not hole(both)
    assert hole(both, end_barrier=False) == "later part"


def test_a_block_reads_what_the_block_of_its_index_has_staged() -> None:
    """A barrier is one between blocks of an index, and orders nothing that another block does."""
    several = Gather(blocks=2, launches=1)
    assert has_executions(several)
    assert not hole(several)
    assert hole(several, shift=1) == "old part"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("gather", [Gather(launches=3, pull=1), Gather(blocks=2)])
def test_longer_programs(gather: Gather) -> None:
    """A gather, a pull and a gather; and two blocks in two launches."""
    assert has_executions(gather)
    assert not hole(gather)


# What is changed, and the failure that the model then finds.
BUGS: dict[str, tuple[Mapping[str, object], str]] = {
    "flag relaxed": ({"flag": "st.relaxed.sys"}, "old part"),
    "poll relaxed": ({"poll": "ld.relaxed.sys"}, "old part"),
    "flag at the scope of its GPU": ({"flag": "st.release.gpu"}, "old part"),
    "poll at the scope of its GPU": ({"poll": "ld.acquire.gpu"}, "old part"),
    "no barrier of the block before the flags": ({"sync_before": False}, "old part"),
    "no barrier of the block behind the flags": ({"sync_behind": False}, "old part"),
    "no barrier in front of the reads": ({"first_barrier": False}, "old part"),
    "no barrier behind the reads": ({"end_barrier": False}, "later part"),
    "boundary makes visible to its own GPU alone": ({"boundary": "visible"}, "later part"),
    "no wait for the stream": ({"boundary": "nothing"}, "old part"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_model_finds_bugs_in_the_gather(bug: str) -> None:
    """Each part of the two barriers is needed, and so is the order of the stream."""
    changes, expected = BUGS[bug]
    assert hole(Gather(), **changes) == expected


def test_the_kernel_is_what_the_model_takes_it_for() -> None:
    """The order of the steps in the source, and how each of them accesses memory. The barrier is that of the pull."""
    base, pull = (CUDA / "kernel_base.cu").read_text(), (CUDA / "all_reduce.cu").read_text()
    body = body_of((CUDA / "staged_all_gather.cu").read_text(), "staged_all_gather")
    steps = (
        "enter_pull(",
        "st_relaxed_sys_v4(call.own + staging + i * 16",
        "block_barrier(",
        "ld_relaxed_sys_v4(p.workspace[peer(p, k)] + staging + i * 16)",
        "store_bytes(out + peer(p, k) * bytes, i",
        "block_barrier(",
        "leave_pull(",
    )
    assert re.search(".*".join(map(re.escape, steps)), body, re.DOTALL)
    assert body.count("block_barrier(") == 2
    # Both loops give a thread the same vectors, so the blocks that stage and read a vector have one index.
    assert body.count("for (u64 i = thread_index(); call.alive && i < vectors; i += all_threads())") == 2
    assert body_of(pull, "enter_pull").lstrip().startswith("wait_for_the_stream();")
    assert operation_of(base, "st_relaxed_sys_v4") == Gather().stage
    assert operation_of(base, "ld_relaxed_sys_v4") == Gather().read
    barrier = body_of(pull, "block_barrier")
    assert re.search(
        r"__syncthreads\(\).*st_release_sys\(.*ld_acquire_sys\(.*__syncthreads\(\)", barrier, re.DOTALL
    )
    assert (operation_of(base, "st_release_sys"), operation_of(base, "ld_acquire_sys")) == (
        Gather().flag,
        Gather().poll,
    )
