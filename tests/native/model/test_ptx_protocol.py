"""What PTX's memory model says of the custom all-reduce: which fences it needs, under which boundary between grids.

A "hole" is an execution that the model admits and in which a push is lost to a late clear, or wrong data is received.
It need not occur on any GPU that exists.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.native.model.ptx_protocol import BOUNDARIES, FENCE, Push, Round
from tests.native.model.ptx_pull import Epochs, Pull

CUDA = Path(__file__).parents[3] / "device_comm" / "csrc" / "cuda"

# Three launches. The third pushes into the words that the first cleared.
Launches = tuple[tuple[Round, ...], ...]
ONE_THREAD: Launches = (({0: 0},),) * 3
# The thread that clears a word is not the one that pushes or polls in the next launch.
OTHER_THREAD: Launches = (({0: 0},), ({0: 1},), ({0: 0},))
# As when sizes change: the second launch is smaller, so a thread that clears and pushes has no part in it.
OTHER_SIZE: Launches = (({0: 0, 1: 1},), ({0: 0},), ({0: 0, 1: 1},))
# Two-shot: the shard is vector 0, the result vector 1.
TWO_SHOT: Launches = (({0: 0}, {1: 0}), ({0: 1}, {1: 1}), ({0: 0}, {1: 0}))
# After two-shot launches, one-shot uses both regions.
MIXED: Launches = (({0: 0}, {1: 1}), ({0: 1},), ({0: 0, 1: 1},))
LAUNCHES = {
    "one thread": ONE_THREAD,
    "other thread": OTHER_THREAD,
    "other size": OTHER_SIZE,
    "two-shot": TWO_SHOT,
    "mixed": MIXED,
}

NO_FENCE = Push(entry="")
ENTRY_FENCE = Push(entry=FENCE)
# Each has a release in front of the pushes that a peer acquires, and an acquire behind polls, in the same grid.
REPAIRED = {
    "fence behind the polls": replace(ENTRY_FENCE, leave=FENCE),
    "fence.acquire behind the polls": replace(ENTRY_FENCE, leave="fence.acquire.sys"),
    "polls acquire": replace(ENTRY_FENCE, poll="ld.acquire.sys"),
    "only vector 0 is acquired": replace(ENTRY_FENCE, first_poll="ld.acquire.sys"),
    "only vector 0 is acquired, its thread fences": replace(
        ENTRY_FENCE, entry_of="first", first_poll="ld.acquire.sys"
    ),
    "only the thread of vector 0 fences, one way": replace(
        ENTRY_FENCE, entry="fence.release.sys", leave="fence.acquire.sys", entry_of="first", leave_of="first"
    ),
    "only the thread of vector 0 fences": replace(
        ENTRY_FENCE, leave=FENCE, entry_of="first", leave_of="first"
    ),
    "only vector 0 is released and acquired": replace(
        NO_FENCE, first_push="st.release.sys", first_poll="ld.acquire.sys"
    ),
}
# The kernels' newer form. In the older one the fence behind the polls is `FENCE`.
BUILT = replace(ENTRY_FENCE, leave="fence.acquire.sys", leave_of="first")
BUILT_OLDER = replace(ENTRY_FENCE, leave=FENCE, leave_of="first")
REPAIRED |= {"as built": BUILT, "as built, older devices": BUILT_OLDER}


def hole(protocol: Push | Pull | Epochs, **changes: object) -> str:
    """Return the kind of the first failure that the model admits, or "" if it admits none."""
    return next(replace(protocol, **changes).failures(), "").partition(":")[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("launches", LAUNCHES)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_without_a_fence_only_fenced_boundaries_keep_pushes(boundary: str, launches: str) -> None:
    """The fence may be dropped only if every grid begins and ends with one, which no document promises."""
    found = hole(NO_FENCE, boundary=boundary, launches=LAUNCHES[launches], width=1)
    assert found == {"nothing": "stale input", "fenced": ""}.get(boundary, "push lost")


# Where the fence at the entry of the next grid stands behind a poll in program order, and in front of the next push.
SAME_THREAD_SUFFICES = {("continued", "one thread"), ("both", "one thread")}


@pytest.mark.parametrize("launches", LAUNCHES)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_fence_at_entry_alone_leaves_a_hole(boundary: str, launches: str) -> None:
    """The poll and the fence behind it are in different grids, so they are no acquire pattern (8.8, 8.9.1)."""
    found = hole(ENTRY_FENCE, boundary=boundary, launches=LAUNCHES[launches], width=1)
    closed = boundary == "fenced" or (boundary, launches) in SAME_THREAD_SUFFICES
    assert found == ("" if closed else "stale input" if boundary == "nothing" else "push lost")


@pytest.mark.parametrize("launches", LAUNCHES)
@pytest.mark.parametrize("repair", REPAIRED)
def test_an_acquire_in_the_polling_grid_closes_the_hole(repair: str, launches: str) -> None:
    """With the stream order of the manual, no rank receives wrong data and no push is lost."""
    assert not hole(REPAIRED[repair], launches=LAUNCHES[launches], width=1)


@pytest.mark.parametrize("repair", REPAIRED)
def test_words_of_a_vector_may_arrive_in_any_order(repair: str) -> None:
    """The same holds with vectors of two words that are not ordered."""
    assert not hole(REPAIRED[repair], launches=OTHER_THREAD, width=2)


@pytest.mark.parametrize("repair", REPAIRED)
def test_no_fence_helps_if_grids_are_not_ordered_for_other_ranks(repair: str) -> None:
    """If a boundary made writes visible to its own GPU alone, a later grid could not release them."""
    assert hole(REPAIRED[repair], boundary="visible", launches=OTHER_THREAD) == "push lost"
    assert hole(REPAIRED[repair], boundary="nothing", launches=OTHER_THREAD) == "stale input"


REPAIR = replace(REPAIRED["fence behind the polls"], launches=OTHER_THREAD)
# What is changed, and the failure that the model then finds.
BUGS: dict[str, tuple[Mapping[str, object], str]] = {
    "phase forced to 0": ({"phases": 1}, "push lost"),
    "clear dropped": ({"clear": ""}, "wrong data"),
    "weak push": ({"push": "st.weak"}, "wrong data"),
    "weak poll": ({"poll": "ld.weak"}, "wrong data"),
    "push at the scope of its GPU": ({"push": "st.relaxed.gpu"}, "wrong data"),
    "poll at the scope of its GPU": ({"poll": "ld.relaxed.gpu"}, "wrong data"),
    "entry fence at the scope of its GPU": ({"entry": "fence.acq_rel.gpu"}, "push lost"),
    "fence behind the polls at the scope of its GPU": ({"leave": "fence.acq_rel.gpu"}, "push lost"),
    "entry fence dropped": ({"entry": ""}, "push lost"),
    "entry fence only acquires": ({"entry": "fence.acquire.sys"}, "push lost"),
    "fence behind the polls only releases": ({"leave": "fence.release.sys"}, "push lost"),
    "clear weak, polls not acquired": ({"clear": "st.weak", "leave": ""}, "push lost"),
    "input loaded before the wait": ({"input": "before the wait"}, "stale input"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_model_finds_bugs_in_the_push(bug: str) -> None:
    """Each part of the protocol is needed: without it the model finds a failure."""
    changes, expected = BUGS[bug]
    assert hole(REPAIR, width=1, **changes) == expected


def test_what_the_edges_make_superfluous() -> None:
    """Behind both edges a clear may be weak or of any scope: causality orders it, and its rank alone polls the word."""
    assert not hole(REPAIR, clear="st.weak")
    assert not hole(REPAIR, clear="st.relaxed.gpu")


@pytest.mark.parametrize("boundary", BOUNDARIES[1:])
def test_loading_the_input_before_the_fence_is_harmless(boundary: str) -> None:
    """The fence orders no input: the wait for the stream does. Both places give the same verdict everywhere."""
    for push in (ENTRY_FENCE, REPAIR):
        early = hole(push, boundary=boundary, launches=OTHER_THREAD, width=1, input="before the fence")
        late = hole(push, boundary=boundary, launches=OTHER_THREAD, width=1, input="behind the fence")
        assert early == late != "stale input"


@pytest.mark.parametrize("count", [4, 5])
def test_more_launches(count: int) -> None:
    """Each arena is used again and again, by threads that take turns."""
    launches = tuple(({0: number % 2},) for number in range(count))
    assert not hole(REPAIR, launches=launches, width=1)


@pytest.mark.parametrize("slots_move", [False, True])
def test_three_ranks(slots_move: bool) -> None:
    """A word that one peer wrote and another peer writes two launches later is no different."""
    assert not hole(REPAIR, ranks=3, slots_move=slots_move, width=1)
    assert hole(REPAIR, ranks=3, slots_move=slots_move, width=1, leave="")


@pytest.mark.thorough
@pytest.mark.parametrize("launches", LAUNCHES)
@pytest.mark.parametrize("repair", REPAIRED)
@pytest.mark.parametrize("boundary", ["stream", "both", "fenced"])
def test_every_repair_with_two_words(boundary: str, repair: str, launches: str) -> None:
    """All repairs, all launches and all boundaries that order grids for other ranks, with vectors of two words."""
    assert not hole(REPAIRED[repair], boundary=boundary, launches=LAUNCHES[launches], width=2)


PULL_BUGS: dict[str, tuple[Mapping[str, object], str]] = {
    "flag relaxed": ({"flag": "st.relaxed.sys"}, "old input"),
    "poll relaxed": ({"poll": "ld.relaxed.sys"}, "old input"),
    "flag at the scope of its GPU": ({"flag": "st.release.gpu"}, "old input"),
    "poll at the scope of its GPU": ({"poll": "ld.acquire.gpu"}, "old input"),
    "no barrier of the block before the flags": ({"sync_before": False}, "later input"),
    "no barrier of the block behind the flags": ({"sync_behind": False}, "old input"),
    "no barrier at the end of one-shot": ({"end_barrier": False}, "later input"),
    "boundary makes visible to its own GPU alone": ({"boundary": "visible"}, "old input"),
}


@pytest.mark.parametrize("read", ["ld.relaxed.sys", "ld.weak"])
@pytest.mark.parametrize("two_shot", [False, True])
def test_pulls_read_what_belongs_to_them(two_shot: bool, read: str) -> None:
    """No pull reads an older or a later input or result, not even with weak reads, as of a tensor's tail."""
    assert not hole(Pull(two_shot=two_shot, read=read))


