"""Reading what a run has recorded: which files count, and what hostile or broken ones give."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coordinator.cli import main
from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.evidence import Evidence
from coordinator.diagnosis.blame.recorded import read_dump, read_run, run_folders
from coordinator.diagnosis.blame.verdict import Verdict
from shm_broadcast import _core, codec
from shm_broadcast.errors import CommTimeoutError, DecodeError, UsageError
from shm_broadcast.layout import segment_bytes
from shm_broadcast.liveness import this_process
from shm_broadcast.reports.failure_record import FailureRecord
from shm_broadcast.segment import Segment
from shm_broadcast.status.failure_dump import MOST_BYTES, FailureDump, QueueEnd, dump_of_ring
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import NOBODY, LaneState, Outcome
from shm_broadcast.status.page import GroupStatus, OwnPage
from shm_broadcast.status.record_file import DUMP_SUFFIX, PAGE_SUFFIX, RunFolder

RUN = "run-20261126T000000Z-00000001"
# With `thorough` it is as many as this.
MUTATIONS = {False: 200, True: 20_000}


class Rank:
    """A rank of a group of three that records into a folder; all live in this process."""

    def __init__(self, directory: Path, rank: int, run: str = RUN) -> None:
        """Make its file, and make a call."""
        self.page = OwnPage(RunFolder(directory, run, f"rank-{rank}-host-{4000 + rank}-1"))
        self.page.set_rank(rank, 3)
        self.status: GroupStatus = self.page.group("tp:0", rank, [0, 1, 2])
        self.lane = self.status.lane("device", "process group")
        self.lane.begin(kind_of("barrier"), 1, 0, NOBODY)
        self.lane.end(Outcome.DONE)

    def wait(self) -> None:
        """Enter a call."""
        self.lane.begin(kind_of("all_reduce"), 2, 64, NOBODY)
        self.lane.set_state(LaneState.ASLEEP)

    def dump(self) -> None:
        """Give up."""
        failure = FailureRecord("timeout", (2,), 0, "all_reduce #2", 3.0, "2 (pid 4002, alive)")
        self.status.dump(CommTimeoutError("no answer"), failure, {0: "alive", 1: "alive", 2: "stopped"})

    def close(self) -> None:
        """Let the file go."""
        self.page.segment.close()
        vars(self.page).clear()
        # The mapping goes with what refers to it.
        vars(self).clear()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    """Return three ranks: two have given up waiting for the third, which is in no call."""
    tmp_path.chmod(0o700)
    made = [Rank(tmp_path, rank) for rank in range(3)]
    for rank in made[:2]:
        rank.wait()
        rank.dump()
    yield made
    for rank in made:
        rank.close()


@pytest.fixture
def folder(ranks: list[Rank], tmp_path: Path) -> Path:
    """Return the folder of their run."""
    assert len(ranks) == 3
    return tmp_path / RUN


def test_a_dump_counts_before_the_page_of_its_process(folder: Path, tmp_path: Path) -> None:
    """The page may go on changing. A record directory stands for its newest run."""
    evidence = read_run(run_folders([tmp_path]))
    assert [(each.page.rank, each.source) for each in evidence.processes] == [
        (0, "dump"),
        (1, "dump"),
        (2, "file"),
    ]
    assert evidence.processes[0].others == {"tp:0": {0: "alive", 1: "alive", 2: "stopped"}}
    again = read_run(run_folders([folder])).processes
    assert [each.page for each in again] == [each.page for each in evidence.processes]
    (found,) = judge(evidence).findings
    assert (found.rule, found.ranks, found.call, found.number) == ("root cause", (2,), "all_reduce", 2)


def test_the_last_dump_of_a_process_counts(ranks: list[Rank], folder: Path) -> None:
    """It is of the last failure; one that cannot be read gives way to the one before."""
    ranks[0].status.leave()
    later = ranks[0].page.group("tp:1", 0, [0, 1, 2])
    later.dump(CommTimeoutError("again"), None, {})
    assert [failure.group for failure in read_run([folder]).processes[0].failures] == ["tp:1"]
    (broken,) = folder.glob(f"rank-0-*-2{DUMP_SUFFIX}")
    broken.write_bytes(b"torn")
    evidence = read_run([folder])
    assert evidence.earlier is not None
    assert [failure.group for failure in evidence.earlier.processes[0].failures] == ["tp:0"]
    # The process has made another group since.
    assert evidence.processes[0].source == "file"
    assert evidence.unseen[0].startswith(f"{broken.name}: it is no dump")


def test_the_hosts_of_a_run_may_have_a_folder_each(folder: Path, tmp_path: Path) -> None:
    """Folders that were copied from several hosts are read together."""
    other = tmp_path / "copied"
    other.mkdir()
    for file in folder.glob("rank-2-*"):
        shutil.move(file, other / file.name)
    both = read_run(run_folders([folder, other]))
    assert [process.page.rank for process in both.processes] == [0, 1, 2]


def test_positions_of_queues_come_from_dumps(tmp_path: Path) -> None:
    """A writer without room waits for the reader that is behind."""
    tmp_path.chmod(0o700)
    ranks = [Rank(tmp_path, rank) for rank in range(3)]
    ring = Segment.create(segment_bytes(1 << 16, 2))
    _core.ring_format(ring.memory, 2, 1)
    for place, rank in enumerate(ranks):
        rank.page.add_queue("steps", ring, 0, place - 1)
    ranks[0].dump()
    (found,) = read_run([tmp_path / RUN]).rings
    assert (found.name, found.rank, [reader.rank for reader in found.readers]) == ("steps", 0, [1, 2])
    for rank in ranks:
        rank.close()
    ring.close()


ENGINE = 4242


def ring_of_engine(behind: int = 0) -> Segment:
    """Return a queue of the engine to two readers, of which the second is some bytes behind."""
    ring = Segment.create(segment_bytes(1 << 16, 2))
    _core.ring_format(ring.memory, 2, 1)
    for place in range(2):
        _core.ring_attach(ring.memory, place)
    if behind:
        _core.WriteEndpoint(ring.memory, codec.describe, "park", lambda *_: None).send(bytes(behind), 0)
        _core.ReadEndpoint(ring.memory, 0, codec.build_owned, "park", lambda *_: None).fetch_within(0, 0)
    return ring


def write_wait(rank: Rank, ring: Segment, place: int, states: dict[int, str], error: str = "") -> None:
    """Write down what a rank waits for; the engine is at the end of the writer, and the ranks 0 and 1 read."""
    own = this_process()
    ends = [
        QueueEnd(at, state, ENGINE if at < 0 else own.pid, 5 + at, own.pid_namespace, own.boot_id, "node1")
        for at, state in states.items()
    ]
    dumped = dump_of_ring(ring.descriptor)
    assert dumped is not None
    assert rank.page.dumps is not None
    rank.page.dumps.write_wait("steps", place, dumped, error, ends, [] if place >= 0 else [0, 1])


@pytest.mark.parametrize(("state", "rule"), [("stopped", "root cause"), ("dead", "dead"), ("alive", "")])
def test_an_engine_without_a_record_is_named_by_what_its_readers_wait_for(
    tmp_path: Path, state: str, rule: str
) -> None:
    """It has no page there: what the reader has written down tells who it is, and how far it is."""
    tmp_path.chmod(0o700)
    ranks = [Rank(tmp_path, rank) for rank in range(3)]
    ring = ring_of_engine()
    write_wait(ranks[0], ring, 0, {-1: state, 0: "alive"})
    found = judge(read_run([tmp_path / RUN])).findings
    assert [each.rule for each in found] == ([rule] if rule else [])
    for each in found:
        (culprit,) = each.culprits
        assert (culprit.rank, culprit.pid, culprit.role) == (None, ENGINE, "writer of queue 'steps'")
    # Once a rank at an end of the queue has made another call, the wait is over.
    ranks[0].page.dumps.forget_wait("steps")  # type: ignore[union-attr]
    assert judge(read_run([tmp_path / RUN])).findings == ()
    for rank in ranks:
        rank.close()
    ring.close()


def test_the_slow_reader_of_a_writer_that_waits_is_named(tmp_path: Path) -> None:
    """The writer's ranks tell which page is the reader's; a call of that one later than the wait ends it."""
    tmp_path.chmod(0o700)
    ranks = [Rank(tmp_path, rank) for rank in range(3)]
    ring = ring_of_engine(behind=1000)
    write_wait(ranks[2], ring, -1, {-1: "alive"}, "CommTimeoutError")
    (found,) = judge(read_run([tmp_path / RUN])).findings
    assert (found.rule, found.ranks, found.call, found.group) == ("root cause", (1,), "enqueue", "steps")
    assert found.details[-1].startswith("rank 1 is 1 messages and ")
    ranks[1].lane.begin(kind_of("barrier"), 2, 0, NOBODY)
    ranks[1].lane.end(Outcome.DONE)
    assert judge(read_run([tmp_path / RUN])).findings == ()
    for rank in ranks:
        rank.close()
    ring.close()


@pytest.mark.guarantee("W4")
def test_a_hostile_wait_is_an_error_or_a_verdict(tmp_path: Path) -> None:
    """Changed bytes of what a reader has written down never give another exception."""
    tmp_path.chmod(0o700)
    ranks = [Rank(tmp_path, rank) for rank in range(3)]
    ring = ring_of_engine(behind=1000)
    write_wait(ranks[0], ring, 0, {-1: "stopped", 0: "alive"})
    (path,) = (tmp_path / RUN).glob(f"*-0{DUMP_SUFFIX}")
    whole, random_, verdicts = path.read_bytes(), random.Random(2), 0
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(random_.randint(1, 3)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        path.write_bytes(bytes(data))
        verdicts += not judge(read_run([tmp_path / RUN])).unseen
    assert verdicts > 10
    for rank in ranks:
        rank.close()
    ring.close()


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode([1] * 9)])
def test_what_is_no_dump_is_told(content: bytes) -> None:
    """It raises a `DecodeError`."""
    with pytest.raises(DecodeError, match="it is no dump"):
        read_dump(content)


def test_a_dump_of_another_version_is_told(folder: Path) -> None:
    """The text names both versions."""
    (path,) = folder.glob(f"rank-0-*{DUMP_SUFFIX}")
    dump = msgspec.msgpack.decode(path.read_bytes(), type=FailureDump)
    with pytest.raises(DecodeError, match="version 7, and this release reads version 1"):
        read_dump(msgspec.msgpack.encode(msgspec.structs.replace(dump, version=7)))


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize(
    "is_thorough", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["sample", "thorough"]
)
def test_a_hostile_dump_is_an_error_or_a_verdict(folder: Path, is_thorough: bool) -> None:
    """Changed bytes never give another exception, from the decoder to the verdict."""
    (path,) = folder.glob(f"rank-0-*{DUMP_SUFFIX}")
    dump = msgspec.msgpack.decode(path.read_bytes(), type=FailureDump)
    # The page's own mutations are those of the decoder's test: here those of all else, and some of the used pages.
    small = msgspec.msgpack.encode(dump)
    random_, verdicts = random.Random(1), 0
    mutations = MUTATIONS[is_thorough]
    for _ in range(mutations):
        data = bytearray(small)
        for _ in range(random_.randint(1, 4)):
            data[
                random_.choice(
                    (random_.randrange(400), random_.randrange(len(data)), -random_.randrange(1, 200))
                )
            ] = random_.randrange(256)
        try:
            process, _ = read_dump(bytes(data))
        except DecodeError:
            continue
        judge(Evidence((process,)))
        verdicts += 1
    assert verdicts > mutations // 10


def test_what_is_no_file_of_ours_is_not_opened(folder: Path) -> None:
    """A link, a pipe that would block, and a file that is too large are told; unfinished dumps are passed over."""
    (page,) = folder.glob(f"rank-2-*{PAGE_SUFFIX}")
    target = folder / "elsewhere"
    page.rename(target)
    page.symlink_to(target)
    os.mkfifo(folder / f"rank-7-host-1-1{PAGE_SUFFIX}")
    (folder / f"rank-8-host-1-1-1{DUMP_SUFFIX}").write_bytes(bytes(MOST_BYTES + 1))
    (folder / f".rank-9-host-1-1-1{DUMP_SUFFIX}").write_bytes(b"unfinished")
    evidence = read_run([folder])
    assert [process.page.rank for process in evidence.processes] == [0, 1]
    told = {line.partition(":")[0].split("-")[1]: line for line in evidence.unseen}
    assert sorted(told) == ["2", "7", "8"]
    assert f"more than {MOST_BYTES} bytes" in told["8"]


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """There is no directory, or nothing of ours in it, or nothing that can be decoded."""
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        run_folders([tmp_path / "none"])
    with pytest.raises(UsageError, match="is no record directory"):
        run_folders([tmp_path])
    (tmp_path / f"rank-0{PAGE_SUFFIX}").write_bytes(b"short")
    with pytest.raises(UsageError, match="nothing of the run can be read; .*417792 bytes, this has 5"):
        read_run(run_folders([tmp_path]))


def test_the_command_names_the_rank_and_exits_with_3(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text for people, one JSON object for machines."""
    assert main(["blame", str(tmp_path)]) == 3
    text = capsys.readouterr().out
    assert text.startswith(
        "The others wait for a process that does not come.\n  call: all_reduce #2 on 'tp:0' (device)"
    )
    assert "rank 2 (pid " in text
    assert main(["blame", str(folder), "--json"]) == 3
    answer = msgspec.json.decode(capsys.readouterr().out)
    assert answer["version"] == 1
    (verdict,) = msgspec.convert(answer["jobs"], tuple[Verdict, ...])
    assert verdict.findings[0].ranks == (2,)


def test_the_command_exits_with_0_if_nobody_is_named_and_with_1_if_nothing_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went well names nobody; a directory without a run is an error."""
    assert main(["blame", str(tmp_path)]) == 1
    assert "coordinator: error: " in capsys.readouterr().err
    tmp_path.chmod(0o700)
    ranks = [Rank(tmp_path, rank) for rank in range(3)]
    for rank in ranks:
        rank.status.leave()
    assert main(["blame", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(
        "Nobody is to blame for anything that was seen.\n\nSeen: 3 processes"
    )
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(
    "arguments", [["blame"], ["blame", "--live", "somewhere"], ["blame", "--live", "--pid", "0"]]
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    """Either directories or `--live`."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
