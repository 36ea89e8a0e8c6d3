"""Ranks of one host find each other through a directory alone, whatever earlier runs left in it."""

import errno
import os
import secrets
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator.bootstrap.agreement import agreeing
from coordinator.bootstrap.methods.directory import DirectoryRendezvous
from coordinator.errors import CommTimeoutError, UsageError
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from tests.harness import RankPool, run_ranks
from tests.worlds import join_world, meet, outcome_of, world


def names(directory: Path) -> list[str]:
    path = directory / "rendezvous"
    return sorted(each.name for each in path.iterdir()) if path.exists() else []


def join(
    rank: int, world_size: int, directory: Path, path: Path | str | None = None, **settings: Any
) -> dict[str, Any]:
    """Join through `path`, by default as `world` does, and return the outcome."""
    chosen = CoordinatorSettings.resolve({}, **settings)
    method = f"file://{path or directory / 'rendezvous'}"
    return outcome_of(
        lambda: init_distributed_environment(world_size, rank, method, backend="gloo", settings=chosen)
    )


# --- runs -----------------------------------------------------------------------------------------------------


def run_and_list(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        ranks = group.all_gather_object(rank)
        held = names(directory)
        group.barrier()
    meet(rank, range(world_size), directory, "left")
    assert not (directory / "rendezvous").exists()
    return [ranks, held, names(directory)]


def test_a_run_has_one_generation_and_leaves_nothing(ranks4: RankPool) -> None:
    """During a run the directory holds the pointer and one generation."""
    for ranks, held, left in ranks4.run(run_and_list):
        assert ranks == [0, 1, 2, 3]
        assert len(held) == 2
        assert held[0] == "current"
        assert held[1].startswith("generation-")
        assert left == []


def run_repeatedly(rank: int, world_size: int, directory: Path) -> list[str]:
    for number in range(20):
        with world(rank, world_size, directory) as group:
            # All ranks are in the same run: no two runs mix.
            assert group.all_gather_object(number) == [number] * world_size
    meet(rank, range(world_size), directory, "left")
    return names(directory)


@pytest.mark.guarantee("G13")
def test_a_directory_can_be_used_again_at_once(ranks4: RankPool) -> None:
    """Twenty runs follow each other without a pause, and no rank joins one of an earlier run."""
    assert ranks4.run(run_repeatedly, timeout_s=120.0) == [[]] * 4


@contextmanager
def told_after(calls: int, owner: type, name: str, told: Path) -> Iterator[None]:
    """Create `told` when method `name` of `owner` has returned that often."""
    method, returned = getattr(owner, name), []

    def call(*args: Any) -> Any:
        result = method(*args)
        returned.append(name)
        if len(returned) == calls:
            told.touch()
        return result

    with mock.patch.object(owner, name, call):
        yield


def join_late(rank: int, world_size: int, directory: Path, late: int) -> list[int]:
    with ExitStack() as stack:
        if rank == late:
            meet(rank, range(world_size), directory, "polls")
        else:
            # Rank 0 makes the generation and waits for the others in it; rank 1 waits for a generation.
            owner, name = (DirectoryRendezvous, "_follow") if rank else (agreeing._Agreement, "check")
            stack.enter_context(told_after(3, owner, name, directory / f"polls-{rank}"))
        group = stack.enter_context(world(rank, world_size, directory))
        gathered: list[int] = group.all_gather_object(rank)
        return gathered


@pytest.mark.parametrize("late", [0, 1])
def test_the_ranks_may_come_in_any_order(ranks2: RankPool, late: int) -> None:
    """The rank that comes first waits for the other one."""
    assert ranks2.run(join_late, late) == [[0, 1]] * 2


def be_killed_in_run(rank: int, world_size: int, directory: Path, path: str) -> None:
    join(rank, world_size, directory, path)
    get_world_group().barrier()
    meet(rank, range(world_size), directory, "up")
    os.kill(os.getpid(), signal.SIGKILL)


def run_in(rank: int, world_size: int, directory: Path, path: str) -> list[Any]:
    settings = CoordinatorSettings.resolve({}, create_timeout_s=60.0)
    init_distributed_environment(world_size, rank, f"file://{path}", backend="gloo", settings=settings)
    group = get_world_group()
    ranks = group.all_gather_object(rank)
    held = sorted(each.name for each in Path(path).iterdir())
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    group.barrier()
    destroy_distributed_environment()
    meet(rank, range(world_size), directory, "left")
    return [ranks, held, Path(path).exists(), mode]


@pytest.mark.guarantee("G13")
def test_the_next_run_removes_the_files_of_a_killed_run(tmp_path: Path) -> None:
    """A killed run leaves one generation. The next run does not join it, and removes it."""
    path = tmp_path / "rendezvous"
    run_ranks(be_killed_in_run, 2, str(path), expect_dead=[0, 1])
    left = {each.name for each in path.iterdir()}
    assert len(left) == 2
    for ranks, held, is_there, _ in run_ranks(run_in, 2, str(path)):
        assert ranks == [0, 1]
        assert len(held) == 2
        assert set(held) & left == {"current"}
        # The killed run had made it.
        assert not is_there


def wait_for_a_live_run(rank: int, world_size: int, directory: Path, path: str) -> Any:
    if rank == 0:
        meet(rank, range(world_size), directory, "refuses")
        return run_in(rank, world_size, directory, path)[0]
    # Rank 1 has found the dead owner of the killed run's generation, and looks for another one.
    with told_after(3, DirectoryRendezvous, "_claim_rank", directory / f"refuses-{rank}"):
        return run_in(rank, world_size, directory, path)[0]


@pytest.mark.guarantee("G13")
def test_a_rank_does_not_join_a_killed_run(tmp_path: Path) -> None:
    """Rank 1 comes first, finds a generation whose rank 0 is dead, and waits for a new one."""
    path = tmp_path / "rendezvous"
    run_ranks(be_killed_in_run, 2, str(path), expect_dead=[0, 1])
    assert run_ranks(wait_for_a_live_run, 2, str(path)) == [[0, 1]] * 2


def two_worlds_at_once(rank: int, world_size: int, directory: Path) -> list[int]:
    # Ranks 0 and 1 of this test are one world. Ranks 2 and 3 start another one while the first one is in use.
    if rank >= 2:
        meet(rank, range(world_size), directory, "first is up")
    join_world(rank % 2, 2, directory)
    group = get_world_group()
    gathered: list[int] = group.all_gather_object(rank)
    if rank < 2:
        meet(rank, range(world_size), directory, "first is up")
    meet(rank, range(world_size), directory, "both are up")
    group.barrier()
    destroy_distributed_environment()
    return gathered


def test_a_second_world_in_the_same_directory_leaves_the_first_alone(ranks4: RankPool) -> None:
    """Each world has its own generation, and their ranks do not mix."""
    assert ranks4.run(two_worlds_at_once) == [[0, 1], [0, 1], [2, 3], [2, 3]]


# --- paths ----------------------------------------------------------------------------------------------------


def test_missing_parents_are_made(tmp_path: Path) -> None:
    """Neither the directory nor its parents need to exist."""
    path = tmp_path / "a" / "b" / "rendezvous"
    for ranks, _, is_there, mode in run_ranks(run_in, 2, str(path)):
        assert ranks == [0, 1]
        assert mode == 0o700
        assert not is_there
    assert list(path.parent.iterdir()) == []


def alone(rank: int, world_size: int, directory: Path, method: str) -> dict[str, Any]:
    settings = CoordinatorSettings.resolve({}, create_timeout_s=1.0)
    return outcome_of(lambda: init_distributed_environment(2, 0, method, backend="gloo", settings=settings))


@pytest.mark.parametrize(
    "method",
    [
        "file://relative/rendezvous",
        "file:relative",
        "file://host/directory",
        "file://",
        "file:///d?x",
        "file:///d#x",
    ],
)
def test_a_path_that_is_not_absolute_and_plain_is_refused(ranks2: RankPool, method: str) -> None:
    """Otherwise a part of the path would silently be read as a host, a query or a fragment."""
    found = ranks2.run(alone, method)[0]
    assert found["kind"] == "UsageError", found
    assert "file:///DIRECTORY" in found["text"]


def test_a_directory_that_cannot_be_made_is_named(ranks2: RankPool, tmp_path: Path) -> None:
    """If a file has the path of a parent, not even root can create the directory."""
    (tmp_path / "file").touch()
    found = ranks2.run(alone, f"file://{tmp_path}/file/rendezvous")[0]
    assert found["kind"] == "UsageError", found
    assert f"{tmp_path}/file/rendezvous" in found["text"]


def through(rank: int, world_size: int, directory: Path, path: str, run: int = 0) -> list[int]:
    settings = CoordinatorSettings.resolve({}, create_timeout_s=60.0)
    init_distributed_environment(world_size, rank, f"file://{path}", backend="gloo", settings=settings)
    group = get_world_group()
    ranks: list[int] = group.all_gather_object(rank)
    group.barrier()
    destroy_distributed_environment()
    meet(rank, range(world_size), directory, f"left-{run}")
    return ranks


@pytest.mark.guarantee("G32")
@pytest.mark.parametrize("there", ["nothing", "empty file", "stale store", "directory"])
def test_a_path_may_be_that_of_anything_torch_takes(ranks2: RankPool, tmp_path: Path, there: str) -> None:
    """What was there before is there after, unchanged, and we leave nothing of ours."""
    path = tmp_path / "meeting"
    if there == "empty file":
        path.touch()
    elif there == "stale store":
        path.write_bytes(b"\x05\0\0\0\0\0\0\0rank0\x01\0\0\0\0\0\0\x000")
    elif there == "directory":
        path.mkdir()
    before = path.read_bytes() if path.is_file() else path.exists()
    assert ranks2.run(through, str(path)) == [[0, 1]] * 2
    assert (path.read_bytes() if path.is_file() else path.exists()) == before
    assert list(tmp_path.rglob("*")) == ([path] if path.exists() else [])


@pytest.mark.guarantee("G32")
def test_a_temporary_file_is_a_path_as_any_other(ranks2: RankPool) -> None:
    """Users of torch pass the name of one, which they remove themselves."""
    with tempfile.NamedTemporaryFile() as file:
        assert ranks2.run(through, file.name) == [[0, 1]] * 2
        assert list(Path(file.name).parent.glob(f"{Path(file.name).name}*")) == [Path(file.name)]


def many_runs(rank: int, world_size: int, directory: Path, path: str) -> None:
    for run in range(10):
        assert through(rank, world_size, directory, path, run) == [0, 1]


def test_runs_follow_each_other_beside_a_file(ranks2: RankPool, tmp_path: Path) -> None:
    """Each makes and removes the directory beside the file, also while the next one comes."""
    path = tmp_path / "meeting"
    path.touch()
    ranks2.run(many_runs, str(path))
    assert list(tmp_path.iterdir()) == [path]


def killed_beside_a_file(rank: int, world_size: int, directory: Path, path: str) -> None:
    join(rank, world_size, directory, path)
    get_world_group().barrier()
    meet(rank, range(world_size), directory, "up")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.guarantee("G32")
def test_what_a_killed_run_leaves_beside_a_file_is_removed_by_the_next(tmp_path: Path) -> None:
    """The file alone says nothing of the run, so the next one finds and removes what we made."""
    path = tmp_path / "meeting"
    path.touch()
    run_ranks(killed_beside_a_file, 2, str(path), expect_dead=[0, 1])
    assert len(list(tmp_path.iterdir())) == 2
    assert run_ranks(through, 2, str(path)) == [[0, 1]] * 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_removed_after_rank_0_saw_it_is_still_a_place_to_meet(tmp_path: Path) -> None:
    """The name of a temporary file may be gone before the last rank comes."""
    path = tmp_path / "meeting"
    path.touch()
    meetings = [DirectoryRendezvous(path, rank, 2) for rank in range(2)]
    meetings[0].join(5.0)
    path.unlink()
    meetings[1].join(5.0)
    for meeting in meetings:
        meeting.leave()
    assert list(tmp_path.iterdir()) == []


def refused_at_once(rank: int, world_size: int, directory: Path, path: str) -> dict[str, Any]:
    return join(rank, world_size, directory, path, create_timeout_s=30.0)


@pytest.mark.guarantee("G32")
def test_a_path_of_another_kind_is_refused_on_every_rank(ranks2: RankPool, tmp_path: Path) -> None:
    """No rank waits for one that could not use the path."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for found in ranks2.run(refused_at_once, str(path)):
        assert found["kind"] == "UsageError", found
        assert str(path) in found["text"]
        assert found["seconds"] < 15.0


def test_a_directory_beside_a_file_that_another_user_owns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user who knows the name of the file could have made it."""
    path = tmp_path / "meeting"
    path.touch()
    (tmp_path / "meeting.group_coordinator").mkdir()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(UsageError, match="belongs to another user"):
        DirectoryRendezvous(path, 0, 2).join(0.1)


# --- different sizes ------------------------------------------------------------------------------------------


def different_sizes(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    found = join(rank, 2 + rank, directory, create_timeout_s=1.5)
    meet(rank, range(world_size), directory, "end")
    return found


def test_different_world_sizes_raise_at_once(ranks2: RankPool) -> None:
    """Rank 1 expects a larger world and raises with both numbers. Rank 0 waits for it until its deadline."""
    first, second = ranks2.run(different_sizes)
    assert second["kind"] == "UsageError", second
    assert "world of 2" in second["text"]
    assert "rank 1 with 3" in second["text"]
    assert (first["kind"], first["missing"]) == ("CommTimeoutError", [1])


def test_a_larger_world_waits_until_a_smaller_one_has_left(tmp_path: Path) -> None:
    """Neither ranks that have left nor new ranks take the last generation for the present one."""
    old = [DirectoryRendezvous(tmp_path, rank, 2) for rank in range(2)]
    for meeting in old:
        meeting.join(5.0)
    old[1].leave()
    for rank in (1, 2):
        with pytest.raises(CommTimeoutError, match="a world of 2 ranks, and some have not left it yet"):
            DirectoryRendezvous(tmp_path, rank, 3).join(0.05)
    old[0].leave()
    new = [DirectoryRendezvous(tmp_path, rank, 3) for rank in range(3)]
    for meeting in new:
        meeting.join(5.0)
    # The same holds for a smaller world after a larger one.
    with pytest.raises(CommTimeoutError, match="a world of 3 ranks, and some have not left it yet"):
        DirectoryRendezvous(tmp_path, 1, 2).join(0.05)
    for meeting in new:
        meeting.leave()
    assert list(tmp_path.iterdir()) == []


def twins(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    found = join(min(rank, 1), 3, directory, create_timeout_s=1.5)
    meet(rank, range(world_size), directory, "end")
    return found


def test_two_processes_with_one_rank_do_not_both_join(ranks4: RankPool) -> None:
    """A rank can be claimed once, and no process goes on as if the world were complete."""
    assert {each["kind"] for each in ranks4.run(twins)} == {"CommTimeoutError"}


# --- hostile directories ------------------------------------------------------------------------------------


def plant(directory: Path) -> Path:
    """Create a generation with a live owner, as rank 0 does, and return it."""
    rendezvous = DirectoryRendezvous(directory / "rendezvous", 0, 2)
    rendezvous.join(1.0)
    return next((directory / "rendezvous").glob("generation-*"))


def join_planted(rank: int, world_size: int, directory: Path, how: str) -> dict[str, Any]:
    generation = plant(directory)
    if how == "symlink":
        target = directory / "elsewhere"
        generation.rename(target)
        generation.symlink_to(target)
    elif how == "mode":
        generation.chmod(0o755)
    elif how == "owner":
        own = os.getuid()
        os.getuid = lambda: own + 1
    return join(1, 2, directory, create_timeout_s=1.0)


@pytest.mark.parametrize("how", ["symlink", "mode", "owner"])
def test_a_generation_that_another_user_may_write_is_refused(how: str) -> None:
    """A link, a directory that others can enter, and a directory of another user are not trusted."""
    (found,) = run_ranks(join_planted, 1, how)
    assert found["kind"] == "UsageError", found
    assert "0700" in found["text"]


def join_by_pointer(rank: int, world_size: int, directory: Path, text: str) -> dict[str, Any]:
    generation = plant(directory)
    elsewhere = directory / "generation-0123456789abcdef"
    generation.rename(elsewhere)
    (directory / "rendezvous" / "current").write_text(text.format(elsewhere=elsewhere))
    return join(1, 2, directory, create_timeout_s=1.0)


@pytest.mark.parametrize(
    "text",
    ["../generation-0123456789abcdef", "{elsewhere}", "", "generation-0123456789abcdef\n", "x" * 100_000],
)
def test_a_pointer_leads_only_into_its_own_directory(text: str) -> None:
    """A pointer with any other content counts as none."""
    (found,) = run_ranks(join_by_pointer, 1, text)
    assert (found["kind"], found["missing"]) == ("CommTimeoutError", [0]), found


def rank_0_with_planted_pointer(rank: int, world_size: int, directory: Path) -> list[Any]:
    victim = directory / "victim"
    if rank == 0:
        victim.write_text("precious")
        (directory / "rendezvous").mkdir()
        (directory / "rendezvous" / "current").symlink_to(victim)
    meet(rank, range(world_size), directory, "planted")
    with world(rank, world_size, directory) as group:
        return [group.all_gather_object(rank), victim.read_text()]


def test_a_planted_pointer_is_replaced_and_not_followed(ranks2: RankPool) -> None:
    """Rank 0 renames its pointer over a link there, and the target of the link is not written."""
    assert ranks2.run(rank_0_with_planted_pointer) == [[[0, 1], "precious"]] * 2


def leftovers_that_are_none(rank: int, world_size: int, directory: Path) -> list[Any]:
    kept = directory / "kept"
    rendezvous = directory / "rendezvous"
    if rank == 0:
        kept.mkdir()
        (kept / "file").touch()
        rendezvous.mkdir()
        (rendezvous / "notes.txt").touch()
        (rendezvous / f"generation-{secrets.token_hex(8)}").symlink_to(kept)
        (rendezvous / "generation-of-something-else").mkdir()
    meet(rank, range(world_size), directory, "planted")
    with world(rank, world_size, directory) as group:
        ranks = group.all_gather_object(rank)
    meet(rank, range(world_size), directory, "left")
    return [ranks, (kept / "file").exists(), (rendezvous / "notes.txt").exists()]


def test_other_files_and_links_are_left_alone(ranks2: RankPool) -> None:
    """Files and links in the directory that are no generation of ours survive, and the links' targets too."""
    assert ranks2.run(leftovers_that_are_none) == [[[0, 1], True, True]] * 2


def test_a_rank_that_leaves_unlinks_its_store_before_the_directory_is_removed(tmp_path: Path) -> None:
    """A rank that leaves removes the path by which it opened the store. No other rank uses that path.

    Otherwise a FileStore that is collected while another rank removes its directory would wait for the file.
    """
    meetings = [DirectoryRendezvous(tmp_path, rank, 2) for rank in range(2)]
    stores = [meeting.join(5.0) for meeting in meetings]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    (generation,) = tmp_path.glob("generation-*")
    links = {path.name.rsplit("-", 1)[0] for path in generation.glob("store-*")}
    assert links == {"store-0", "store-1"}
    meetings[0].leave()
    assert [path.name.rsplit("-", 1)[0] for path in generation.glob("store-*")] == ["store-1"]
    del stores[0]
    assert stores[0].get("key") == b"value"
    meetings[1].leave()
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_taken_is_found_without_opening_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At that moment the last generation may be removed, and a store waits minutes for a file that is gone."""
    first, second = DirectoryRendezvous(tmp_path, 0, 2), DirectoryRendezvous(tmp_path, 1, 2)
    first.join(5.0)
    second.join(5.0)

    def never(self: DirectoryRendezvous, generation: Path) -> None:
        raise AssertionError(generation)

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryRendezvous, "_open", never)
        with pytest.raises(CommTimeoutError, match="already joined the last generation as rank 1"):
            DirectoryRendezvous(tmp_path, 1, 2).join(0.05)
    first.leave()
    second.leave()
    assert list(tmp_path.iterdir()) == []


# --- paths that cannot be used ------------------------------------------------------------------------------------


@pytest.mark.guarantee("G32")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_path_that_cannot_be_looked_at_is_refused_at_once(tmp_path: Path, rank: int) -> None:
    """Ranks other than 0 raised the kernel's error as it is, or waited for rank 0, which had been refused."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "below", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(UsageError, match="cannot use .* for the rendezvous"):
            DirectoryRendezvous(path, rank, 2).join(60.0)
    refused = PermissionError(errno.EACCES, "Permission denied")
    with (
        mock.patch.object(Path, "stat", side_effect=refused),
        pytest.raises(UsageError, match="Permission denied"),
    ):
        DirectoryRendezvous(tmp_path / "closed" / "run", rank, 2).join(60.0)


@pytest.mark.guarantee("G32")
def test_a_directory_whose_name_takes_no_suffix_is_a_place_to_meet(tmp_path: Path) -> None:
    """The name beside which a file's directory would lie is too long, or there is none: `file:///` has no name."""
    path = tmp_path / ("x" * 250)
    second = DirectoryRendezvous(path, 1, 2)
    with pytest.raises(CommTimeoutError, match="the directory held no generation"):
        second.join(0.0)
    first = DirectoryRendezvous(path, 0, 2)
    first.join(10.0)
    second.join(10.0)
    second.leave()
    first.leave()
    assert not path.exists()
    with pytest.raises(CommTimeoutError, match="the directory held no generation"):
        DirectoryRendezvous(Path("/"), 1, 2).join(0.0)
