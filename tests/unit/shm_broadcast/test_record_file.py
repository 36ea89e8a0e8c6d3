"""The status page in a file: who may reach it, which runs are kept, and the dumps that are written beside it."""

import gc
import logging
import os
import resource
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.pages import find_pages
from shm_broadcast import _core
from shm_broadcast.errors import CapabilityError, CommTimeoutError, SettingsError
from shm_broadcast.layout import MAX_READERS, segment_bytes
from shm_broadcast.reports.failure_record import FailureRecord
from shm_broadcast.segment import Segment
from shm_broadcast.status import page as page_module
from shm_broadcast.status.failure_dump import MOST_BYTES, Dumps, FailureDump
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import PAGE_BYTES, GroupState, LaneState, Outcome
from shm_broadcast.status.page import OwnPage, own_page, record_own_page
from shm_broadcast.status.record_file import (
    DUMP_SUFFIX,
    KEPT_RUNS,
    PAGE_SUFFIX,
    RunFolder,
    new_run,
    runs_in,
)
from shm_broadcast.status.shown_calls import ShownCalls

SECRET = "the-user's-secret"
LOST = FailureRecord("lost", (7,), 4, "all_reduce #3", detail="7 (pid 12, dead)")


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    """Let a test have a page of its own in place of that of this process."""
    before = own_page()
    page_module._Own.page = None
    yield
    made = page_module._Own.page
    page_module._Own.page = before
    if made is not None:
        made.segment.close()
        vars(made).clear()


def begin(directory: Path) -> Path:
    """Record in `directory`; return the folder of the run."""
    record_own_page(directory, new_run(), 1)
    (run,) = runs_in(directory)[:1]
    return directory / run


