"""Groups of a world: their members, their lifetime, and what ranks must agree on before a group exists."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from coordinator import (
    CapabilityError,
    GroupCoordinator,
    ParallelGroups,
    ParallelLayout,
    UsageError,
    current_groups,
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from coordinator.bootstrap import creation
from coordinator.bootstrap.agreement.agreeing import LINGER_S
from coordinator.bootstrap.agreement.views import Views
from coordinator.bootstrap.group_builder import GroupBuilder
from coordinator.bootstrap.group_parts import GroupParts
from coordinator.bootstrap.methods.directory import DirectoryRendezvous
from coordinator.groups import DIMENSIONS
from device_comm.cpu import shared_memory
from tests.engines import refusal, works
from tests.harness import RankPool
from tests.worlds import meet, new_group, world

LAYOUTS = {
    "tp2pp2": {"tensor": 2, "pipeline": 2},
    "tp4": {"tensor": 4},
    "pp4": {"pipeline": 4},
    "dp4": {"data": 4},
    "dp2tp2": {"data": 2, "tensor": 2},
    "dp2pp2": {"data": 2, "pipeline": 2},
    "cp2tp2": {"context": 2, "tensor": 2},
    "cp2pp2": {"context": 2, "pipeline": 2},
    "dp2tp2ep2": {"data": 2, "tensor": 2, "expert": 2},
    "tp4dcp2": {"tensor": 4, "decode_context": 2},
    "cp2tp2dcp4": {"context": 2, "tensor": 2, "decode_context": 4},
    "tp2xdp2": {"tensor": 2, "external_data": 2},
}


# --- layouts ----------------------------------------------------------------------------------------------------


def every_layout(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone:
        for sizes in LAYOUTS.values():
            layout = ParallelLayout(**sizes)
            groups = ParallelGroups.create(layout)
            by_name = groups.by_name()
            assert list(by_name) == list(DIMENSIONS)
            assert groups.world is everyone
            for name, group in by_name.items():
                assert tuple(group.ranks) == layout.group_of(name, rank)  # type: ignore[arg-type]
                assert group.rank_in_group == layout.coordinates(rank)[name]  # type: ignore[index]
                assert group.unique_name.partition(":")[0] == name
            assert len(set(by_name.values())) == len(DIMENSIONS)
            for group in by_name.values():
                works(group)
            groups.destroy()
            groups.destroy()
            assert {group for group in by_name.values() if "destroyed" not in repr(group)} == {everyone}
            works(everyone)


def test_every_layout_gives_groups_that_work(ranks4: RankPool) -> None:
    """Groups have the layout's members, each dimension has one of its own with its name, and each plane works."""
    ranks4.run(every_layout)


def no_world_group(rank: int, world_size: int, directory: Path) -> None:
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        with ParallelGroups.create(
            ParallelLayout(tensor=2, pipeline=2), local_rank=0, backend="gloo"
        ) as groups:
            assert groups.owns_world
            assert [group.unique_name for group in groups.by_name().values()] == [
                f"{name}:0" for name in DIMENSIONS
            ]
            works(groups.world)
            works(groups.tp)
            kept = groups.world
        assert "destroyed" in repr(kept)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_groups_can_be_created_on_a_foreign_world(ranks4: RankPool) -> None:
    """If only torch.distributed is initialised, the record creates and destroys its own world group."""
    ranks4.run(no_world_group)


def teardown_order(rank: int, world_size: int, directory: Path) -> list[str]:
    destroyed: list[str] = []
    real = GroupCoordinator.destroy

    def recording(group: GroupCoordinator) -> None:
        destroyed.append(group.unique_name.partition(":")[0])
        real(group)

    with mock.patch.object(GroupCoordinator, "destroy", recording):
        init_distributed_environment(world_size, rank, f"file://{directory}/meet", backend="gloo")
        initialize_model_parallel(2, 2)
        destroy_distributed_environment()
        destroy_distributed_environment()
    return destroyed


