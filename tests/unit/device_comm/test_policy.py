"""The policy is a pure, total function of what all ranks know; every number has a reason and a source."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_comm.cuda.kernel_layout import MAX_BLOCKS
from device_comm.cuda.policy.decision import (
    Algorithm,
    CallFacts,
    Capacity,
    GroupFacts,
    Plan,
    choose,
    policy_digest,
    uses_multimem,
)
from device_comm.cuda.policy.table import BUILT_IN, PolicyTable, Threshold, family_of

KIB, MIB = 1 << 10, 1 << 20

AMPLE = Capacity(
    push_one_shot=64 * MIB,
    push_two_shot=64 * MIB,
    pull_one_shot=64 * MIB,
    pull_two_shot=64 * MIB,
    multimem_two_shot=64 * MIB,
    multimem_one_shot=64 * MIB,
    push_reduce_scatter=64 * MIB,
    push_all_gather=64 * MIB,
    staged_all_gather=64 * MIB,
)
"""Memory that never decides."""

H200 = GroupFacts(
    world_size=8,
    device_name="NVIDIA H200",
    arch="sm_90",
    multiprocessors=132,
    has_nvlink=True,
    is_exportable=True,
    capacity=AMPLE,
)
ALL_REDUCE = CallFacts(operation="all_reduce", dtype="bfloat16", nbytes=8 * KIB)

limits = st.one_of(st.just(0), st.integers(0, 64 * MIB))
GROUPS = st.builds(
    GroupFacts,
    world_size=st.integers(1, 12),
    device_name=st.sampled_from(["NVIDIA H200", "NVIDIA A100", ""]),
    arch=st.sampled_from(["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "", "gfx942"]),
    multiprocessors=st.integers(1, 200),
    has_nvlink=st.booleans(),
    is_exportable=st.booleans(),
    has_multicast=st.booleans(),
    multimem_one_shot_bytes=st.sampled_from([0, 0, MIB]),
    is_deterministic=st.booleans(),
    is_enabled=st.sampled_from([True, True, True, False]),
    capacity=st.one_of(
        st.just(AMPLE), st.builds(Capacity, **dict.fromkeys(Capacity.__struct_fields__, limits))
    ),
)
DTYPES = ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "int32", "bool", "complex64"]
CALLS = st.builds(
    CallFacts,
    operation=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    dtype=st.sampled_from(DTYPES),
    nbytes=st.one_of(st.integers(0, 256 * KIB), st.integers(0, 256 * MIB)),
    reduction=st.sampled_from(["sum", "sum", "sum", "mean", "product", "min", "max"]),
    in_graph=st.booleans(),
)


def at(call: CallFacts, **changes: Any) -> CallFacts:
    """Return `call` with `changes`."""
    return msgspec.structs.replace(call, **changes)


def with_(facts: GroupFacts, **changes: Any) -> GroupFacts:
    """Return `facts` with `changes`."""
    return msgspec.structs.replace(facts, **changes)


@pytest.mark.guarantee("D50")
@given(GROUPS, CALLS)
def test_every_call_has_one_plan_with_a_reason(facts: GroupFacts, call: CallFacts) -> None:
    """Any facts give a valid plan with a reason, and equal facts give equal plans."""
    plan = choose(facts, call)
    assert plan.reason.strip()
    if plan.algorithm.is_custom:
        assert 1 <= plan.grid <= min(MAX_BLOCKS, facts.multiprocessors)
        assert plan.threads in (128, 256, 512)
        assert 0 < plan.piece_bytes <= facts.capacity.of(plan.algorithm)
        assert not facts.why_not()
    else:
        assert (plan.grid, plan.threads, plan.piece_bytes) == (0, 0, call.nbytes)
    copies = [msgspec.json.decode(msgspec.json.encode(each), type=type(each)) for each in (facts, call)]
    assert choose(*copies) == plan  # type: ignore[arg-type]


@given(GROUPS, CALLS, st.integers(0, 64 * MIB))
def test_regions_are_monotone(facts: GroupFacts, call: CallFacts, other: int) -> None:
    """As messages grow, the algorithms follow in one order, and none returns."""
    small, large = sorted((max(call.nbytes & ~3, 4), max(other & ~3, 4)))
    plans = [
        choose(facts, at(call, nbytes=size)).algorithm for size in (small, (small + large) // 8 * 4, large)
    ]
    if small <= (small + large) // 8 * 4:
        order = [each for each, previous in zip(plans, [None, *plans], strict=False) if each != previous]
        assert len(order) == len(set(order)), plans
    order_of = list(Algorithm)
    if call.operation == "all_reduce" and facts.world_size > 2:
        ranks = [order_of.index(choose(facts, at(call, nbytes=size)).algorithm) for size in (small, large)]
        assert ranks == sorted(ranks)


@pytest.mark.guarantee("D51")
@given(GROUPS, CALLS)
def test_the_deterministic_setting_sums_floats_in_rank_order_only(facts: GroupFacts, call: CallFacts) -> None:
    """NCCL never sums floats, and all sizes of an all-reduce use one algorithm, in pieces."""
    facts = with_(facts, is_deterministic=True)
    plan = choose(facts, call)
    if call.depends_on_order:
        assert plan.algorithm is not Algorithm.NCCL
    if plan.algorithm.is_custom and call.operation == "all_reduce":
        assert plan.algorithm is Algorithm.PUSH_TWO_SHOT
        assert plan.piece_bytes == call.nbytes or plan.piece_bytes % 16 == 0


@pytest.mark.parametrize("nbytes", [2, 16, 8 * KIB, MIB, 64 * MIB, 64 * MIB + 2, 3 << 30])
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_deterministic_group_has_one_algorithm(nbytes: int, in_graph: bool) -> None:
    """From one element to gigabytes, captured or not, the two-shot push does the sum."""
    plan = choose(with_(H200, is_deterministic=True), at(ALL_REDUCE, nbytes=nbytes, in_graph=in_graph))
    assert plan.algorithm is Algorithm.PUSH_TWO_SHOT
    assert plan.piece_bytes == min(nbytes, 64 * MIB)


@pytest.mark.parametrize(
    ("dtype", "reduction", "expected"),
    [
        ("float64", "sum", Algorithm.RANK_ORDER),
        ("float8_e4m3fn", "sum", Algorithm.RANK_ORDER),
        ("bfloat16", "mean", Algorithm.RANK_ORDER),
        ("float32", "product", Algorithm.RANK_ORDER),
        ("complex64", "sum", Algorithm.RANK_ORDER),
        ("int64", "sum", Algorithm.NCCL),
        ("float32", "max", Algorithm.NCCL),
    ],
)
def test_what_the_kernels_cannot_sum(dtype: str, reduction: str, expected: Algorithm) -> None:
    """A deterministic group sums in rank order where the order matters; elsewhere NCCL may be used."""
    call = at(ALL_REDUCE, dtype=dtype, reduction=reduction)
    assert choose(with_(H200, is_deterministic=True), call).algorithm is expected
    assert choose(H200, call).algorithm is Algorithm.NCCL


THRESHOLDS = [
    # arch, ranks, in a graph, the last size of the one-shot push
    ("sm_90", 2, True, 8 * MIB),
    ("sm_90", 3, True, 1280 * KIB),
    ("sm_90", 4, True, 384 * KIB),
    ("sm_90", 4, False, 896 * KIB),
    ("sm_90", 5, False, 192 * KIB),
    ("sm_90", 6, True, 128 * KIB),
    ("sm_90", 8, True, 128 * KIB),
    ("sm_100", 5, True, 192 * KIB),
    ("sm_100", 8, True, 256 * KIB),
    ("sm_120", 7, True, 256 * KIB),
    ("sm_80", 2, True, 512 * KIB),
    ("sm_80", 4, False, 512 * KIB),
    ("sm_80", 8, True, 256 * KIB),
]


@pytest.mark.parametrize(("arch", "world_size", "in_graph", "last"), THRESHOLDS)
def test_thresholds_are_exact(arch: str, world_size: int, in_graph: bool, last: int) -> None:
    """The last byte of a region belongs to it, and the next byte does not."""
    facts = with_(H200, arch=arch, world_size=world_size)

    def of(nbytes: int) -> Plan:
        return choose(facts, at(ALL_REDUCE, nbytes=nbytes, in_graph=in_graph))

    assert of(last).algorithm is Algorithm.PUSH_ONE_SHOT
    assert str(last) in of(last).reason
    if last < 8 * MIB:
        assert of(last + 2).algorithm is of(8 * MIB).algorithm is Algorithm.PUSH_TWO_SHOT
    beyond = of(8 * MIB + 2).algorithm
    if in_graph:
        assert beyond is of(32 * MIB).algorithm
        assert beyond is (Algorithm.PULL_ONE_SHOT if world_size == 2 else Algorithm.PULL_TWO_SHOT)
        assert of(32 * MIB + 2).algorithm is Algorithm.NCCL
    else:
        assert beyond is Algorithm.NCCL


def test_pulls_need_memory_that_peers_can_map() -> None:
    """With `expandable_segments` a large captured call uses NCCL, and the reason says why."""
    call = at(ALL_REDUCE, nbytes=16 * MIB, in_graph=True)
    assert choose(H200, call).algorithm is Algorithm.PULL_TWO_SHOT
    plan = choose(with_(H200, is_exportable=False), call)
    assert plan.algorithm is Algorithm.NCCL
    assert "exported" in plan.reason


@pytest.mark.parametrize(
    ("arch", "world_size", "first", "last"),
    [
        ("sm_90", 8, 256 * KIB, 64 * MIB),
        ("sm_90", 7, 512 * KIB, 64 * MIB),
        ("sm_90", 6, 512 * KIB, 64 * MIB),
        ("sm_100", 8, 4 * MIB, 64 * MIB),
        ("sm_103", 6, 8 * MIB, 32 * MIB),
    ],
)
def test_multimem_has_a_range(arch: str, world_size: int, first: int, last: int) -> None:
    """It comes before every other algorithm in its range, eager and captured, and where it can be used at all."""
    facts = with_(H200, arch=arch, world_size=world_size, has_multicast=True)
    assert uses_multimem(facts, BUILT_IN)
    for in_graph in (False, True):

        def of(nbytes: int, group: GroupFacts = facts, captured: bool = in_graph) -> Plan:
            return choose(group, at(ALL_REDUCE, nbytes=nbytes, in_graph=captured))

        for nbytes in (first, first + 2, last):
            plan = of(nbytes)
            assert plan.algorithm is Algorithm.MULTIMEM_TWO_SHOT
            assert (plan.piece_bytes, plan.threads) == (nbytes, 512)
        for nbytes in (first - 2, last + 2):
            assert of(nbytes).algorithm is of(nbytes, with_(facts, has_multicast=False)).algorithm
        for changes in ({"has_multicast": False}, {"is_deterministic": True}, {"has_nvlink": False}):
            group = with_(facts, **changes)
            assert not uses_multimem(group, BUILT_IN)
            assert of(first, group).algorithm is not Algorithm.MULTIMEM_TWO_SHOT
        # Memory for a part of the call cuts it into pieces; none leaves it to another algorithm.
        small = with_(facts, capacity=with_capacity(AMPLE, 128 * KIB))
        assert (of(first, small).algorithm, of(first, small).piece_bytes) == (
            Algorithm.MULTIMEM_TWO_SHOT,
            128 * KIB,
        )
        assert of(first, with_(facts, capacity=with_capacity(AMPLE, 0))).algorithm is not (
            Algorithm.MULTIMEM_TWO_SHOT
        )


@pytest.mark.parametrize("world_size", [2, 5, 8])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_one_shot_multimem_serves_only_who_asked_for_it(arch: str, world_size: int) -> None:
    """From 256 KiB up to the limit that the setting names, eager and captured; no table chooses it."""
    plain = with_(H200, arch=arch, world_size=world_size, has_multicast=True)
    facts = with_(plain, multimem_one_shot_bytes=MIB)
    assert uses_multimem(facts, PolicyTable(thresholds=()))
    for in_graph in (False, True):
        for nbytes in (256 * KIB, 256 * KIB + 2, MIB):
            call = at(ALL_REDUCE, nbytes=nbytes, in_graph=in_graph)
            plan = choose(facts, call)
            assert (plan.algorithm, plan.piece_bytes) == (Algorithm.MULTIMEM_ONE_SHOT, nbytes)
            assert plan.reason == f"{nbytes} bytes are at most the {MIB} of cuda.multimem_one_shot_bytes"
            for changes in (
                {"multimem_one_shot_bytes": 0},
                {"has_multicast": False},
                {"has_nvlink": False},
                {"is_deterministic": True},
                {"arch": "sm_80"},
                {"is_enabled": False},
            ):
                without = with_(facts, **changes)
                assert choose(without, call).algorithm is not Algorithm.MULTIMEM_ONE_SHOT, changes
            small = msgspec.structs.replace(AMPLE, multimem_one_shot=nbytes - 16)
            assert choose(with_(facts, capacity=small), call) == choose(with_(plain, capacity=small), call)
        for nbytes in (256 * KIB - 2, MIB + 2):
            call = at(ALL_REDUCE, nbytes=nbytes, in_graph=in_graph)
            assert choose(facts, call) == choose(plain, call)
        for operation in ("reduce_scatter", "all_gather"):
            call = at(ALL_REDUCE, operation=operation, nbytes=MIB, in_graph=in_graph)
            assert choose(facts, call) == choose(plain, call)
    assert not uses_multimem(with_(facts, arch="sm_80"), BUILT_IN)
    with pytest.raises(msgspec.ValidationError, match="multimem_one_shot"):
        msgspec.convert(
            {**msgspec.to_builtins(BUILT_IN.thresholds[0]), "algorithm": "multimem_one_shot"}, Threshold
        )


def with_capacity(capacity: Capacity, multimem: int) -> Capacity:
    """Return `capacity` with `multimem` bytes for a piece of multimem."""
    return msgspec.structs.replace(capacity, multimem_two_shot=multimem)


def test_few_ranks_and_old_devices_have_no_multimem() -> None:
    """Their groups need no memory for it. A policy file may have a row for any group."""
    for changes in ({"world_size": 5}, {"world_size": 2}, {"arch": "sm_80"}, {"arch": ""}):
        assert not uses_multimem(with_(H200, has_multicast=True, **changes), BUILT_IN), changes
    measured = msgspec.structs.replace(
        BUILT_IN.thresholds[0], algorithm="multimem_two_shot", min_world_size=2, max_bytes=MIB
    )
    facts = with_(
        H200, world_size=2, arch=f"sm_{80 if measured.family == 'ampere' else 90}", has_multicast=True
    )
    assert uses_multimem(facts, PolicyTable(thresholds=(measured,)))


def test_other_operations() -> None:
    """Reduce-scatter and all-gather use their own push algorithm up to their limits."""
    for operation, algorithm, last in (
        ("reduce_scatter", Algorithm.PUSH_REDUCE_SCATTER, 8 * MIB),
        ("all_gather", Algorithm.STAGED_ALL_GATHER, 2 * MIB),
    ):
        call = at(ALL_REDUCE, operation=operation)
        assert choose(H200, at(call, nbytes=last)).algorithm is algorithm
        assert choose(H200, at(call, nbytes=last + 4)).algorithm is Algorithm.NCCL
    # Small parts travel with flags; a part that has no room in the staging area goes through NCCL.
    gather = at(ALL_REDUCE, operation="all_gather")
    assert choose(H200, at(gather, nbytes=64 * KIB)).algorithm is Algorithm.PUSH_ALL_GATHER
    assert choose(H200, at(gather, nbytes=64 * KIB + 4)).algorithm is Algorithm.STAGED_ALL_GATHER
    small = with_(H200, capacity=msgspec.structs.replace(AMPLE, staged_all_gather=64 * KIB))
    assert choose(small, at(gather, nbytes=64 * KIB + 4)).algorithm is Algorithm.NCCL
    assert choose(with_(H200, is_deterministic=True), at(gather, nbytes=MIB)).algorithm is (
        Algorithm.STAGED_ALL_GATHER
    )
    integers = at(ALL_REDUCE, operation="all_gather", dtype="int8")
    assert choose(H200, at(integers, nbytes=4096)).algorithm is Algorithm.PUSH_ALL_GATHER
    assert choose(H200, at(integers, nbytes=4097)).algorithm is Algorithm.PUSH_ALL_GATHER


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_enabled": False}, "is off"),
        ({"world_size": 9}, "2 to 8 ranks, not 9"),
        ({"world_size": 1}, "2 to 8 ranks, not 1"),
        ({"arch": ""}, "different architectures"),
        ({"arch": "sm_75"}, "no thresholds are known for sm_75"),
        ({"has_nvlink": False}, "no threshold for all_reduce of 8 ranks over pcie"),
        ({"capacity": Capacity()}, "do not fit"),
    ],
)
def test_a_fallback_has_its_reason(changes: dict[str, Any], words: str) -> None:
    """Each obstacle selects NCCL, or rank order if the group is deterministic, and is named in the reason."""
    plan = choose(with_(H200, **changes), ALL_REDUCE)
    assert plan.algorithm is Algorithm.NCCL
    assert words in plan.reason
    plan = choose(with_(H200, is_deterministic=True, **changes), ALL_REDUCE)
    # A machine without figures can still be deterministic, because speed does not decide there.
    unmeasured = "arch" in changes and changes["arch"] == "sm_75"
    expected = Algorithm.PUSH_TWO_SHOT if unmeasured or "has_nvlink" in changes else Algorithm.RANK_ORDER
    assert plan.algorithm is expected


def test_two_ranks_over_pcie() -> None:
    """Two ranks without NVLink use the one-shot push; more ranks use NCCL until figures exist."""
    facts = with_(H200, has_nvlink=False, world_size=2)
    assert choose(facts, ALL_REDUCE).algorithm is Algorithm.PUSH_ONE_SHOT
    assert choose(with_(facts, world_size=3), ALL_REDUCE).algorithm is Algorithm.NCCL


@pytest.mark.guarantee("D50")
def test_every_number_has_a_source() -> None:
    """Each built-in row names its source, and none claims to be measured here."""
    for row in BUILT_IN.thresholds:
        assert len(row.source) > 20
        assert "measured on" not in row.source


def test_digests_tell_tables_apart() -> None:
    """Two tables have equal digests exactly if their numbers are equal; sources do not count."""
    renamed = [msgspec.structs.replace(row, source="hearsay") for row in BUILT_IN.thresholds]
    assert policy_digest(PolicyTable(thresholds=tuple(renamed), origin="x")) == policy_digest(BUILT_IN)
    for field, value in (("max_bytes", 1), ("mode", "graph"), ("max_world_size", 2), ("link", "pcie")):
        last = msgspec.structs.replace(BUILT_IN.thresholds[2], **{field: value})
        changed = PolicyTable(thresholds=(*BUILT_IN.thresholds[:2], last, *BUILT_IN.thresholds[3:]))
        assert (policy_digest(changed) == policy_digest(BUILT_IN)) == (
            getattr(BUILT_IN.thresholds[2], field) == value
        )


def test_families() -> None:
    """Architectures map to the family whose figures hold for them, or to none."""
    names = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_103", "sm_120", "sm_110", "", "gfx942", "sm_"]
    expected = ["", "ampere", "ampere", "hopper", *["blackwell"] * 3, "", "", "", ""]
    assert [family_of(name) for name in names] == expected


def test_rows_are_found_by_size() -> None:
    """The row with the smallest sufficient size decides, whatever the order of the table."""
    rows = tuple(reversed(BUILT_IN.thresholds))
    assert choose(H200, ALL_REDUCE, PolicyTable(thresholds=rows)).algorithm is Algorithm.PUSH_ONE_SHOT
    assert isinstance(rows[0], Threshold)