def files(folder: Path, suffix: str) -> list[Path]:
    """Return the files of one kind."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffix))


@pytest.mark.guarantee("S9")
def test_only_the_user_reaches_the_file_whose_blocks_are_allocated(tmp_path: Path) -> None:
    """The directory is made with mode 0700, the file with 0600; it holds a page that others find and decode."""
    old = os.umask(0)
    try:
        folder = begin(tmp_path / "made" / "record")
    finally:
        os.umask(old)
    (file,) = files(folder, PAGE_SUFFIX)
    status = file.stat()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert (stat.S_IMODE(status.st_mode), status.st_size) == (0o600, PAGE_BYTES)
    assert status.st_blocks * 512 >= PAGE_BYTES
    own_page().group("tp:0", 0, [0, 1]).set_state(GroupState.USABLE)
    page = decode_page(file.read_bytes())
    assert [(group.name, group.state) for group in page.groups] == [("tp:0", "usable")]
    assert [found.page for found in find_pages([os.getpid()]).found if found.page.groups == page.groups]


@pytest.mark.guarantee("S9")
@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    """Nobody else may take away, replace or truncate a file that ranks have mapped."""
    tmp_path.chmod(mode)
    with pytest.raises(SettingsError, match=f"{tmp_path} .*mode 0{mode:o}.*0700"):
        begin(tmp_path)


@pytest.mark.guarantee("S9")
def test_nothing_that_is_there_already_is_written(tmp_path: Path) -> None:
    """A file or a link with the name of the page is refused, and so is a folder that is a link."""
    tmp_path.chmod(0o700)
    run = new_run()
    folder = RunFolder(tmp_path, run, "rank-0")
    (folder.path / f"rank-0{PAGE_SUFFIX}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="File exists"):
        folder.page()
    assert not (tmp_path / "elsewhere").exists()
    linked = new_run()
    (tmp_path / linked).symlink_to(folder.path)
    with pytest.raises(SettingsError, match="is no directory"):
        RunFolder(tmp_path, linked, "rank-0")
    with pytest.raises(SettingsError, match="is no name of a run"):
        RunFolder(tmp_path, "../run", "rank-0")


@pytest.mark.guarantee("S10")
def test_the_files_of_the_newest_runs_stay(tmp_path: Path) -> None:
    """Older runs go, but for what is not ours."""
    tmp_path.chmod(0o700)
    runs = [f"run-2026112{day}T000000Z-0000000{day}" for day in range(9)] + ["run-20261129T000000Z-0000000f"]
    for run in runs:
        RunFolder(tmp_path, run, "rank-0").page().close()
    assert runs_in(tmp_path) == sorted(runs, reverse=True)[:KEPT_RUNS]
    (tmp_path / runs[2] / "notes").touch()
    (tmp_path / "run-of-somebody").mkdir()
    RunFolder(tmp_path, new_run(), "rank-0")
    assert os.listdir(tmp_path / runs[2]) == ["notes"]
    assert (tmp_path / "run-of-somebody").is_dir()


@pytest.mark.guarantee("S9")
def test_without_a_free_descriptor_the_folder_is_refused(tmp_path: Path) -> None:
    """To list the runs takes one."""
    tmp_path.chmod(0o700)
    run, (soft, hard) = new_run(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(CapabilityError, match="open failed: Too many open files") as raised:
            RunFolder(tmp_path, run, "rank-0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised.value.requirement == "the system call open"
    RunFolder(tmp_path, run, "rank-0").page().close()


@pytest.mark.guarantee("S10")
def test_a_run_that_is_older_than_the_newest_keeps_its_own_files(tmp_path: Path) -> None:
    """Eight others have begun since, or the clock was set back: a rank that comes late records all the same."""
    tmp_path.chmod(0o700)
    run, later = (
        "run-20261101T000000Z-00000000",
        [f"run-2026112{day}T000000Z-0000000{day}" for day in range(8)],
    )
    RunFolder(tmp_path, run, "rank-0").page().close()
    for each in later:
        (tmp_path / each).mkdir(mode=0o700)
    RunFolder(tmp_path, run, "rank-1").page().close()
    assert sorted(os.listdir(tmp_path / run)) == [f"rank-0{PAGE_SUFFIX}", f"rank-1{PAGE_SUFFIX}"]
    assert sorted(runs_in(tmp_path)) == [run, *later]


@pytest.mark.guarantee("G37")
@pytest.mark.parametrize("where", ["posix_fallocate", "status_format"])
def test_an_interrupted_beginning_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A handler raises while the file is made, or the page in it; the next call of the same run works."""
    module: Any = os if where == "posix_fallocate" else _core
    original, run = getattr(module, where), new_run()

    def interrupted(*arguments: object) -> None:
        original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        record_own_page(tmp_path / "record", run, 1)
    monkeypatch.undo()
    assert os.listdir(tmp_path / "record" / run) == []
    gc.collect()
    opened = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert not [link for link in opened if link.is_symlink() and str(tmp_path) in str(link.readlink())]
    record_own_page(tmp_path / "record", run, 1)
    assert own_page().dumps is not None