def test_groups_are_destroyed_in_reverse_order_of_creation(ranks4: RankPool) -> None:
    """Each group is destroyed once, and the world is the last one."""
    parts, others = ["sdp", "rdp"], ["ep", "dp", "pp", "cp", "dcp", "tp"]
    assert ranks4.run(teardown_order) == [[*parts, *others, "world"]] * 4


def unsorted(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory), GroupCoordinator([[3, 1], [2, 0]], rank, "gloo", True) as group:
        assert group.ranks == ([3, 1] if rank in (1, 3) else [2, 0])
        works(group)
        own = torch.tensor([rank])
        assert group.all_gather(own).tolist() == group.ranks
        assert group.broadcast(own.clone(), src=0).item() == group.first_rank
        gathered = group.gather(own, dst=1)
        assert gathered is None if group.is_first_rank else gathered.tolist() == group.ranks  # type: ignore[union-attr]
        assert group.reduce_scatter(torch.tensor([1, 10]) * rank).item() == sum(group.ranks) * (
            1 if group.is_first_rank else 10
        )
        dist.broadcast(own, src=group.last_rank, group=group.cpu_group)
        assert own.item() == group.last_rank
        assert dist.get_process_group_ranks(group.device_group) == group.ranks


def test_a_group_keeps_the_order_of_its_rank_list(ranks4: RankPool) -> None:
    """A rank list may be in any order. Gathers, parts and roots follow that order on every plane."""
    ranks4.run(unsorted)


def recreated(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory):
        for _ in range(5):
            initialize_model_parallel(2, 2)
            works(get_tp_group())
            destroy_model_parallel()
        # Ranks may hold different numbers of torch's groups here.
        alone = dist.new_group([0], backend="gloo")
        with GroupCoordinator([[0, 1], [2, 3]], rank, "gloo", True) as group:
            works(group)
        if rank == 0:
            dist.destroy_process_group(alone)


def test_groups_can_be_destroyed_and_created_again(ranks4: RankPool) -> None:
    """Groups of equal ranks can follow each other, whatever other groups a rank holds meanwhile."""
    ranks4.run(recreated)


def brief(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory):
        for _ in range(10):
            GroupCoordinator([[0, 1, 2, 3]], rank, "gloo", True).destroy()
            GroupCoordinator([[0, 1], [2, 3]], rank, "gloo", True).destroy()


def test_a_group_can_be_destroyed_as_soon_as_it_exists(ranks4: RankPool) -> None:
    """No rank gets a group before all ranks have joined it; the first to destroy it disturbs no creation."""
    ranks4.run(brief)


def again_and_again(rank: int, world_size: int, directory: Path) -> None:
    for _ in range(5):
        with world(rank, world_size, directory) as group:
            works(group)
    meet(rank, range(world_size), directory, "left")
    assert list((directory / "rendezvous").glob("*")) == []


def test_a_directory_serves_one_world_after_the_other(ranks4: RankPool) -> None:
    """Fast ranks start the next world while others still leave the last one. Nothing is left in the end."""
    ranks4.run(again_and_again)


def test_leaving_a_world_spares_the_next_one(tmp_path: Path) -> None:
    """A rank that leaves late removes its own generation, and not the pointer to the next one."""
    first, second = (DirectoryRendezvous(tmp_path, 0, 1) for _ in range(2))
    first.join(1.0)
    second.join(1.0)
    pointer = (tmp_path / "current").read_text()
    first.leave()
    assert (tmp_path / "current").read_text() == pointer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", pointer]
    second.leave()
    assert list(tmp_path.iterdir()) == []


# --- which groups are current -----------------------------------------------------------------------------------


