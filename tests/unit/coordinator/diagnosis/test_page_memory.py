"""Pages of other processes are copied whole, in memfds and in files, and no file takes the reader with it."""

import mmap
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from coordinator.diagnosis import page_memory, pages
from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.model import Page
from coordinator.diagnosis.page_memory import PageMemory
from coordinator.diagnosis.pages import find_pages
from coordinator.diagnosis.top.sampling import Sampler
from shm_broadcast import _core
from shm_broadcast.errors import DecodeError
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import PAGE_BYTES, TABLES, Outcome
from shm_broadcast.status.page import OwnPage
from shm_broadcast.status.record_file import PAGE_SUFFIX, RunFolder, new_run


@contextmanager
def page_in_a_file(directory: Path) -> Iterator[tuple[OwnPage, Path]]:
    """Yield a page, and its file."""
    folder = RunFolder(directory / "record", new_run(), "rank-0")
    page = OwnPage(folder)
    try:
        yield page, folder.path / f"rank-0{PAGE_SUFFIX}"
    finally:
        page.segment.close()


def copied(path: Path) -> Page:
    with closing(PageMemory(str(path))) as memory:
        return decode_page(memory.copy())


def test_a_file_is_copied_as_a_memfd_is(tmp_path: Path) -> None:
    """The copy is that of the native core, byte by byte."""
    with page_in_a_file(tmp_path) as (page, path):
        group = page.group("tp:0", 1, [4, 7])
        lane = group.lane("device", "ring")
        lane.begin(kind_of("barrier"), 1, 0, 0)
        lane.end(Outcome.DONE)
        with closing(PageMemory(str(path))) as memory:
            assert memory.copy() == _core.status_copy(page.segment.memory)
        group.leave()
    with page_in_a_file(tmp_path / "other") as (page, path), closing(PageMemory(str(path))) as memory:
        path.unlink()
        assert decode_page(memory.copy()).pid == os.getpid()


@pytest.mark.guarantee("S2")
def test_a_record_of_a_file_that_is_written_for_ever_is_torn(tmp_path: Path) -> None:
    """Its process was killed meanwhile. The other records are as they were."""
    with page_in_a_file(tmp_path) as (page, path):
        groups = [page.group(name, 0, [0, 1]) for name in ("tp:0", "dp:0")]
        at = TABLES["groups"].offset
        (number,) = page.segment.memory[at : at + 1]
        page.segment.memory[at] = number | 1
        assert {each.name: each.is_torn for each in copied(path).groups} == {"tp:0": True, "dp:0": False}
        page.segment.memory[at] = number + 1 & 0xFE
        for group in groups:
            group.leave()


@pytest.mark.guarantee("S2")
@pytest.mark.parametrize("table", ["groups", "lanes", "records"])
def test_a_record_that_changes_between_two_reads_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """What the second copy holds of it may be of two times."""
    read = page_memory._read
    with page_in_a_file(tmp_path) as (page, path):
        at, memory = TABLES[table].offset, page.segment.memory
        reads: list[int] = []

        def changing(descriptor: int, nbytes: int, offset: int) -> bytes:
            data = read(descriptor, nbytes, offset)
            reads.append(nbytes)
            if nbytes == PAGE_BYTES and len(reads) == 2:
                memory[at] += 2
                memory[at + 8 : at + 16] = b"\7" * 8
            return data

        monkeypatch.setattr(page_memory, "_read", changing)
        with closing(PageMemory(str(path))) as held:
            assert held.copy()[at + 8 : at + 16] == b"\7" * 8
        assert reads.count(PAGE_BYTES) == 3
        assert len(reads) == 6


@pytest.mark.guarantee("S9")
def test_a_file_that_is_made_shorter_does_not_end_who_looks(tmp_path: Path) -> None:
    """Its user may be another one where root looks. What held a page is told as a fault."""
    with page_in_a_file(tmp_path) as (page, path):
        holder = subprocess.Popen(["sleep", "600"], pass_fds=[page.segment.descriptor])
        sampler = Sampler()
        try:
            sampler._search()
            assert [seen.holders for seen in sampler.sample().seen if seen.page.pid == os.getpid()]
            with closing(PageMemory(str(path))) as memory:
                os.truncate(path, mmap.PAGESIZE)
                with pytest.raises(DecodeError, match="made shorter"):
                    memory.copy()
            assert "made shorter" in sampler.sample().faults[holder.pid]
            search = find_pages([holder.pid])
            assert (search.found, list(search.faults)) == ((), [holder.pid])
        finally:
            sampler.close()
            holder.kill()
            holder.wait()
            os.truncate(path, PAGE_BYTES)


def test_a_descriptor_that_has_become_a_socket_is_a_page_that_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process may close a page and open a socket between the look at its descriptors and the opening."""
    with socket.socket() as other:
        link = f"/proc/self/fd/{other.fileno()}"
        with pytest.raises(FileNotFoundError, match="the page was closed"):
            PageMemory(link)
        monkeypatch.setattr(pages, "find_memory", lambda pid: [pages.Memory(link, (0, pid), True)])
        assert find_pages([os.getpid()]) == pages.Search((), (), {})
        sampler = Sampler()
        try:
            sampler._search()
            assert sampler.sample().seen == ()
            assert sampler.sample().faults == {}
        finally:
            sampler.close()
