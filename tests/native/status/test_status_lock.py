"""A reader of the status page never takes a record that mixes two writes for a whole one, or a new page for a made one.

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
    # Behind this store nothing is written, and before this load nothing is copied.
    "the store of the magic number": (
        "status.cpp",
        r"__atomic_store_n\(&header\.magic, kMagic, __ATOMIC_(RELEASE|RELAXED)\);\n\s*PyBuffer_Release",
    ),
    "the look at the magic number": (
        "page.hpp",
        r"copy_page\(.*\n.*\n.*<const uint64_t\*>\(from\), __ATOMIC_(ACQUIRE|RELAXED)\);\n\s*copy_words",
    ),
}

# Before, during and behind a write: the sequence number of a record, and the commit of a place in the ring of calls.
SEQUENCE, COMMIT = (0, 1, 2), (1, 0, 4097)


def order_of(end: str) -> str:
    """Return the memory order of an end in the sources."""
    header, pattern = ENDS[end]
    found = re.findall(pattern, (SOURCES / header).read_text())
    assert len(found) == 1, f"{header} has changed: say where {end} is now"
    return str(found[0]).lower()


def mixes(missing: str, numbers: tuple[int, int, int]) -> bool:
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


def finds_no_header(missing: str = "") -> bool:
    """Return whether a reader can find the magic number without the header, if one of the two ends is relaxed."""
    writer = ["st.relaxed.sys h 1", f"st.{'relaxed' if missing == 'store' else 'release'}.sys m 1"]
    reader = [f"ld.{'relaxed' if missing == 'look' else 'acquire'}.sys found m", "ld.relaxed.sys copied h"]
    program = Program([Thread(0, i, steps) for i, steps in enumerate((writer, reader))])
    assert is_allowed(program, {"found": 1, "copied": 1})
    return is_allowed(program, {"found": 1, "copied": 0})


@pytest.mark.guarantee("S2")
@pytest.mark.parametrize("end", ENDS)
def test_the_sources_have_the_orders_of_the_model(end: str) -> None:
    """What readers do is an acquire, what the owner does a release."""
    assert order_of(end) == ("acquire" if "look" in end else "release")


@pytest.mark.guarantee("S2")
def test_a_copy_that_looks_whole_is_whole() -> None:
    """With the orders of the sources no execution mixes two writes, in a record and in the ring of calls."""
    assert not mixes("", SEQUENCE)
    assert not mixes("", COMMIT)


@pytest.mark.guarantee("S2")
@pytest.mark.parametrize("numbers", [SEQUENCE, COMMIT], ids=["a record", "the ring of calls"])
@pytest.mark.parametrize("missing", ["writer's fence", "store", "look", "reader's fence"])
def test_each_end_of_the_lock_is_needed(missing: str, numbers: tuple[int, int, int]) -> None:
    """Without it an execution mixes two writes."""
    assert mixes(missing, numbers)


@pytest.mark.guarantee("S2")
def test_who_finds_a_page_finds_its_header() -> None:
    """The magic number is the last word of a new page, and the first that is read; both ends are needed."""
    assert not finds_no_header()
    assert finds_no_header("store")
    assert finds_no_header("look")


@pytest.mark.guarantee("S2")
@requires("sanitizers")
def test_copies_are_whole_while_a_thread_writes(tmp_path: Path) -> None:
    """Lanes, counters and records of thousands of calls are consistent, and a record that stays odd looks torn."""
    program = built(tmp_path, (DRIVER,), (*ASAN, f"-I{SOURCES}"))
    outcome = run(program, 300)
    assert (outcome.returncode, outcome.stderr) == (0, ""), outcome.stderr[-4000:]
    assert outcome.stdout == "ok: 300 copies\n"