def in_thread(call: Callable[[], Any]) -> Any:
    """Run `call` on another thread; return its result or raise its error."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def current(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory):
        assert not model_parallel_is_initialized()
        assert "initialize_model_parallel" in refusal(get_tp_group)
        initialize_model_parallel(2, 2)
        default = current_groups()
        draft = ParallelGroups.create(ParallelLayout(tensor=2, data=2))
        assert draft.tp.ranks == default.tp.ranks
        with draft:
            assert current_groups() is draft
            assert get_tp_group() is draft.tp is not default.tp
            assert in_thread(current_groups) is default
            with default.as_current(), draft.as_current(), default.as_current() as inner:
                assert inner is default
                assert get_tp_group() is default.tp
            assert current_groups() is draft
            refusal(lambda: initialize_model_parallel(2, 2))
            works(get_tp_group())
        assert current_groups() is default
        assert "destroyed" in repr(draft.tp)
        works(default.tp)
        with contextlib.suppress(KeyError), default.as_current():
            raise KeyError
        destroy_model_parallel()
        assert not model_parallel_is_initialized()
        assert "destroyed" in repr(default.pp)
        works(get_world_group())


@pytest.mark.guarantee("G15")
def test_a_second_model_has_groups_of_its_own(ranks4: RankPool) -> None:
    """They are current inside their context. Other threads see the default, and the context destroys only them."""
    ranks4.run(current)


def cleans_up(rank: int, world_size: int, directory: Path) -> None:
    made: list[GroupParts] = []
    real = GroupBuilder.connect

    def failing(self: Any, *args: Any) -> GroupParts:
        if self.health.name.startswith("pp"):
            # A rank that is interrupted earlier ends the creation of those that still wait for all to have the memory.
            meet(rank, range(world_size), directory, "connects")
            raise KeyboardInterrupt
        made.append(real(self, *args))
        return made[-1]

    with world(rank, world_size, directory) as everyone:
        with mock.patch.object(GroupBuilder, "connect", failing), pytest.raises(KeyboardInterrupt):
            ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2))
        assert [parts.health.name.partition(":")[0] for parts in made] == ["tp", "dcp", "cp"]
        assert all(parts.health.is_closed for parts in made)
        works(everyone)
        with ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2)) as groups:
            works(groups.tp)


def test_what_was_created_before_a_failure_is_destroyed(ranks4: RankPool) -> None:
    """If one group cannot be created, the earlier ones are released, the given world stays, and a retry works."""
    ranks4.run(cleans_up)


def wrong_world(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone:
        for ranks in ([1, 0, 2, 3], [0, 1, 2]):
            part = everyone.create_subgroup(ranks)
            if part is not None:
                with part, pytest.raises(UsageError, match="all ranks"):
                    ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2), world=part)
        made: list[Any] = []
        real = GroupCoordinator._create_together

        def watched(groups: list[Any], *args: Any, **options: Any) -> None:
            real(groups, *args, **options)
            made.extend(groups)

        with (
            mock.patch.object(GroupCoordinator, "_create_together", watched),
            mock.patch.object(ParallelGroups, "__post_init__", side_effect=UsageError("no")),
            pytest.raises(UsageError, match="no"),
        ):
            ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2))
        assert made
        assert all(group._health.is_closed for group in made)
        works(everyone)


def test_a_group_of_some_ranks_is_refused_as_a_world(ranks4: RankPool) -> None:
    """It is refused before anything is created. If a record is refused, its groups are destroyed."""
    ranks4.run(wrong_world)


def pidfds() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return found


def unreachable(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone:
        before, start = pidfds(), time.monotonic()
        refusal = CapabilityError("loopback", requirement="an address")
        with (
            mock.patch.object(Views, "listening_address", side_effect=refusal),
            pytest.raises(CapabilityError, match="loopback") as caught,
        ):
            new_group(everyone)
        # A rank whose process ends now may take the store with it, in which the others still look for the reason.
        assert time.monotonic() - start >= LINGER_S
        assert pidfds() == before
        del caught
        works(everyone)


def test_a_creation_that_fails_stops_watching_the_other_processes(ranks2: RankPool) -> None:
    """The group has opened a descriptor for each other process. Without an address it fails and closes them."""
    ranks2.run(unreachable)


def lacks_memory(rank: int, world_size: int, directory: Path, culprit: int) -> None:
    """Let rank `culprit` fail to create its group's memory, or to map it if it is not the first rank."""
    with world(rank, world_size, directory) as everyone:
        refused = (None, None, shared_memory._Offer(failure="no room"))
        no_room = CapabilityError("no room", requirement="memory")
        lacks: dict[str, dict[str, Any]] = {
            "_offer": {"return_value": refused},
            "_take": {"side_effect": no_room},
        }
        where = "_take" if culprit else "_offer"
        patch = (
            mock.patch.object(shared_memory, where, **lacks[where])
            if rank == culprit
            else contextlib.nullcontext()
        )
        with patch, pytest.raises(CapabilityError, match="no room"):
            ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2))
        works(everyone)
        with ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2)) as groups:
            works(groups.tp)
            works(groups.pp)


