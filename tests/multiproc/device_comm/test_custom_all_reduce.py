"""The host's side of our own CUDA collectives, over real processes with a driver that needs no GPU.

The kernels are the product's source, which g++ compiles and which run as threads. The driver is fake and strict.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from device_comm.cuda.custom.fused_calls import Scales
from device_comm.cuda.policy.decision import Algorithm
from device_comm.fused.finalize import finalized
from device_comm.fused.fp8 import quantised_rows
from device_comm.fused.rms_norm import add_rms_norm
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from shm_broadcast.errors import ClosedError, UsageError
from tests.custom_ranks import FIRST_RANK, SMALL_POLICY, CustomRank, shuffled
from tests.harness import RankPool, run_ranks
from tests.waiting import wait_until
from tests.worlds import outcome_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BF16 = torch.bfloat16
SIZES = [1, 7, 8, 511, 1024, 1025, 2049, 4096]
"""Numbers of elements: part of a vector, whole vectors and a tail, both sides of the one-shot push's limit of 2 KiB."""


# --- results --------------------------------------------------------------------------------------------------


def every_size(
    rank: int, world_size: int, directory: Path, libraries: str, dtypes: int, deterministic: bool
) -> list[str]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY, deterministic=deterministic)
    seen = set()
    with me.made() as custom:
        for number, count in enumerate(shuffled(SIZES * (2 if dtypes > 1 else 1), 1)):
            dtype = DTYPES[number % dtypes]
            plan = custom.plan("all_reduce", dtype, count * dtype.itemsize, 1)
            seen.add(plan.algorithm.value)
            done = me.all_reduce(number, count, dtype, in_place=number % 3 == 0)
            assert done == plan.algorithm.is_custom
            gathers(me, number, count % 37 + 1)
            if count * dtype.itemsize % 16 == 0:
                scatters(me, number, count, dtype)
        fuses(me, 5, 3, 64, BF16)
        finalizes(me, 6, 5, 64, BF16)
    return sorted(seen)


def gathers(me: CustomRank, seed: int, nbytes: int) -> None:
    """All-gather raw bytes, among them those of the sentinel."""
    assert me.custom is not None
    made = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(0, 256, (nbytes,), generator=made, dtype=torch.uint8) for _ in range(me.world_size)
    ]
    parts[0].fill_(255)
    input_, output = me.buffer(nbytes, torch.uint8), me.buffer(nbytes * me.world_size, torch.uint8)
    input_.copy_(parts[me.rank])
    assert me.custom.all_gather(input_.data_ptr(), output.data_ptr(), nbytes, 1)
    assert torch.equal(output, torch.cat(parts))


def large_gathers(rank: int, world_size: int, directory: Path, libraries: str) -> list[str]:
    me = CustomRank(rank, world_size, directory, libraries)
    seen = []
    with me.made() as custom:
        most = custom.facts.capacity.staged_all_gather
        for number, nbytes in enumerate((custom.facts.capacity.push_all_gather + 1, most - 7, most)):
            seen.append(custom.plan("all_gather", torch.uint8, nbytes, 1).algorithm.value)
            for again in range(3):
                gathers(me, 10 * number + again, nbytes)
                # A call of another kernel in between that shares neither arena nor staging area with it.
                assert me.all_reduce(number, 64, BF16)
        seen.append(custom.plan("all_gather", torch.uint8, most + 1, 1).algorithm.value)
    return seen


def test_large_parts_are_gathered_without_flags(ranks3: RankPool, libraries: str) -> None:
    """Parts beyond the arena of the push go through the staging areas, at any size, bit by bit."""
    for seen in ranks3.run(large_gathers, libraries):
        assert seen == [*["staged_all_gather"] * 3, "nccl"]


def scatters(me: CustomRank, seed: int, count: int, dtype: torch.dtype) -> None:
    assert me.custom is not None
    whole = me.reference(seed, count * me.world_size, dtype)
    input_, output = me.buffer(count * me.world_size, dtype), me.buffer(count, dtype)
    input_.copy_(me.inputs(seed, count * me.world_size, dtype)[me.rank])
    assert me.custom.reduce_scatter(input_.data_ptr(), output.data_ptr(), count, dtype, 1)
    assert torch.equal(output, whole[me.rank * count : (me.rank + 1) * count])


