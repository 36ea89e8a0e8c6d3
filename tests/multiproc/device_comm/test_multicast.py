"""Memory behind a multimem address, over real processes with a driver that needs no GPU and refuses any wrong order."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from device_comm.cuda import error_record
from device_comm.cuda.custom.multicast import MulticastMemory
from device_comm.cuda.policy.decision import Algorithm
from tests.custom_ranks import FIRST_RANK, CustomRank
from tests.fake_cuda import violations
from tests.harness import RankPool, run_ranks
from tests.waiting import wait_until
from tests.worlds import outcome_of

BF16 = torch.bfloat16
KIB = 1 << 10
POLICY = {"push_one_shot": 1 * KIB, "multimem_two_shot": 1 << 20}
"""Two ranks and more: above 1 KiB the switch sums."""
MULTICAST = {"has_multicast": True}


def rank_of(
    rank: int,
    world_size: int,
    directory: Path,
    libraries: str,
    faults: dict[str, Any] | None = None,
    **options: Any,
) -> CustomRank:
    """Return a rank whose group has multicast."""
    known: dict[str, Any] = {"facts": MULTICAST, "policy": POLICY, **options}
    return CustomRank(rank, world_size, directory, libraries, faults=faults, **known)


def sums(
    me: CustomRank, seed: int, count: int, dtype: torch.dtype, *, in_place: bool = False, stream: int = 1
) -> None:
    """Sum on all ranks; compare the bits of all and the value with the exact sum."""
    assert me.custom is not None
    inputs = me.inputs(seed, count, dtype)
    input_ = me.buffer(count, dtype)
    input_.copy_(inputs[me.rank])
    output = input_ if in_place else me.buffer(count, dtype)
    assert me.custom.all_reduce(input_.data_ptr(), output.data_ptr(), count, dtype, stream)
    me.custom.check()
    expect_sum(me, output, inputs)


def expect_sum(me: CustomRank, output: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Compare a result with those of the other ranks, bit by bit, and with the exact sum."""
    own = output.view(torch.uint8).numpy().tobytes()
    assert set(me.exchange(own)) == {own}
    expect_near(output, inputs)


