"""Grids leave room for another group, and a norm uses a cluster where the device has them: pure functions."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_comm.cuda.kernel_layout import (
    GROUP_LANES,
    MAX_BLOCKS,
    MAX_WORLD_SIZE,
    NORM_GROUPS,
    WARP,
    WorkspaceLayout,
    norm_arena,
)
from device_comm.cuda.policy.decision import Algorithm, CallFacts, Capacity, GroupFacts, choose
from device_comm.cuda.policy.finalize import choose_finalize
from device_comm.cuda.policy.norm import choose_norm
from device_comm.cuda.policy.shapes import all_reduce_shape, most_blocks, norm_shape

KIB, MIB = 1 << 10, 1 << 20
ARENA = 16 * MIB


def group(world_size: int, arch: str = "sm_90", **changes: Any) -> GroupFacts:
    """Return the facts of a group of H100s with NVLink and 16 MiB of arena."""
    slots = ARENA // world_size // 128 * 128
    facts = GroupFacts(
        world_size=world_size,
        device_name="",
        arch=arch,
        multiprocessors=132,
        has_nvlink=True,
        is_exportable=False,
        capacity=Capacity(push_one_shot=slots, push_two_shot=ARENA // 2),
    )
    return msgspec.structs.replace(facts, **changes)


@given(
    st.sampled_from(
        [
            "push_one_shot",
            "push_two_shot",
            "pull_one_shot",
            "pull_two_shot",
            "multimem_two_shot",
            "multimem_one_shot",
            "push_all_gather",
            "staged_all_gather",
        ]
    ),
    st.sampled_from(["ampere", "hopper", "blackwell", ""]),
    st.integers(2, 200),
    st.integers(1, 64 * MIB),
    st.integers(2, 8),
)
def test_two_groups_fit_on_a_device(
    algorithm: str, family: str, processors: int, nbytes: int, world_size: int
) -> None:
    """Their kernels run at once, with a block per multiprocessor, whichever of them is launched first on a peer."""
    grid, threads = all_reduce_shape(algorithm, family, processors, nbytes, world_size)
    assert 1 <= grid <= MAX_BLOCKS
    assert threads in (128, 256, 512)
    assert 2 * grid <= processors
    norm_grid, _, _ = norm_shape("sm_90", most_blocks(processors), nbytes, nbytes)
    assert grid + norm_grid <= processors


def test_the_most_blocks_of_known_devices() -> None:
    """T4, A100, H200 and B200."""
    assert [most_blocks(each) for each in (1, 40, 108, 132, 148)] == [1, 20, 54, 64, 64]


@given(
    st.sampled_from(["sm_75", "sm_80", "sm_89", "sm_90", "sm_103", "sm_121"]),
    st.integers(1, 256),
    st.integers(1, 300),
    st.integers(1, 5000),
)
def test_a_norm_has_whole_clusters_and_a_lane_for_each_thread(
    arch: str, most: int, rows: int, row_vectors: int
) -> None:
    """A cluster has as many blocks as a row has groups of lanes, and none where the device knows no clusters."""
    grid, threads, cluster = norm_shape(arch, most, rows, row_vectors)
    assert grid % cluster == 0
    assert grid <= max(most, 1)
    assert grid <= rows * cluster
    assert NORM_GROUPS % cluster == 0
    assert cluster == 1 or arch in ("sm_90", "sm_103", "sm_121")
    assert cluster * GROUP_LANES < 2 * max(row_vectors, GROUP_LANES)
    # In the two-shot norm the warp with the rank's number acquires what the rank has polled.
    assert threads in (GROUP_LANES, 2 * GROUP_LANES)
    assert threads >= WARP * MAX_WORLD_SIZE


@pytest.mark.parametrize(
    ("rows", "row_vectors", "shape"),
    [
        (1, 256, (1, 256, 1)),
        (1, 257, (2, 256, 2)),
        (1, 1024, (4, 256, 4)),
        (100, 1024, (64, 256, 4)),
        (7, 5000, (28, 256, 4)),
    ],
)
def test_shapes_of_norms_on_hopper(rows: int, row_vectors: int, shape: tuple[int, int, int]) -> None:
    """A row of 8192 bfloat16 is spread over four multiprocessors."""
    assert norm_shape("sm_90", 64, rows, row_vectors) == shape


def test_a_norm_is_fused_up_to_the_limit_of_its_algorithm() -> None:
    """One-shot where the all-reduce is; two-shot above; apart where the all-reduce is larger or rows are odd."""

    def kernel(world_size: int, rows: int, hidden: int = 8192, **changes: Any) -> str | None:
        plan = choose_norm(group(world_size, **changes), rows, hidden * 2, "bfloat16")
        return None if plan is None else plan.kernel

    one, two = "push_add_rms_norm", "push_two_shot_add_rms_norm"
    assert [kernel(8, rows) for rows in (1, 8, 9, 64, 65)] == [one, one, two, two, None]
    assert [kernel(4, rows) for rows in (56, 57, 128, 129)] == [one, two, two, None]
    assert [kernel(2, rows) for rows in (1, 512, 513)] == [one, one, None]
    # 128 vectors are fewer than a warp of each of 8 ranks.
    assert kernel(8, 256, 1024) is None
    assert kernel(8, 128, 2048) == two
    assert (kernel(8, 0), kernel(8, 1, 8191)) == (None, None)
    assert kernel(8, 1, is_deterministic=True) == one
    assert kernel(8, 1, is_enabled=False) is None
    # Multimem would carry the sum alone.
    assert kernel(8, 64, has_multicast=True) == two
    assert kernel(8, 64, capacity=Capacity(push_one_shot=128 * KIB, push_two_shot=4 * MIB)) is None


def test_sums_of_experts_are_fused_where_the_all_reduce_is_one_shot() -> None:
    """The limit is that of the one-shot push, whatever sums the group's other calls; odd rows are not fused."""

    def is_fused(world_size: int, tokens: int, hidden: int = 8192, **changes: Any) -> bool:
        plan = choose_finalize(group(world_size, **changes), tokens, hidden * 2, "bfloat16")
        assert plan is None or (plan.kernel, plan.cluster) == ("push_moe_finalize", 1)
        return plan is not None

    assert [is_fused(8, tokens) for tokens in (0, 1, 8, 9)] == [False, True, True, False]
    assert [is_fused(4, tokens) for tokens in (56, 57)] == [True, False]
    assert not is_fused(8, 1, 8191)
    assert is_fused(8, 1, is_deterministic=True)
    assert not is_fused(8, 1, is_enabled=False)
    assert not is_fused(8, 8, capacity=Capacity(push_one_shot=64 * KIB, push_two_shot=4 * MIB))
    plan = choose_finalize(group(8), 8, 16384, "bfloat16")
    same = choose(group(8), CallFacts(operation="all_reduce", dtype="bfloat16", nbytes=8 * 16384))
    assert plan is not None
    assert (plan.grid, plan.threads) == (same.grid, same.threads)