def fuses(me: CustomRank, seed: int, rows: int, hidden: int, dtype: torch.dtype) -> None:
    """Check that the fused norm, and its second part alone, have the bits of the separate operations."""
    assert me.custom is not None
    made = torch.Generator().manual_seed(99)
    residual = me.buffer(rows * hidden, dtype).view(rows, hidden)
    residual.copy_(torch.randn(rows, hidden, generator=made))
    weight = me.buffer(hidden, dtype)
    weight.copy_(torch.randn(hidden, generator=made))
    total = me.reference(seed, rows * hidden, dtype).view(rows, hidden)
    out, out_sum = (me.buffer(rows * hidden, dtype).view(rows, hidden) for _ in range(2))
    input_ = me.buffer(rows * hidden, dtype)
    # Another eps replaces the one that was packed before.
    for fused, eps in ((True, 1e-5), (True, 0.5), (False, 1e-5)):
        expected, expected_sum = add_rms_norm(total, residual, weight, eps)
        input_.copy_(me.inputs(seed, rows * hidden, dtype)[me.rank] if fused else total.flatten())
        addresses = [each.data_ptr() for each in (input_, residual, weight, out, out_sum)]
        if fused:
            assert me.custom.all_reduce_add_rms_norm(addresses, rows, hidden, eps, dtype, 1)
        else:
            me.custom.add_rms_norm(addresses, rows, hidden, eps, dtype, 1)
        assert torch.equal(out, expected)
        assert torch.equal(out_sum, expected_sum)
        out.zero_()
        fuses_fp8(me, addresses, rows, eps, expected, fused)
        assert torch.equal(out_sum, expected_sum)
    assert not me.custom.can_fuse(rows, hidden + 1, dtype, 1)
    assert not me.custom.can_fuse(1 << 16, hidden, dtype, 1)


def fuses_fp8(
    me: CustomRank, addresses: list[int], rows: int, eps: float, expected: torch.Tensor, is_fused: bool
) -> None:
    """Check an output of 8 bits under both kinds of scales. The output is that of the call, and half or less of it."""
    assert me.custom is not None
    hidden, dtype = expected.shape[1], expected.dtype
    out, scales, given = (me.buffer(size, torch.float32) for size in (rows * hidden, rows, 4))
    given.fill_(0.05)
    addresses = [*addresses[:3], out.data_ptr(), addresses[4]]
    for scale in (None, given[:1]):
        pair = Scales("fp8", 0 if scale is None else scale.data_ptr(), scales.data_ptr())
        if is_fused:
            assert me.custom.all_reduce_add_rms_norm(addresses, rows, hidden, eps, dtype, 1, pair)
        else:
            me.custom.add_rms_norm(addresses, rows, hidden, eps, dtype, 1, pair)
        quantised, wanted = quantised_rows(expected, scale)
        found = out.view(torch.uint8)[: rows * hidden].view(rows, hidden)
        assert torch.equal(found, quantised.view(torch.uint8))
        if scale is None:
            assert torch.equal(scales.view(-1, 1), wanted)
        out.zero_()