def expect_near(output: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Compare a result with the exact sum."""
    exact = torch.stack(inputs).double().sum(0)
    terms = torch.stack(inputs).double().abs().sum(0)
    bound = torch.finfo(output.dtype).eps * exact.abs() + len(inputs) * 2.0**-24 * terms
    assert ((output.double() - exact).abs() <= bound).all()


# --- calls ----------------------------------------------------------------------------------------------------


def large_sums(rank: int, world_size: int, directory: Path, libraries: str) -> dict[str, int]:
    me = rank_of(rank, world_size, directory, libraries)
    with me.made() as custom:
        assert custom.facts.has_multicast
        piece = custom.facts.capacity.multimem_two_shot
        assert 0 < piece <= me.settings.staging_bytes
        for number, dtype in enumerate((BF16, torch.float16, torch.float32)):
            for count in (513, 1032, 4096):
                plan = custom.plan("all_reduce", dtype, count * dtype.itemsize, 1)
                assert plan.algorithm is Algorithm.MULTIMEM_TWO_SHOT
                sums(me, number, count, dtype, in_place=count == 4096)
                # A call in between that shares the flags of its barriers with no multimem call.
                assert me.all_reduce(number, 64, dtype)
        # In pieces: more than fits behind the multimem address.
        sums(me, 9, piece // 2 * 5 // 2 + 24, BF16)
    return me.driver.calls


@pytest.mark.guarantee("D83")
def test_all_ranks_get_the_same_sum(ranks3: RankPool, libraries: str) -> None:
    """Sums of several dtypes and sizes, in place and in pieces, beside calls of another algorithm."""
    for calls in ranks3.run(large_sums, libraries):
        assert calls["multicast_bind"] == calls["multicast_unbind"] == 1


def sums_in_one_shot(rank: int, world_size: int, directory: Path, libraries: str) -> dict[str, int]:
    settings: dict[str, Any] = {"staging_bytes": 512 * KIB, "multimem_one_shot_bytes": 288 * KIB}
    facts = {**MULTICAST, "multimem_one_shot_bytes": settings["multimem_one_shot_bytes"]}
    me = rank_of(
        rank, world_size, directory, libraries, facts=facts, policy={"push_one_shot": 1 * KIB}, **settings
    )
    with me.made() as custom:
        for number, dtype in enumerate((BF16, torch.float32)):
            first, last = 256 * KIB // dtype.itemsize, 288 * KIB // dtype.itemsize
            for count in (first, last):
                plan = custom.plan("all_reduce", dtype, count * dtype.itemsize, 1)
                assert plan.algorithm is Algorithm.MULTIMEM_ONE_SHOT
                inputs = me.inputs(number, count, dtype)
                input_ = me.buffer(count, dtype)
                input_.copy_(inputs[rank])
                output = input_ if count == last else me.buffer(count, dtype)
                assert custom.all_reduce(input_.data_ptr(), output.data_ptr(), count, dtype, 1)
                custom.check()
                expect_near(output, inputs)
                assert me.all_reduce(number, 64, dtype)
            for count in (first - 1, last + 1):
                plan = custom.plan("all_reduce", dtype, count * dtype.itemsize, 1)
                assert plan.algorithm is Algorithm.NCCL
    return me.driver.calls


@pytest.mark.guarantee("D83")
@pytest.mark.guarantee("D84")
def test_the_one_shot_form_begins_at_256_kib_for_a_group_that_asked_for_it(
    ranks3: RankPool, libraries: str
) -> None:
    """The memory is set up and bound once, in the only allowed order, although no row of the table needs it."""
    for calls in ranks3.run(sums_in_one_shot, libraries):
        assert calls["multicast_bind"] == calls["multicast_unbind"] == 1


def captured(rank: int, world_size: int, directory: Path, libraries: str) -> list[str]:
    me = rank_of(rank, world_size, directory, libraries)
    with me.made() as custom:
        custom.begin_capture(7)
        me.driver.begin_capture(7)
        input_, output = me.buffer(2048, BF16), me.buffer(2048, BF16)
        assert custom.all_reduce(input_.data_ptr(), output.data_ptr(), 2048, BF16, 7)
        graph = me.driver.end_capture(7)
        custom.finish_capture()
        for seed in range(3):
            inputs = me.inputs(seed, 2048, BF16)
            input_.copy_(inputs[rank])
            me.driver.replay(graph)
            custom.check()
            expect_sum(me, output, inputs)
    return graph.launches


def test_a_graph_with_a_multimem_sum_can_be_replayed(ranks2: RankPool, libraries: str) -> None:
    """The input needs no registration: the kernel copies it behind the multimem address."""
    assert ranks2.run(captured, libraries) == [["multimem_two_shot"]] * 2


def deterministic(rank: int, world_size: int, directory: Path, libraries: str) -> dict[str, int]:
    me = rank_of(rank, world_size, directory, libraries, deterministic=True)
    with me.made():
        assert me.all_reduce(1, 2048, BF16)
    return me.driver.calls


@pytest.mark.guarantee("D83")
def test_a_deterministic_group_has_no_multimem(ranks2: RankPool, libraries: str) -> None:
    """It makes no multicast object, and its sums have the bits of rank order."""
    assert not any(
        name.startswith("multicast") for calls in ranks2.run(deterministic, libraries) for name in calls
    )


# --- agreement ------------------------------------------------------------------------------------------------

FAILURES = [
    (0, {"multicast_granularity": (1, 2)}),
    (0, {"multicast_create": (1, 801)}),
    # Exporting and importing the workspaces comes first.
    (0, {"vmm_export": (2, 2)}),
    (1, {"vmm_import": (3, 2)}),
    (0, {"multicast_add_device": (1, 101)}),
    (1, {"multicast_add_device": (1, 101)}),
    (1, {"vmm_create": (2, 2)}),
    (1, {"multicast_bind": (1, 802)}),
    (0, {"multicast_bind": (1, 802)}),
]


def lacks(
    rank: int, world_size: int, directory: Path, libraries: str, culprit: int, fail: dict[str, Any]
) -> Any:
    me = rank_of(rank, world_size, directory, libraries, faults={"fail": fail} if rank == culprit else None)
    with me.made() as custom:
        has_it = custom.facts.has_multicast
        left = [
            each for each in me.driver.leaks() if "multicast" in each or "window" in each or "bound" in each
        ]
        mapped = sum(each.startswith("mapping vmm-") for each in me.driver.leaks())
        plan = custom.plan("all_reduce", BF16, 4096, 1)
        assert not me.all_reduce(1, 2048, BF16)
        assert me.all_reduce(1, 64, BF16)
    return has_it, left, mapped, plan.algorithm.value, plan.reason


@pytest.mark.guarantee("D84")
@pytest.mark.parametrize(
    ("culprit", "fail"), FAILURES, ids=lambda each: "-".join(each) if isinstance(each, dict) else ""
)
def test_what_one_rank_cannot_do_no_rank_has(
    ranks3: RankPool, libraries: str, culprit: int, fail: dict[str, Any]
) -> None:
    """Every step may fail on one rank: all go on without multimem, and nothing is left of the attempt."""
    results = ranks3.run(lacks, libraries, culprit, fail)
    assert all(each == results[0] for each in results)
    has_it, left, mapped, algorithm, reason = results[0]
    # The workspaces of the three ranks stay mapped.
    assert (has_it, left, mapped) == (False, [], 3)
    assert algorithm == "nccl"
    assert "multimem_two_shot needs multicast" in reason


def step_by_step(rank: int, world_size: int, directory: Path, libraries: str, nth: int) -> Any:
    me = rank_of(rank, world_size, directory, libraries)
    health, peers = me.health, me.peers()
    if rank == 1:
        me.driver.faults.fail["vmm_map"] = (nth, 2)
    memory, why = MulticastMemory.create(me.driver, peers, 5000, health.lost)
    assert memory is None
    assert me.driver.leaks() == []
    me.finish()
    return why


@pytest.mark.guarantee("D84")
@pytest.mark.parametrize("nth", [1, 2])
def test_a_mapping_that_fails_is_told_to_all(ranks3: RankPool, libraries: str, nth: int) -> None:
    """The own memory or the object cannot be mapped on a rank: all ranks get that reason."""
    reasons = ranks3.run(step_by_step, libraries, nth)
    assert set(reasons) == {reasons[0]}
    assert f"rank {FIRST_RANK + 1}: vmm_map" in reasons[0]


# --- the end --------------------------------------------------------------------------------------------------


def dies(rank: int, world_size: int, directory: Path, libraries: str) -> Any:
    me = rank_of(rank, world_size, directory, libraries)
    custom = me.create()
    sums(me, 1, 1024, BF16)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    buffer = me.buffer(1024, BF16).data_ptr()

    def call() -> None:
        custom.all_reduce(buffer, buffer, 1024, BF16, 1)
        custom.check()

    seen = outcome_of(call)
    custom.destroy()
    me.health.close()
    left = me.left()
    me.health.release()
    me.driver.release()
    return seen, left


@pytest.mark.guarantee("D84")
def test_a_dead_rank_is_named_and_its_memory_does_not_keep_ours(libraries: str) -> None:
    """The barrier names the rank. No other process lives that could use our memory, so it is freed."""
    results = run_ranks(dies, 2, libraries, expect_dead={1})
    seen, left = results[0]
    assert (seen["kind"], seen["peers"]) == ("PeerLostError", [FIRST_RANK + 1])
    assert left == []


def leaves(rank: int, world_size: int, directory: Path, libraries: str) -> list[str]:
    me = rank_of(rank, world_size, directory, libraries)
    custom = me.create()
    sums(me, 1, 1024, BF16)
    # One after the other, without a word to the rest.
    for other in range(world_size):
        if rank == other:
            custom.destroy()
        me.meet()
    left = me.left()
    me.health.close()
    me.health.release()
    me.meet()
    assert violations(directory) == []
    me.driver.release()
    return left


@pytest.mark.guarantee("D84")
def test_a_rank_may_leave_alone(ranks3: RankPool, libraries: str) -> None:
    """Once its kernels have ended, no peer's kernel uses its memory: nothing of it is left."""
    # The workspaces of this test's ranks are shared by CUDA IPC or descriptors; only the former may stay.
    for left in ranks3.run(leaves, libraries):
        assert all(each.startswith("memory memory-") for each in left), left


def gives_up(
    rank: int, world_size: int, directory: Path, libraries: str, is_told: bool
) -> tuple[list[str], str]:
    me = rank_of(rank, world_size, directory, libraries, deadline_s=2.0)
    with pytest.MonkeyPatch.context() as patch:
        if rank != 1 or not is_told:
            # A rank looks for the failures of others four times a second, so also between theirs and its own end.
            patch.setattr(error_record, "FAILURE_EVERY_S", 3600.0)
        custom = me.create()
        sums(me, 1, 1024, BF16)
        kind = ""
        if rank != 1:
            buffer = me.buffer(1024, BF16).data_ptr()
            assert custom.all_reduce(buffer, buffer, 1024, BF16, 1)
            kind = outcome_of(custom.check)["kind"]
        me.meet()
        if is_told:
            wait_until(lambda: me.health.is_broken, "rank 1 to see that the others have failed", 20.0)
        custom.destroy()
    left = sorted({each.split()[0] for each in me.left()})
    me.health.close()
    me.health.release()
    me.meet()
    assert violations(directory) == []
    me.driver.release()
    return left, kind


@pytest.mark.guarantee("D84")
@pytest.mark.parametrize("is_told", [False, True])
def test_memory_that_a_peer_may_use_after_a_failure_is_kept(
    ranks3: RankPool, libraries: str, is_told: bool
) -> None:
    """Ranks whose kernels gave up cannot know how far the others are. They unmap the object and keep their memory.

    So does a rank that has made no call since, but has been told of the failure.
    """
    for rank, (left, kind) in enumerate(ranks3.run(gives_up, libraries, is_told)):
        assert left == ([] if rank == 1 and not is_told else ["VMM", "mapping", "memory", "multicast"])
        assert kind == ("" if rank == 1 else "CommTimeoutError")
