"""`shm_broadcast.status.layout` says of a status page what the native core and DESIGN.md say."""

import struct
from pathlib import Path

import pytest

from shm_broadcast.status import kinds, layout
from tests.native.threads import ROOT, built, run

HEADER = ROOT / "shm_broadcast" / "csrc" / "status" / "page.hpp"


def told_by_python() -> list[str]:
    """Return the lines that `layout.cpp` prints where both agree."""
    lines = [f"{name} {table.offset} {table.nbytes} {table.number}" for name, table in layout.TABLES.items()]
    lines.append(f"page {layout.PAGE_BYTES}")
    codes = (layout.VERSION, layout.BUCKETS, layout.NOBODY, kinds.OTHER + 1)
    lines.append(" ".join(["codes", f"{layout.MAGIC:x}", *map(str, codes)]))
    for name, table in layout.TABLES.items():
        offset = 0
        for word, field in table.fields.items():
            nbytes = struct.calcsize("<" + field.form)
            lines.append(f"{name}.{word} {offset} {nbytes}")
            offset += nbytes
    return lines


@pytest.mark.guarantee("S1")
def test_the_native_core_has_the_same_status_page(tmp_path: Path) -> None:
    """Every offset, size and code of the header file is the one that Python knows."""
    program = built(tmp_path, (Path(__file__).with_name("layout.cpp"),), (f'-DPAGE_HEADER="{HEADER}"',))
    assert run(program).stdout.splitlines() == told_by_python()


@pytest.mark.guarantee("S1")
def test_the_design_page_prints_the_status_page() -> None:
    """The tables of DESIGN.md are the output of `layout.tables()`; print it again after a change."""
    page = (ROOT / "shm_broadcast" / "DESIGN.md").read_text(encoding="utf-8")
    assert layout.tables() in page


def test_the_kinds_fit_and_those_of_the_native_core_come_first() -> None:
    """A call's name finds its kind, also with a peer behind it or an underscore at its end."""
    assert len(kinds.KINDS) <= kinds.OTHER
    for name in set(kinds.KINDS):
        assert kinds.KINDS[kinds.kind_of(name)] == name
    assert kinds.kind_of("send to rank 3") == kinds.kind_of("send")
    assert kinds.kind_of("all_reduce_") == kinds.kind_of("all_reduce")
    assert kinds.kind_of("something else") == kinds.OTHER
