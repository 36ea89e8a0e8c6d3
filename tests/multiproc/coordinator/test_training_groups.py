"""Groups for training frameworks: a root and sizes, hybrid sharding, sub-groups, flags, sums and device meshes."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from coordinator import (
    DisagreementError,
    ParallelGroups,
    ParallelLayout,
    UsageError,
    create_fsdp_groups,
    create_parallel_groups,
    get_current_groups,
    maybe_get_current_groups,
)
from tests.engines import works
from tests.harness import RankPool
from tests.worlds import world

# --- sizes and sharding ---------------------------------------------------------------------------------------


def sizes(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as root:
        row, column = rank // 2, rank % 2
        with create_parallel_groups(root, tp_size=2) as groups:
            assert groups.root is root
            assert groups.tp.ranks == [2 * row, 2 * row + 1]
            assert groups.dp.ranks == groups.rdp.ranks == [column, column + 2]
            assert groups.sdp.ranks == groups.pp.ranks == [rank]
            works(groups.dp)
        works(root)
        with ParallelGroups.from_sizes(tensor_parallel_size=2, shard_size=None) as groups:
            assert groups.sdp.ranks == groups.dp.ranks
            assert groups.rdp.ranks == [rank]
        for tp_size, error in ((3, "cannot be divided"), (0, "at least 1"), (8, "cannot be divided")):
            with pytest.raises(UsageError, match=error):
                create_parallel_groups(root, tp_size=tp_size)
        with pytest.raises(UsageError, match="does not divide data=4"):
            ParallelGroups.from_sizes(shard_size=3)
        part = root.create_subgroup([2, 3])
        if part is not None:
            with part, pytest.raises(UsageError, match="all ranks"):
                create_parallel_groups(part)


def sharding(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as root:
        plain = create_parallel_groups(root)
        assert plain.dp.ranks == plain.rdp.ranks == root.ranks
        with create_fsdp_groups(plain, 2) as groups:
            assert groups.sdp.ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert groups.rdp.ranks == [rank % 2, rank % 2 + 2]
            assert groups.dp is plain.dp
            assert groups.tp is plain.tp
            assert groups.layout == ParallelLayout(data=4, shard=2)
            works(groups.sdp)
            works(groups.rdp)
            for size in (1, 0, 3, True, "2"):
                with pytest.raises(UsageError):
                    create_fsdp_groups(groups, size)  # type: ignore[arg-type]
            with create_fsdp_groups(groups) as full:
                assert full.dp is groups.dp
                assert full.sdp.ranks == full.dp.ranks
                assert full.rdp.ranks == [rank]
                works(full.sdp)
        works(root)


def resharding(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as root:
        plain = create_parallel_groups(root)
        first = create_fsdp_groups(plain, 2)
        last = create_fsdp_groups(first)
        again = create_fsdp_groups(last, 2)
        assert again.rdp is not first.rdp
        again.destroy()
        made = (first.rdp, first.sdp, again.rdp, again.sdp, plain.tp)
        assert [group._health.is_closed for group in made] == [True] * 5
        works(root)
        with create_parallel_groups(root) as plain:
            # Rank 0 needs no new group, because it asks for the sharding that it has.
            with pytest.raises(DisagreementError, match="shard"):
                plain.with_sharding(2 if rank else 1)
            works(plain.dp)
            with create_fsdp_groups(plain) as full:
                works(full.sdp)


def test_sharding_anew_leaks_nothing_and_is_agreed_on(ranks4: RankPool) -> None:
    """The last record destroys the pairs that it replaced. Ranks that shard differently all learn of it."""
    ranks4.run(resharding)


def test_a_root_and_a_size_make_the_groups_that_fairseq2_makes(ranks4: RankPool) -> None:
    """The groups have the right ranks, the root stays, and every rank refuses sizes that do not divide the world."""
    ranks4.run(sizes)


def test_hybrid_sharding_replaces_two_groups_and_keeps_the_others(ranks4: RankPool) -> None:
    """Neighbours shard, and ranks at the same position replicate. None shards over all ranks."""
    ranks4.run(sharding)


# --- sub-groups -----------------------------------------------------------------------------------------------


def subgroups(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as root:
        for wrong in ([4], [-1], [0, 0], [], [True], ["0"], "01", 3):
            with pytest.raises(UsageError):
                root.create_subgroup(wrong)  # type: ignore[arg-type]
        part = root.create_subgroup([3, 1])
        assert (part is None) == (rank in (0, 2))
        if part is not None:
            assert part.ranks == [3, 1]
            assert part.unique_name == "world.0@0/sub:0"
            works(part)
            # A source is a rank in the group: rank 0 of the part is rank 3 of the world.
            assert part.broadcast_flag(rank == 3) is True
            assert part.broadcast_flag(rank == 3, 1) is False
            assert part.broadcast_object(rank, 1) == 1
            for source in (2, 3, -1):
                with pytest.raises(UsageError, match="ranks in this group go from 0 to 1"):
                    part.broadcast_flag(True, source)
            # The list has ranks of the part, not of the world. A part of a part needs no rank outside of it.
            inner = part.create_subgroup([1])
            assert (inner is None) == (rank == 3)
            if inner is not None:
                assert inner.ranks == [1]
                inner.destroy()
            part.destroy()
        with pytest.raises(DisagreementError):
            root.create_subgroup([0, 1] if rank else [0, 2])
        works(root)


def test_a_sub_group_has_ranks_of_the_group(ranks4: RankPool) -> None:
    """This holds for bounds, order and sources. Other ranks get None, and ranks that ask for different parts raise."""
    ranks4.run(subgroups)


# --- flags, sums, lists ---------------------------------------------------------------------------------------


def small_things(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as root:
        assert [root.broadcast_flag(rank == 2, source) for source in range(4)] == [False, False, True, False]
        assert root.all_sum(rank).item() == 6
        assert root.all_sum(rank).dtype is torch.int64
        assert root.all_sum(1 << 60).item() == 1 << 62
        assert root.all_sum(0.1 if rank == 3 else 1).item() == 3.1
        assert root.all_sum(0.5).dtype is torch.float64
        with pytest.raises(UsageError, match="64 bits"):
            root.all_sum(1 << 62)
        for wrong in (True, "1", None, 1j):
            with pytest.raises(UsageError, match="int or a float"):
                root.all_sum(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="a bool"):
            root.broadcast_flag(1)  # type: ignore[arg-type]
        for shape in ((), (0,), (3,), (2, 3)):
            own = torch.full(shape, rank, dtype=torch.float32)
            gathered = root.all_gather_to_list(own)
            assert [each.shape for each in gathered] == [own.shape] * 4
            assert all(bool((each == index).all()) for index, each in enumerate(gathered))
            into = [torch.empty(shape) for _ in range(4)]
            assert all(a is b for a, b in zip(root.all_gather_to_list(own, into), into, strict=True))
            assert all(bool((each == index).all()) for index, each in enumerate(into))
        for outputs in ([own] * 3, [own] * 5, [own[:1]] * 4, [own.double()] * 4, [1] * 4):
            with pytest.raises(UsageError):
                root.all_gather_to_list(own, outputs)  # type: ignore[arg-type]
        works(root)


def test_flags_sums_and_lists(ranks4: RankPool) -> None:
    """Flags come from each source, sums are exact, lists have any shape. Wrong values raise, and the group goes on."""
    ranks4.run(small_things)


# --- the current groups of a thread ---------------------------------------------------------------------------


def current(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory):
        outer = ParallelGroups.from_sizes(tensor_parallel_size=2, use_message_queue_broadcaster=False)
        inner = ParallelGroups.from_sizes(tensor_parallel_size=2, use_message_queue_broadcaster=False)
        assert maybe_get_current_groups() is None
        with pytest.raises(UsageError, match="no current groups"):
            get_current_groups()
        elsewhere: list[Any] = []
        with outer:
            with inner:
                assert get_current_groups() is inner
                thread = threading.Thread(target=lambda: elsewhere.append(maybe_get_current_groups()))
                thread.start()
                thread.join()
            assert get_current_groups() is outer
        assert maybe_get_current_groups() is None
        assert elsewhere == [None]


def test_the_current_groups_are_those_of_the_thread(ranks2: RankPool) -> None:
    """They nest and are restored in reverse. A thread that entered none has none."""
    ranks2.run(current)


# --- device meshes --------------------------------------------------------------------------------------------


def mesh_out(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory), ParallelGroups.from_sizes(tensor_parallel_size=2) as groups:
        before = len(dist.distributed_c10d._world.pg_map)
        mesh = groups.device_mesh
        assert mesh is groups.device_mesh
        assert mesh.mesh_dim_names == ("dp", "tp")
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert mesh.get_coordinate() == (rank // 2, rank % 2)
        assert mesh.get_group("tp") is groups.tp.device_group
        assert mesh["dp"].get_group() is groups.dp.device_group
        assert len(dist.distributed_c10d._world.pg_map) == before + 2
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=mesh.get_group("dp"))
        assert total.item() == rank % 2 * 2 + 2
        sharded = create_fsdp_groups(ParallelGroups.from_sizes(), 2)
        assert sharded.device_mesh.mesh_dim_names == ("rdp", "sdp")
        assert sharded.device_mesh.get_group("sdp") is sharded.sdp.device_group
        sharded.destroy()


def mesh_in(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        before = len(dist.distributed_c10d._world.pg_map)
        with ParallelGroups.from_device_mesh(mesh) as groups:
            assert groups.device_mesh is mesh
            assert groups.layout == ParallelLayout(data=2, tensor=2, shard=2)
            assert groups.tp.ranks == dist.get_process_group_ranks(mesh.get_group("tp"))
            assert groups.sdp.ranks == dist.get_process_group_ranks(mesh.get_group("dp_shard"))
            works(groups.tp)
        assert len(dist.distributed_c10d._world.pg_map) == before
        for ranks, names, reason in (
            ([[0, 2], [1, 3]], ("dp", "tp"), "ascending"),
            ([[0, 1], [2, 3]], ("dp", "banana"), "'banana'"),
            ([[0, 1], [2, 3]], ("dp", "dp_shard"), "twice"),
            ([[0, 1], [2, 3]], None, "no names"),
            ([[0, 1]], ("dp", "tp"), "the world has 4"),
        ):
            wrong = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names, _init_backend=False)
            with pytest.raises(UsageError, match=reason):
                ParallelGroups.from_device_mesh(wrong)
        with pytest.raises(UsageError, match="DeviceMesh"):
            ParallelGroups.from_device_mesh("mesh")  # type: ignore[arg-type]
        for group in (mesh.get_group("tp"), mesh.get_group("dp_shard")):
            dist.destroy_process_group(group)


def test_a_mesh_over_our_groups_has_no_process_groups_of_its_own(ranks4: RankPool) -> None:
    """It is created once from the process groups that our groups have anyway, and torch's functions work on it."""
    ranks4.run(mesh_out)


def test_groups_of_a_mesh_make_no_process_groups(ranks4: RankPool) -> None:
    """Its dimensions become groups. A mesh that numbers ranks in another order is refused with the reason."""
    ranks4.run(mesh_in)