@given(
    st.sampled_from(["sm_80", "sm_90", "sm_100", "sm_75", ""]),
    st.integers(2, 9),
    st.integers(0, 4096),
    st.integers(0, 20000),
    st.integers(0, 1 << 13).map(lambda lines: lines * 128),
    st.booleans(),
)
def test_what_is_fused_fits_into_the_arena(
    arch: str, world_size: int, rows: int, row_bytes: int, slot: int, in_graph: bool
) -> None:
    """Any facts give a plan that a launch accepts, or none."""
    facts = group(world_size, arch, capacity=Capacity(push_one_shot=slot, push_two_shot=slot))
    plan = choose_norm(facts, rows, row_bytes, "float32", in_graph=in_graph)
    if plan is None:
        return
    assert row_bytes % 16 == 0
    assert plan.grid % plan.cluster == 0
    assert 1 <= plan.grid <= most_blocks(132)
    layout = WorkspaceLayout(world_size, slot * world_size)
    nbytes = rows * row_bytes
    if plan.kernel == "push_add_rms_norm":
        call = CallFacts(operation="all_reduce", dtype="float32", nbytes=nbytes, in_graph=in_graph)
        assert choose(facts, call).algorithm is Algorithm.PUSH_ONE_SHOT
        assert nbytes * world_size <= layout.arena_bytes
    else:
        assert norm_arena(rows, row_bytes // 16, world_size) <= layout.arena_bytes