@pytest.mark.parametrize("culprit", [0, 3])
def test_memory_that_one_rank_cannot_have_fails_the_creation_on_all(ranks4: RankPool, culprit: int) -> None:
    """It also fails on ranks that share no group with that rank. The world stays, and a retry works."""
    ranks4.run(lacks_memory, culprit)


def lacks(rank: int, world_size: int, directory: Path, what: str) -> None:
    """Let the first rank fail to offer its group's memory: for lack of a system call, or of address space."""
    no_pidfd = CapabilityError("pidfd_open failed", requirement="the system call pidfd_open")
    refused, text = {
        "pidfd": (mock.patch.object(shared_memory, "Handover", side_effect=no_pidfd), "pidfd_open failed"),
        "mapping": (
            mock.patch("mmap.mmap", side_effect=OSError(12, "Cannot allocate memory")),
            "address space.*Cannot allocate",
        ),
    }[what]
    with world(rank, world_size, directory) as everyone:
        with refused if rank == 0 else contextlib.nullcontext(), pytest.raises(CapabilityError, match=text):
            new_group(everyone)
        works(everyone)


@pytest.mark.parametrize("what", ["pidfd", "mapping"])
def test_memory_that_cannot_be_offered_fails_the_creation_on_all(ranks2: RankPool, what: str) -> None:
    """The other rank hears why, and does not wait for an offer until its deadline."""
    ranks2.run(lacks, what)


def comes_late(rank: int, world_size: int, directory: Path) -> None:
    """Rank 0 has no memory. Rank 3 comes for rank 2's when rank 2, which meets rank 0 elsewhere, has given up."""
    take = shared_memory._take

    def late_take(*arguments: Any) -> Any:
        time.sleep(0.5)
        return take(*arguments)

    with world(rank, world_size, directory) as everyone, contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(creation, "LINGER_S", 0.0))
        if rank == 0:
            refused = (None, None, shared_memory._Offer(failure="no room"))
            patches.enter_context(mock.patch.object(shared_memory, "_offer", return_value=refused))
        if rank == 3:
            patches.enter_context(mock.patch.object(shared_memory, "_take", late_take))
        with pytest.raises(CapabilityError, match="no room"):
            ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2))
        patches.close()
        works(everyone)


def test_a_rank_that_comes_too_late_for_the_memory_reads_why_it_is_gone(ranks4: RankPool) -> None:
    """The rank that offered it published the reason, which another rank gave it, and went."""
    ranks4.run(comes_late)