def finalizes(me: CustomRank, seed: int, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    """Check that the fused sums of experts, and the local ones before an all-reduce, have the bits of the steps."""
    assert me.custom is not None
    k, every = 3, []
    made = torch.Generator().manual_seed(seed)
    for rank in range(me.world_size):
        outputs, shared = (torch.randn(rows, hidden, generator=made).to(dtype) for rows in (rank + 1, tokens))
        rows = torch.randint(-1, rank + 1, (tokens, k), generator=made, dtype=torch.int32)
        weights = torch.rand(tokens, k, generator=made)
        every.append((outputs, rows, weights, shared))
    expected = reduce_in_rank_order([finalized(*each) for each in every], ReduceOperation.SUM)
    buffers = [me.buffer(each.numel(), each.dtype).view(each.shape) for each in every[me.rank]]
    for buffer, each in zip(buffers, every[me.rank], strict=True):
        buffer.copy_(each)
    out = me.buffer(tokens * hidden, dtype).view(tokens, hidden)
    addresses = [each.data_ptr() for each in (*buffers, out)]
    sizes = tokens, hidden, k, me.rank + 1
    assert me.custom.moe_finalize_all_reduce(addresses, sizes, dtype, 1)
    assert torch.equal(out, expected)
    out.zero_()
    me.custom.moe_finalize(addresses, sizes, dtype, 1)
    assert torch.equal(out, finalized(*every[me.rank]))
    with pytest.raises(UsageError, match="no multiple of 16"):
        me.custom.moe_finalize([addresses[0] + 2, *addresses[1:]], sizes, dtype, 1)
    assert not me.custom.can_finalize(tokens, hidden + 1, dtype, 1)
    assert not me.custom.moe_finalize_all_reduce(addresses, (1 << 16, hidden, k, 1), dtype, 1)


@pytest.mark.guarantee("D52")
def test_sums_are_those_in_rank_order(ranks2: RankPool, libraries: str) -> None:
    """Every bit is right for every dtype, many sizes, and algorithms and operations in turn, in place and not."""
    for seen in ranks2.run(every_size, libraries, 3, False):
        assert seen == ["nccl", "push_one_shot", "push_two_shot"]


@pytest.mark.thorough
def test_a_deterministic_group_uses_one_algorithm(ranks3: RankPool, libraries: str) -> None:
    """Three ranks use one algorithm for every size and get the same bits."""
    for seen in ranks3.run(every_size, libraries, 1, True):
        assert seen == ["push_two_shot"]


def large_sums(rank: int, world_size: int, directory: Path, libraries: str) -> None:
    me = CustomRank(rank, world_size, directory, libraries, deterministic=True)
    with me.made() as custom:
        count = 3 * custom.facts.capacity.push_two_shot // 2 + 24
        plan = custom.plan("all_reduce", BF16, 2 * count, 1)
        assert plan.algorithm is Algorithm.PUSH_TWO_SHOT
        assert plan.piece_bytes < 2 * count
        for seed in range(2):
            assert me.all_reduce(seed, count, BF16, in_place=seed == 1)


def test_a_large_deterministic_sum_goes_in_pieces(ranks2: RankPool, libraries: str) -> None:
    """A sum that exceeds the arena is split into pieces that follow each other. The last one is shorter."""
    ranks2.run(large_sums, libraries)


# --- failures -------------------------------------------------------------------------------------------------


def one_is_late(rank: int, world_size: int, directory: Path, libraries: str) -> list[dict[str, Any]]:
    # The sum that all make takes part of this time; on a busy machine that can be half a second.
    me = CustomRank(rank, world_size, directory, libraries, deadline_s=2.0)
    me.create()
    assert me.all_reduce(1, 64, BF16)
    seen = []
    if rank != 1:
        seen.append(outcome_of(lambda: me.all_reduce(2, 64, BF16)))
        seen.append(outcome_of(lambda: me.all_reduce(2, 64, BF16)))
    me.meet()
    # The ranks that know of the failure have no barrier at the end. Memory that others may have open stays.
    me.leave_alone()
    return seen


@pytest.mark.guarantee("D54")
def test_a_late_rank_is_named(ranks3: RankPool, libraries: str) -> None:
    """Kernels give up at their deadline, the error names the late rank, and later calls raise at once."""
    for first, later in [seen for seen in ranks3.run(one_is_late, libraries) if seen]:
        assert (first["kind"], first["missing"]) == ("CommTimeoutError", [FIRST_RANK + 1])
        assert 2.0 <= first["seconds"] < 5.0
        assert f"no answer from rank {FIRST_RANK + 1}" in first["text"]
        assert later["kind"] == "GroupBrokenError"


def one_dies(rank: int, world_size: int, directory: Path, libraries: str) -> list[dict[str, Any]]:
    me = CustomRank(rank, world_size, directory, libraries)
    custom = me.create()
    assert me.all_reduce(1, 64, BF16)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = [outcome_of(lambda: me.all_reduce(2, 64, BF16)), outcome_of(custom.check)]
    custom.destroy()
    me.health.close()
    assert me.driver.leaks() == []
    me.health.release()
    me.driver.release()
    return seen


@pytest.mark.guarantee("D54")
def test_a_dead_rank_is_named(libraries: str) -> None:
    """When a rank is killed, the kernels of the others stop long before their deadline of 20 s."""
    results = run_ranks(one_dies, 2, libraries, expect_dead={1})
    first, later = results[0]
    assert (first["kind"], first["peers"]) == ("PeerLostError", [FIRST_RANK + 1])
    assert first["seconds"] < 10.0
    assert later["kind"] == "GroupBrokenError"


# --- agreement ------------------------------------------------------------------------------------------------


def refused(
    rank: int, world_size: int, directory: Path, libraries: str, options: list[dict[str, Any]]
) -> dict[str, Any]:
    me = CustomRank(rank, world_size, directory, libraries, **options[rank])
    result = outcome_of(me.create)
    me.finish()
    return result


@pytest.mark.guarantee("D56")
def test_different_policies_are_a_disagreement(ranks2: RankPool, libraries: str) -> None:
    """If the ranks' policy files differ, all ranks raise, and the error shows each rank's file."""
    options = [{"policy": SMALL_POLICY}, {"policy": {**SMALL_POLICY, "push_one_shot": 1024}}]
    for result in ranks2.run(refused, libraries, options):
        assert result["kind"] == "DisagreementError"
        assert "rank 4: " in result["text"]
        assert "policy-1.json, digest " in result["text"]


def test_a_policy_file_that_one_rank_cannot_read(ranks2: RankPool, libraries: str) -> None:
    """That rank raises a SettingsError. The other one raises an error that names that rank."""
    options = [{}, {"policy_file": "/nowhere/policy.json"}]
    other, own = ranks2.run(refused, libraries, options)
    assert (other["kind"], own["kind"]) == ("DisagreementError", "SettingsError")
    assert "rank 5: cannot read the policy file /nowhere/policy.json" in other["text"]


def test_facts_that_differ_are_a_disagreement(ranks2: RankPool, libraries: str) -> None:
    """All ranks raise if they hold different facts, because they could choose different algorithms."""
    options = [{}, {"facts": {"multiprocessors": 3}}]
    assert [each["kind"] for each in ranks2.run(refused, libraries, options)] == ["DisagreementError"] * 2


@pytest.mark.guarantee("D56")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"broken_compiler": True}, "rank 5: no compiler here"),
        ({"faults": {"fail": {"mem_alloc": (2, 2)}}}, "rank 5: mem_alloc on device 1 failed"),
        ({"faults": {"fail": {"host_alloc_mapped": (1, 2)}}}, "rank 5: host_alloc_mapped"),
        ({"faults": {"fail": {"module_load": (1, 2)}}}, "rank 5: module_load"),
        ({"faults": {"ipc": False, "vmm": False}}, "cannot map each other's device memory"),
    ],
)
def test_a_step_that_fails_on_one_rank_fails_on_all(
    ranks2: RankPool, libraries: str, options: dict[str, Any], words: str
) -> None:
    """All ranks raise with that rank's reason, and no rank keeps a resource."""
    for result in ranks2.run(refused, libraries, [{}, options]):
        assert result["kind"] == "CapabilityError"
        assert words in result["text"]


