"""A reader of the status page never takes a record that mixes two writes for a whole one.

The thread sanitizer does not know fences, so a model of relaxed memory shows that each end of the edges is needed. It
is the model of PTX, whose acquire and release patterns with fences are those of C++ (ISO C++20, [atomics.fences]), and
whose relaxed operations may be reordered as freely.
"""

import re
from itertools import product
from pathlib import Path

import pytest

from tests.native.model.ptx_model import Program, Thread, is_allowed
from tests.native.threads import ASAN, ROOT, built, run
from tests.probes import requires

SOURCES = ROOT / "shm_broadcast" / "csrc" / "status"
DRIVER = Path(__file__).with_name("status_threads.cpp")

# Each end of an edge: the header, and the pattern that finds its memory order.
ENDS = {
    "the fence behind the odd number": (
        "page.hpp",
        r"before_ \+ 1, std::memory_order_relaxed\);\n.*\n\s*std::atomic_thread_fence\(std::memory_order_(\w+)\)",
    ),
    "the store of the even number": ("page.hpp", r"store\(before_ \+ 2, std::memory_order_(\w+)\)"),
    "the first look at the number": (
        "page.hpp",
        r"__atomic_load_n\(sequence, __ATOMIC_(ACQUIRE|RELAXED)\);\n\s*copy",
    ),
    "the fence in front of the second look": (
        "page.hpp",
        r"copy_words\(to, from, bytes\);\n.*\n\s*std::atomic_thread_fence\(std::memory_order_(\w+)\)",
    ),
    "the fence behind the commit of 0": (
        "lane.hpp",
        r"commit\.store\(0, std::memory_order_relaxed\);\n.*\n\s*std::atomic_thread_fence\(std::memory_order_(\w+)\)",
    ),
    "the store of the commit": ("lane.hpp", r"commit\.store\(before \+ 1, std::memory_order_(\w+)\)"),
    "the first look at the commit": (
        "page.hpp",
        r"__atomic_load_n\(commit, __ATOMIC_(ACQUIRE|RELAXED)\);\n\s*copy",
    ),
    "the fence in front of the second look at the commit": (
        "page.hpp",
        r"sizeof\(CallRecord\)\);\n.*\n\s*std::atomic_thread_fence\(std::memory_order_(\w+)\)",
    ),
}


def order_of(end: str) -> str:
    """Return the memory order of an end in the sources."""
    header, pattern = ENDS[end]
    found = re.findall(pattern, (SOURCES / header).read_text())
    assert len(found) == 1, f"{header} has changed: say where {end} is now"
    return str(found[0]).lower()


def mixes(missing: str = "", numbers: tuple[int, int, int] = (0, 1, 2)) -> bool:
    """Return whether a copy can look whole and hold words of two writes, if one of the four ends is relaxed.

    The record is written once, while it is copied; `numbers` are those before, during and behind the write.
    """
    before, odd, even = numbers
    writer = [
        f"st.relaxed.sys s {odd}",
        "" if missing == "writer's fence" else "fence.acq_rel.sys",
        "st.relaxed.sys a 1",
        "st.relaxed.sys b 1",
        f"st.{'relaxed' if missing == 'store' else 'release'}.sys s {even}",
    ]
    reader = [
        f"ld.{'relaxed' if missing == 'look' else 'acquire'}.sys p s",
        "ld.relaxed.sys x a",
        "ld.relaxed.sys y b",
        "" if missing == "reader's fence" else "fence.acq_rel.sys",
        "ld.relaxed.sys q s",
    ]
    threads = [Thread(0, i, [step for step in steps if step]) for i, steps in enumerate((writer, reader))]
    program = Program(threads, initial={"s": before})
    wrong = [
        {"p": number, "q": number, "x": x, "y": y}
        for number, right in ((before, 0), (even, 1))
        for x, y in product((0, 1), repeat=2)
        if (x, y) != (right, right)
    ]
    return any(is_allowed(program, outcome) for outcome in wrong)


@pytest.mark.guarantee("S2")
def test_a_copy_that_looks_whole_is_whole() -> None:
    """With the orders that the sources have no execution mixes two writes, in a record and in the ring of calls."""
    for end in ENDS:
        assert order_of(end) == ("acquire" if "look" in end else "release"), end
    assert not mixes()
    assert not mixes(numbers=(1, 0, 4097))


@pytest.mark.guarantee("S2")
@pytest.mark.parametrize("missing", ["writer's fence", "store", "look", "reader's fence"])
def test_each_end_of_the_lock_is_needed(missing: str) -> None:
    """Without it an execution mixes two writes."""
    assert mixes(missing)


@pytest.mark.guarantee("S2")
@requires("sanitizers")
def test_copies_are_whole_while_a_thread_writes(tmp_path: Path) -> None:
    """Lanes, counters and records of thousands of calls are consistent, and a record that stays odd looks torn."""
    program = built(tmp_path, (DRIVER,), (*ASAN, f"-I{SOURCES}"))
    outcome = run(program, 300)
    assert (outcome.returncode, outcome.stderr) == (0, ""), outcome.stderr[-4000:]
    assert outcome.stdout == "ok: 300 copies\n"