@pytest.mark.guarantee("G37")
def test_a_handler_may_begin_the_record_that_it_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of the handler stays, in the file."""
    original, run = _core.status_format, new_run()
    made: list[OwnPage] = []

    def interrupted(*arguments: Any) -> None:
        monkeypatch.undo()
        record_own_page(tmp_path / "record", run, 1)
        made.append(own_page())
        original(*arguments)

    monkeypatch.setattr(_core, "status_format", interrupted)
    record_own_page(tmp_path / "record", run, 1)
    assert [own_page()] == made
    (file,) = files(tmp_path / "record" / run, PAGE_SUFFIX)
    assert os.fstat(own_page().segment.descriptor).st_ino == file.stat().st_ino


def test_threads_that_begin_the_record_at_once_get_one_page(tmp_path: Path) -> None:
    """One makes the file, the others wait for it."""
    run, at_once = new_run(), threading.Barrier(4)

    def first(_: int) -> OwnPage:
        at_once.wait()
        record_own_page(tmp_path / "record", run, 1)
        return own_page()

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(first, range(4))) == {own_page()}
    assert len(files(tmp_path / "record" / run, PAGE_SUFFIX)) == 1


@pytest.mark.guarantee("S9")
def test_what_was_made_before_stays_in_its_page(tmp_path: Path) -> None:
    """A group of before the settings were known is shown as before; the words of the header go over."""
    before = own_page()
    before.set_rank(3, 4)
    old = before.group("early:0", 0, [0])
    begin(tmp_path / "record")
    own_page().group("late:0", 0, [0])
    old.set_state(GroupState.USABLE)
    pages = [decode_page(_core.status_copy(page.segment.memory)) for page in (before, own_page())]
    assert [[group.name for group in page.groups] for page in pages] == [["early:0"], ["late:0"]]
    assert [(page.rank, page.world_size) for page in pages] == [(3, 4)] * 2
    recording = own_page()
    begin(tmp_path / "record")
    assert own_page() is recording
    before.segment.close()


@pytest.mark.guarantee("S9")
def test_a_forked_child_writes_no_file_of_its_parent(tmp_path: Path) -> None:
    """It has a page in memory, and no dumps, until it joins a world of its own."""
    folder = begin(tmp_path / "record")
    shown = ShownCalls("tp:0", 0, [4, 7])
    before = files(folder, PAGE_SUFFIX)[0].read_bytes()
    child = os.fork()
    if not child:
        shown.broken(CommTimeoutError("too late"), LOST, lambda rank: "alive")
        os._exit(0 if own_page().dumps is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert files(folder, PAGE_SUFFIX)[0].read_bytes() == before
    assert files(folder, DUMP_SUFFIX) == []


def read(path: Path) -> FailureDump:
    """Decode a dump."""
    return msgspec.msgpack.decode(path.read_bytes(), type=FailureDump)


@pytest.mark.guarantee("S11")
def test_one_dump_is_written_when_a_group_breaks(tmp_path: Path) -> None:
    """It holds the page with the call that goes on, the failure record and the states of the others."""
    folder = begin(tmp_path / "record")
    shown = ShownCalls("tp:0", 0, [4, 7, 9])
    lane = shown.lanes["device"]
    lane.begin(kind_of("all_reduce"), 3, 64, 0)
    lane.set_state(LaneState.ASLEEP)
    shown.broken(CommTimeoutError("too late"), LOST, {7: "dead", 9: "alive"}.__getitem__)
    (path,) = files(folder, DUMP_SUFFIX)
    dump, mode = read(path), stat.S_IMODE(path.stat().st_mode)
    assert (dump.group, dump.error, dump.text, dump.others) == (
        "tp:0",
        "CommTimeoutError",
        "too late",
        {7: "dead", 9: "alive"},
    )
    told = dump.kind, dump.ranks, dump.by, dump.operation, dump.detail
    assert told == ("lost", (7,), 4, "all_reduce #3", "7 (pid 12, dead)")
    (group,) = decode_page(dump.page).groups
    assert (group.state, group.lanes[0].state, group.lanes[0].number) == ("broken", "asleep", 3)
    assert mode == 0o600
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []


@pytest.mark.guarantee("S11")
def test_groups_that_break_together_make_one_dump(tmp_path: Path) -> None:
    """Another failure begins when all of them were left. A process writes eight at most."""
    folder = begin(tmp_path / "record")
    for number in range(10):
        together = [ShownCalls(f"{name}:{number}", 0, [0, 1]) for name in ("tp", "dp")]
        for shown in together:
            shown.broken(CommTimeoutError("too late"), None, lambda rank: "alive")
        assert len(files(folder, DUMP_SUFFIX)) == min(number + 1, 8)
        for shown in together:
            shown.status.leave()


@pytest.mark.guarantee("S11")
def test_a_group_that_breaks_while_a_dump_is_written_belongs_to_that_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread or a handler finds it broken then. As long as it is there, no other failure begins."""
    folder = begin(tmp_path / "record")
    first, second, third, last = (ShownCalls(f"tp:{number}", 0, [0, 1]) for number in range(4))
    write = Dumps._write

    def interrupted(dumps: Dumps, dump: FailureDump, number: int) -> Path:
        if dump.group == "tp:0":
            second.broken(CommTimeoutError("too late"), None, lambda rank: "alive")
        return write(dumps, dump, number)

    monkeypatch.setattr(Dumps, "_write", interrupted)
    first.broken(CommTimeoutError("too late"), None, lambda rank: "alive")
    first.status.leave()
    third.broken(CommTimeoutError("too late"), None, lambda rank: "alive")
    assert [read(path).group for path in files(folder, DUMP_SUFFIX)] == ["tp:0"]
    second.status.leave()
    third.status.leave()
    last.broken(CommTimeoutError("too late"), None, lambda rank: "alive")
    assert sorted(read(path).group for path in files(folder, DUMP_SUFFIX)) == ["tp:0", "tp:3"]
    last.status.leave()