def begins_beside_another_group(rank: int, world_size: int, directory: Path, libraries: str) -> float:
    me = CustomRank(rank, world_size, directory, libraries)
    start = time.monotonic()
    with me.driver.hang():
        me.create()
    took_s = time.monotonic() - start
    assert me.all_reduce(1, 64, BF16)
    me.finish()
    return took_s


def test_workspaces_are_made_beside_another_groups_kernel(ranks2: RankPool, libraries: str) -> None:
    """That kernel may wait for a rank that is making its workspaces here."""
    for took_s in ranks2.run(begins_beside_another_group, libraries):
        assert took_s < 12.0


def failing_capture(rank: int, world_size: int, directory: Path, libraries: str) -> dict[str, Any]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    with me.made() as custom:
        me.broken_compiler = rank == 1
        result = outcome_of(lambda: custom.begin_capture(7))
        assert me.all_reduce(1, 64, BF16)
    return result


def test_kernels_that_one_rank_cannot_compile_for_a_capture(ranks2: RankPool, libraries: str) -> None:
    """All ranks refuse the capture with that rank's reason. Kernels that are loaded still work."""
    for result in ranks2.run(failing_capture, libraries):
        assert result["kind"] == "CapabilityError"
        assert "begin_capture on 'tp:0'" in result["text"]
        assert "rank 5: no compiler here" in result["text"]


# --- the end --------------------------------------------------------------------------------------------------


def ends(rank: int, world_size: int, directory: Path, libraries: str) -> None:
    me = CustomRank(rank, world_size, directory, libraries)
    custom = me.create()
    assert me.all_reduce(1, 64, BF16)
    buffer = me.buffer(64, BF16).data_ptr()
    custom.destroy(me.meet)
    for call in (
        lambda: custom.all_reduce(buffer, buffer, 64, BF16, 1),
        lambda: custom.all_gather(buffer, buffer, 8, 1),
        lambda: custom.add_rms_norm([buffer] * 5, 1, 64, 1e-5, BF16, 1),
        lambda: custom.use_stream(2),
        lambda: custom.begin_capture(1),
        custom.finish_capture,
        custom.check,
    ):
        with pytest.raises(ClosedError):
            call()
    me.finish()


@pytest.mark.guarantee("D56")
def test_destroy_leaves_nothing_and_later_calls_raise(ranks2: RankPool, libraries: str) -> None:
    """A second `destroy` does nothing, and every other call raises `ClosedError`."""
    ranks2.run(ends, libraries)


def unmet(rank: int, world_size: int, directory: Path, libraries: str) -> list[str]:
    me = CustomRank(rank, world_size, directory, libraries)
    custom = me.create()
    assert me.all_reduce(1, 64, BF16)
    custom.destroy(None)
    left = me.left()
    me.leave_alone()
    return left