def breakdown(rank: int, world_size: int, directory: Path) -> None:
    layout = ParallelLayout(tensor=2, pipeline=2)
    with world(rank, world_size, directory) as everyone, ParallelGroups.create(layout) as groups:
        assert everyone.creation.rendezvous_s > 0
        assert everyone.creation.together == (everyone.unique_name,)
        report = groups.startup_report()
        assert [each.name for each in report.groups] == [f"{name}:0" for name in DIMENSIONS]
        tp, pp = groups.tp.creation, groups.pp.creation
        assert tp.together == pp.together == tuple(f"{name}:0" for name in DIMENSIONS[1:])
        assert tp.agreement_s == pp.agreement_s > 0
        assert tp.shared_memory_s > 0
        assert tp.queue_s > 0
        assert pp.queue_s == pp.rendezvous_s == 0
        assert groups.cp.creation.shared_memory_s == 0
        world_and_tp = everyone.creation.agreement_s + tp.agreement_s
        assert report.phases["agreement"] == pytest.approx(world_and_tp)
        assert report.total_s == pytest.approx(sum(report.phases.values()))
        assert "tp:0 (2 ranks): " in str(report)
        assert "agreement" in str(tp)


def test_each_group_reports_the_time_of_its_creation(ranks4: RankPool) -> None:
    """The report has phases. Groups that were created together share the agreement, which counts once."""
    ranks4.run(breakdown)


# --- the functions that engines call ----------------------------------------------------------------------------


def initialised_twice(rank: int, world_size: int, directory: Path) -> list[str]:
    where = f"file://{directory}/meet"
    texts = [refusal(get_world_group), refusal(lambda: initialize_model_parallel(2))]
    init_distributed_environment(world_size, rank, where, backend="gloo")
    try:
        everyone = get_world_group()
        init_distributed_environment(world_size, rank, where, backend="gloo")
        init_distributed_environment()
        assert get_world_group() is everyone
        texts.append(refusal(lambda: init_distributed_environment(3, rank, where)))
        texts.append(refusal(lambda: init_distributed_environment(2, 1 - rank, where)))
        texts.append(refusal(lambda: ensure_model_parallel_initialized(3, 1)))
        ensure_model_parallel_initialized(2, 1)
        ensure_model_parallel_initialized(2, 1)
        groups = current_groups()
        texts.append(refusal(lambda: initialize_model_parallel(2)))
        texts.append(refusal(lambda: ensure_model_parallel_initialized(1, 2)))
        texts.append(refusal(lambda: ensure_model_parallel_initialized(2, 1, 2)))
        assert current_groups() is groups
        works(groups.tp)
        destroy_model_parallel()
        destroy_model_parallel()
        ensure_model_parallel_initialized(1, 2)
        assert current_groups().pp.world_size == 2
        works(current_groups().pp)
    finally:
        destroy_distributed_environment()
    refusal(get_world_group)
    init_distributed_environment(world_size, rank, where, backend="gloo")
    works(get_world_group())
    destroy_distributed_environment()
    return texts


def test_initialising_twice_is_refused_unless_nothing_changes(ranks2: RankPool) -> None:
    """`ensure` compares the sizes and `initialize` refuses. After `destroy`, everything can be set up again."""
    for texts in ranks2.run(initialised_twice):
        assert "init_distributed_environment" in texts[0]
        assert "world_size=3, but torch.distributed is initialised with world_size 2" in texts[2]
        assert "exist already" in texts[5]
        assert "the tensor parallel group has 2 ranks, expected 1" in texts[6]
        assert "the prefill context parallel group has 1 ranks, expected 2" in texts[7]


def foreign(rank: int, world_size: int, directory: Path) -> None:
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        refusal(lambda: init_distributed_environment(world_size + 1, rank, backend="gloo"))
        init_distributed_environment(world_size, rank, backend="gloo")
        initialize_model_parallel(2)
        works(get_tp_group())
        destroy_distributed_environment()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world_size
    finally:
        dist.destroy_process_group()


@pytest.mark.guarantee("G11")
def test_an_initialised_torch_distributed_is_used_and_left_alone(ranks2: RankPool) -> None:
    """The caller of `init_process_group` has to destroy the process group."""
    ranks2.run(foreign)