@pytest.mark.guarantee("S11")
def test_no_dump_is_larger_than_a_mebibyte(tmp_path: Path) -> None:
    """Also with a page that is full of queues of 1,024 readers, of which it holds as many as there is room for."""
    folder = begin(tmp_path / "record")
    ring = Segment.create(segment_bytes(1 << 16, MAX_READERS))
    _core.ring_format(ring.memory, MAX_READERS, 1)
    for place in range(64):
        own_page().add_queue(f"queue {place}", ring, 0, place)
    shown = ShownCalls("tp:0", 0, list(range(256)))
    long = FailureRecord("lost", tuple(range(256)), 0, "x" * 10_000, detail="y" * 10_000)
    shown.broken(CommTimeoutError("z" * 10_000), long, lambda rank: "alive")
    (path,) = files(folder, DUMP_SUFFIX)
    assert 1 <= len(read(path).queues) < 64
    assert path.stat().st_size <= MOST_BYTES
    ring.close()


@pytest.mark.guarantee("S3")
def test_no_dump_holds_what_the_user_sends(tmp_path: Path) -> None:
    """Of an error that is not ours it has the class."""
    folder = begin(tmp_path / "record")
    ShownCalls("tp:0", 0, [0, 1]).broken(KeyError(SECRET), None, lambda rank: "alive")
    (path,) = files(folder, DUMP_SUFFIX)
    assert read(path).error == "KeyError"
    assert SECRET.encode() not in path.read_bytes()


@pytest.mark.guarantee("S11")
def test_a_text_that_is_no_unicode_hides_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text of the system may hold bytes that are none, which a dump cannot hold."""
    folder = begin(tmp_path / "record")
    with caplog.at_level(logging.WARNING):
        ShownCalls("tp:0", 0, [0, 1]).broken(CommTimeoutError("no \udcff"), None, lambda rank: "alive")
    assert ["no dump of the failure" in record.getMessage() for record in caplog.records] == [True]
    assert files(folder, DUMP_SUFFIX) == []


@pytest.mark.guarantee("S11")
def test_a_directory_that_is_gone_hides_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be written is logged, and the error of the call stays what it was."""
    folder = begin(tmp_path / "record")
    shown = ShownCalls("tp:0", 0, [0, 1])
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        shown.broken(CommTimeoutError("too late"), None, lambda rank: "alive")
    (record,) = caplog.records
    fields: dict[str, Any] = vars(record)
    assert "no dump of the failure of 'tp:0'" in record.getMessage()
    assert fields["comm_group"] == "tp:0"


def test_a_page_without_a_file_writes_no_dump(tmp_path: Path) -> None:
    """Nothing is recorded unless the settings say so."""
    ShownCalls("tp:0", 0, [0, 1]).broken(CommTimeoutError("too late"), None, lambda rank: "alive")
    assert (own_page().dumps, os.listdir(tmp_path)) == (None, [])


def test_a_call_that_ended_is_in_the_file_without_any_help(tmp_path: Path) -> None:
    """What the page holds is in the file at once: nothing is flushed by the process."""
    folder = begin(tmp_path / "record")
    lane = ShownCalls("tp:0", 0, [0, 1]).lanes["device"]
    lane.begin(kind_of("barrier"), 1, 0, 0)
    lane.end(Outcome.DONE)
    (record,) = decode_page(files(folder, PAGE_SUFFIX)[0].read_bytes()).records
    assert (record.call, record.number, record.outcome) == ("barrier", 1, "done")
    assert isinstance(own_page(), OwnPage)