def test_without_a_barrier_memory_that_peers_may_use_stays(ranks2: RankPool, libraries: str) -> None:
    """To free memory that a peer has open by IPC is undefined. At most the workspace stays, until the process ends."""
    for left in ranks2.run(unmet, libraries):
        assert len(left) <= 1
        assert all(each.startswith("memory memory-") for each in left)


_FREED = ("mem_free", "host_free", "vmm_unmap", "ipc_close", "module_unload")


def freed(me: CustomRank) -> int:
    """Return how many calls so far have freed or unmapped something."""
    return sum(me.driver.calls.get(name, 0) for name in _FREED)


def ends_beside_another_group(
    rank: int, world_size: int, directory: Path, libraries: str
) -> tuple[float, bool, bool]:
    me = CustomRank(rank, world_size, directory, libraries, staging_bytes=64 << 10)
    custom = me.create()
    assert me.all_reduce(1, 64, BF16)
    told = threading.Event()
    met: list[None] = []
    before = freed(me)
    with me.driver.hang():
        start = time.monotonic()
        custom.destroy(lambda: met.append(None), then=told.set)
        took_s = time.monotonic() - start
        was_freed = freed(me) > before or told.is_set()
        # Another thread may capture meanwhile; that the memory is freed then does not spoil it.
        me.driver.begin_capture(3)
    wait_until(told.is_set, "the memory to be freed", 10.0, 0.01)
    me.driver.end_capture(3)
    assert met == [], "a rank that goes on alone must wait for no other"
    had_record = not any("host memory" in each for each in me.driver.leaks())
    me.leave_alone()
    return took_s, was_freed, had_record


@pytest.mark.guarantee("D75")
def test_the_end_of_a_group_does_not_wait_for_another_groups_kernel(ranks2: RankPool, libraries: str) -> None:
    """Nothing is freed while a kernel spins, which may be a replay of this group; everything is, when it has ended."""
    for took_s, was_freed, had_record in ranks2.run(ends_beside_another_group, libraries):
        assert took_s < 5.0
        assert not was_freed
        assert had_record


def ends_during_a_capture(rank: int, world_size: int, directory: Path, libraries: str) -> list[str]:
    me = CustomRank(rank, world_size, directory, libraries)
    custom = me.create()
    assert me.all_reduce(1, 64, BF16)
    before = freed(me)
    me.driver.begin_capture(3)
    custom.destroy()
    me.driver.end_capture(3)
    assert freed(me) == before
    left = me.driver.leaks()
    me.health.close()
    me.health.release()
    me.meet()
    me.driver.release()
    return left


@pytest.mark.guarantee("D75")
def test_memory_stays_where_a_capture_hides_what_is_done(ranks2: RankPool, libraries: str) -> None:
    """The driver does not tell then whether a kernel still uses it."""
    for left in ranks2.run(ends_during_a_capture, libraries):
        assert any("host memory" in each for each in left)


def two_stuck_groups(rank: int, world_size: int, directory: Path, libraries: str) -> tuple[float, list[bool]]:
    """Make two groups; rank 0 calls in both, and rank 1 in neither."""
    both = [CustomRank(rank, world_size, _new(directory / name), libraries) for name in ("one", "two")]
    customs = [me.create() for me in both]
    spinning = []
    if rank == 0:
        for me, custom in zip(both, customs, strict=True):
            address = me.buffer(64, BF16).data_ptr()
            spinning.append(
                threading.Thread(target=custom.all_reduce, args=(address, address, 64, BF16, 1), daemon=True)
            )
            spinning[-1].start()
        wait_until(lambda: all(me.driver.works for me in both), "both kernels", 10.0, 0.01)
    start = time.monotonic()
    for custom in customs:
        custom.stop(0.2)
    for thread in spinning:
        thread.join(10.0)
    took_s = time.monotonic() - start
    alive = [thread.is_alive() for thread in spinning]
    for me in both:
        me.finish()
    return took_s, alive


@pytest.mark.guarantee("D75")
def test_kernels_of_all_groups_leave_before_memory_is_freed(ranks2: RankPool, libraries: str) -> None:
    """`stop` ends those that wait for a rank that does not come, and frees nothing; the deadline is 20 s."""
    for took_s, alive in ranks2.run(two_stuck_groups, libraries):
        assert not any(alive)
        assert took_s < 5.0


def _new(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def test_usage_errors_are_value_errors() -> None:
    """A caller that catches `ValueError` also catches a `UsageError`."""
    assert issubclass(ClosedError, UsageError)