@pytest.mark.parametrize("bug", PULL_BUGS)
def test_the_model_finds_bugs_in_the_pull(bug: str) -> None:
    """Each part of the barrier is needed."""
    changes, expected = PULL_BUGS[bug]
    assert hole(Pull(), **changes) == expected


def test_epochs() -> None:
    """All threads of a block take the launch's epoch; not so before the wait, or if it is stored without a barrier."""
    assert not hole(Epochs())
    assert not hole(Epochs(), boundary="visible")
    assert hole(Epochs(), before_the_wait=True) == "wrong epoch"
    assert hole(Epochs(), sync=False) == "wrong epoch"
    assert hole(Epochs(), boundary="nothing") == "wrong epoch"


def body_of(source: str, function: str) -> str:
    """Return the text of a function of the kernels."""
    head = rf"^(?:DEVICE|KERNEL) [^;{{}}]*\b{function}\([^{{]*"
    found = re.findall(head + r"\{ ([^\n]*) \}$", source, re.MULTILINE)
    found += re.findall(head + r"\{\n(.*?)^\}", source, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{function} occurs {len(found)} times"
    return str(found[0])


def operations_of(source: str, function: str) -> list[str]:
    """Return what a function of the kernels compiles to, as the model writes it: `ld.relaxed.sys`."""
    return re.findall(r'asm volatile\("((?:ld|st|fence)\.\w+\.sys)', body_of(source, function))


def operation_of(source: str, function: str) -> str:
    """Return the only one of `operations_of`."""
    (found,) = operations_of(source, function)
    return found


def test_the_kernels_are_what_the_model_takes_them_for() -> None:
    """The operations of the sources, and where their fences stand, are those of `BUILT`."""
    base, source = (CUDA / "kernel_base.cu").read_text(), (CUDA / "all_reduce.cu").read_text()
    enter, leave = body_of(base, "enter_push"), body_of(base, "leave_push")
    entry = ("wait_for_the_stream()", "order_pushes()", "call_of(p, kernel)")
    assert [enter.index(each) for each in entry] == sorted(enter.index(each) for each in entry)
    assert "fence_acq_rel_sys()" in body_of(base, "order_pushes")
    assert operation_of(base, "fence_acq_rel_sys") == BUILT.entry == BUILT_OLDER.entry
    assert "(call.epoch & 1) * p.arena_bytes" in body_of(base, "call_of")
    assert BUILT.phases == 2
    acquire = body_of(base, "acquire_pushes")
    assert "if (blockIdx.x == 0 && threadIdx.x % WARP == 0) fence_acquire_sys();" in acquire
    assert operations_of(base, "fence_acquire_sys") == [BUILT.leave, BUILT_OLDER.leave]
    steps = ("acquire_pushes()", "__syncthreads()", "let_the_next_kernel_begin()", "st_state(")
    assert [leave.index(each) for each in steps] == sorted(leave.index(each) for each in steps)
    for receive in ("receive", "receive_raw"):
        text = body_of(source, receive)
        (poll,) = re.findall(r"received\[r\] = (\w+)\(", text)
        (clear,) = re.findall(r"(\w+)\(first \+ r \* stride, idle\)", text)
        assert (operation_of(base, poll), operation_of(base, clear)) == (BUILT.poll, BUILT.clear)
    every = source + "".join(
        (CUDA / f"{name}.cu").read_text()
        for name in ("add_rms_norm", "add_rms_norm_fp8", "add_rms_norm_nvfp4", "moe_finalize")
    )
    kernels = re.findall(r"^KERNEL (push_\w+)\(", every, re.MULTILINE)
    assert len(kernels) == 11
    for kernel in kernels:
        text = body_of(every, kernel)
        # The norms with either output share their bodies.
        for shared in re.findall(r"\b(push_(?:two_shot_)?norm)\(", text):
            text = body_of(every, shared)
        assert re.search(r"enter_push\(.*leave_push\(", text, re.DOTALL), kernel
    (push,) = re.findall(r"(\w+)\(p\.workspace", body_of(source, "push_to_all"))
    assert operation_of(base, push) == BUILT.push
    barrier = body_of(source, "block_barrier")
    parts = ("__syncthreads()", "st_release_sys(", "ld_acquire_sys(", "__syncthreads()")
    assert re.search(".*".join(map(re.escape, parts)), barrier, re.DOTALL)
    assert (operation_of(base, "st_release_sys"), operation_of(base, "ld_acquire_sys")) == (
        Pull().flag,
        Pull().poll,
    )
