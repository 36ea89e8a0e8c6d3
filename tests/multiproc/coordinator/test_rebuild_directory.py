"""The rendezvous directory of a run whose members change: who may use it, and who removes it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.bootstrap.methods import directory as rendezvous_directory
from coordinator.bootstrap.methods.directory import DirectoryRendezvous
from coordinator.elastic.joining import join_distributed_environment
from coordinator.errors import UsageError
from tests.rebuild_cycles import Crowd


def started(crowd: Crowd, size: int) -> list[int]:
    """Start members; return their numbers."""
    members = [crowd.spawn() for _ in range(size)]
    for rank, number in enumerate(members):
        crowd.tell(number, "start", rank, size)
    for number in members:
        crowd.answer(number)
    return members


def generations(directory: Path) -> set[str]:
    return {each.name for each in directory.glob("generation-*")}


@pytest.mark.guarantee("E10")
@pytest.mark.guarantee("G13")
def test_a_later_run_leaves_the_members_alone_that_go_on_without_rank_0() -> None:
    """The process that made their generation has ended, and they need it: the last of them removes it."""
    with Crowd() as crowd:
        first, second = started(crowd, 2)
        before = generations(crowd.directory / "store")
        crowd.kill(first)
        later = DirectoryRendezvous(crowd.directory / "store", 0, 1)
        later.join(5.0)
        assert before < generations(crowd.directory / "store")
        assert crowd.ask([second], "rebuild") == [[0, 1, 1, [0]]]
        crowd.ask([second], "use", 1)
        crowd.end([second])
        assert not before & generations(crowd.directory / "store")
        later.leave()
        assert not (crowd.directory / "store").exists()


@pytest.mark.guarantee("G32")
def test_the_last_process_removes_the_directory_though_others_were_killed() -> None:
    """It need not have created groups again: whoever leaves sees who is left."""
    with Crowd() as crowd:
        first, second, third = started(crowd, 3)
        crowd.kill(second)
        crowd.end([first])
        assert (crowd.directory / "store").exists()
        crowd.end([third])
        assert not (crowd.directory / "store").exists()


@pytest.mark.guarantee("G32")
def test_two_processes_may_be_the_last_to_leave_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has removed the generation when this one looks who is left in it: there is nothing to do."""
    rendezvous = DirectoryRendezvous(tmp_path, 0, 1)
    rendezvous.join(5.0)
    (generation,) = tmp_path.glob("generation-*")
    read_owner = rendezvous_directory._read_owner

    def remove_then(path: Path) -> Any:
        owner = read_owner(path)
        shutil.rmtree(generation)
        return owner

    with monkeypatch.context() as patched:
        patched.setattr(rendezvous_directory, "_read_owner", remove_then)
        rendezvous.leave()
    assert not generations(tmp_path)


def test_a_run_of_which_nobody_is_left_is_not_joined() -> None:
    """Nobody could take the process in. What the run has left behind is removed."""
    with Crowd() as crowd:
        for number in started(crowd, 2):
            crowd.kill(number)
        with pytest.raises(UsageError, match="all processes of the last generation have ended"):
            join_distributed_environment(f"file://{crowd.directory}/store")
        assert not generations(crowd.directory / "store")


@pytest.mark.guarantee("E10")
def test_a_process_that_joins_removes_the_links_of_those_that_were_killed() -> None:
    """Otherwise the directory would grow with each process that joins."""
    path = "store/generation-*/store-*"
    with Crowd() as crowd:
        members = started(crowd, 3)
        assert len(list(crowd.directory.glob(path))) == 3
        crowd.kill(members.pop(0))
        crowd.kill(members.pop(0))
        rendezvous = DirectoryRendezvous(crowd.directory / "store", -1, 0)
        rendezvous.join_later()
        assert len(list(crowd.directory.glob(path))) == 2
        rendezvous.leave()
        assert len(list(crowd.directory.glob(path))) == 1
        crowd.end(members)
        assert not (crowd.directory / "store").exists()
