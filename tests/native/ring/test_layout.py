"""`shm_broadcast.layout` says of a ring in shared memory what the native core and DESIGN.md say."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from shm_broadcast import layout, queue
from tests.native.threads import ROOT, built, run

HEADER = ROOT / "shm_broadcast" / "csrc" / "ring" / "ring.hpp"


def told_by_python() -> list[str]:
    """Return the lines that `layout.cpp` prints where both agree."""
    lines = [
        f"{table} {name} {field.offset} {struct.calcsize(field.form)}"
        for table in ("FIELDS", "RECORD_FIELDS")
        for name, field in getattr(layout, table).items()
    ]
    lines += [f"{name} {getattr(layout, name)}" for name in ("LINE", "PAGE", "MAX_READERS")]
    for codes in (layout.ReaderState, layout.RecordKind):
        lines.append(" ".join([codes.__name__, *(str(each.value) for each in codes)]))
    computed: list[tuple[Callable[[int], int], tuple[int, ...]]] = [
        (layout.data_offset, (1, 61, 62, 1024)),
        (layout.record_bytes, (0, 1, 64, 65)),
    ]
    return lines + [f"{call.__name__} {value} {call(value)}" for call, values in computed for value in values]


@pytest.mark.guarantee("B8")
def test_the_native_core_has_the_same_layout(tmp_path: Path) -> None:
    """Every offset, size and code of the header file is the one that Python knows."""
    program = built(tmp_path, (Path(__file__).with_name("layout.cpp"),), (f'-DRING_HEADER="{HEADER}"',))
    assert run(program).stdout.splitlines() == told_by_python()


def test_the_old_place_of_segment_bytes_works() -> None:
    """`segment_bytes` was defined in `shm_broadcast.queue`, from where it can still be imported."""
    assert queue.segment_bytes is layout.segment_bytes


@pytest.mark.guarantee("B8")
def test_the_design_page_prints_the_layout() -> None:
    """The tables of DESIGN.md are the output of `layout.tables()`; print it again after a change."""
    page = (ROOT / "shm_broadcast" / "DESIGN.md").read_text(encoding="utf-8")
    assert layout.tables() in page
