"""Which processes record, and where: the ranks of a run agree on its folder."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from coordinator.diagnosis.blame.recorded import read_run, run_folders
from coordinator.errors import CommError
from coordinator.parallel_state import destroy_distributed_environment, get_world_group
from coordinator.settings import CoordinatorSettings
from coordinator.stateless import create_stateless_group
from shm_broadcast.status.page import own_page
from shm_broadcast.status.record_file import DUMP_SUFFIX, runs_in
from tests.harness import run_ranks
from tests.planted_faults import FAULTS, RANKS, suffer
from tests.ports import free_port
from tests.rebuild_cycles import Crowd
from tests.torch_groups import OURS, torch_world
from tests.worlds import join_world, world

# Much less than the deadline of the creation.
PROMPT_S = 20.0


def groups_in(record: Path, ranks: int) -> set[str]:
    """Return the groups of the only run in a directory, in which each rank has a page."""
    assert len(runs_in(record)) == 1
    processes = read_run(run_folders([record])).processes
    assert [process.page.rank for process in processes] == list(range(ranks))
    return {group.name for process in processes for group in process.page.groups}


def two_worlds(rank: int, world_size: int, directory: Path, record: str) -> None:
    """Join a world, leave it and join another one."""
    for number in range(2):
        place = directory / str(number)
        place.mkdir(exist_ok=True)
        with world(rank, world_size, place, record_dir=record) as group:
            group.barrier()


def test_the_ranks_of_a_run_share_a_folder(tmp_path: Path) -> None:
    """The first to come names the run; a process stays in it when it joins another world."""
    record = tmp_path / "record"
    run_ranks(two_worlds, 4, str(record))
    assert groups_in(record, 4) == {"world:0"}


def backend_of_torch(rank: int, world_size: int, directory: Path) -> None:
    with torch_world(rank, world_size, directory, OURS):
        dist.all_reduce(torch.ones(4))


def test_the_backend_of_torch_records_too(tmp_path: Path) -> None:
    """The environment says where."""
    record = tmp_path / "record"
    run_ranks(backend_of_torch, 2, environ={"GROUP_COORDINATOR_RECORD_DIR": str(record)})
    assert any(name.startswith("torch:") for name in groups_in(record, 2))


def stateless(rank: int, world_size: int, directory: Path, port: int, record: str) -> None:
    settings = CoordinatorSettings.resolve({}, record_dir=record)
    group = create_stateless_group("127.0.0.1", port, rank, world_size, backend="gloo", settings=settings)
    group.barrier()
    group.destroy()


def test_a_stateless_group_records_too(tmp_path: Path) -> None:
    """Its own store names the run."""
    record = tmp_path / "record"
    run_ranks(stateless, 2, free_port(), str(record))
    assert len(groups_in(record, 2)) == 1


@pytest.mark.guarantee("S9")
def test_a_process_that_joins_later_records_in_the_run_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `blame` reads all members, and later ones do not count as runs, of which only the newest stay."""
    record = tmp_path / "record"
    monkeypatch.setenv("GROUP_COORDINATOR_RECORD_DIR", str(record))
    with Crowd() as crowd:
        first = crowd.spawn()
        crowd.tell(first, "start", 0, 1)
        crowd.answer(first)
        joined = crowd.spawn()
        crowd.tell(joined, "join", None)
        crowd.ask([first], "exchange", [], 1)
        crowd.answer(joined)
        assert groups_in(record, 2) >= {"world:0", "world:0@1"}
        crowd.end([first, joined])


def one_records(rank: int, world_size: int, directory: Path, record: str) -> bool:
    join_world(rank, world_size, directory, record_dir=record if rank else None)
    get_world_group().barrier()
    destroy_distributed_environment()
    return own_page().dumps is not None


def test_a_rank_that_does_not_record_holds_up_nobody(tmp_path: Path) -> None:
    """The setting may differ between ranks."""
    assert run_ranks(one_records, 2, str(tmp_path / "record")) == [False, True]
    evidence = read_run(run_folders([tmp_path / "record"]))
    assert [process.page.rank for process in evidence.processes] == [1]


def test_each_survivor_writes_one_dump(tmp_path: Path) -> None:
    """Rank 2 is killed; what each of the others has written is whole."""
    record = tmp_path / "record"
    (tmp_path / "record-looked").touch()
    run_ranks(suffer, RANKS, "kill", str(record), expect_dead=FAULTS["kill"].dead)
    (folder,) = run_folders([record])
    dumps = sorted(name.split("-")[1] for name in os.listdir(folder) if name.endswith(DUMP_SUFFIX))
    assert dumps == ["0", "1", "3"]
    assert [process.source for process in read_run([folder]).processes] == ["dump", "dump", "file", "dump"]


def one_cannot_record(rank: int, world_size: int, directory: Path, record: str) -> list[str]:
    place = f"{record}/open" if rank == 1 else f"{record}/private"
    began = time.monotonic()
    with pytest.raises(CommError) as caught:
        join_world(rank, world_size, directory, record_dir=place)
    assert time.monotonic() - began < PROMPT_S
    return [type(caught.value).__name__, str(caught.value)]


def test_a_rank_that_cannot_record_tells_the_others_why(tmp_path: Path) -> None:
    """Its directory is open to other users. Nobody waits until the deadline of the creation."""
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    first, own, last = run_ranks(one_cannot_record, 3, str(tmp_path))
    assert own[0] == "SettingsError"
    for kind, text in (first, last):
        assert kind == "CapabilityError"
        assert f"rank 1 cannot take part: {own[1]}" in text
