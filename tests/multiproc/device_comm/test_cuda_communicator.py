"""CudaCommunicator over real processes, with a driver that needs no GPU, our kernels from g++ and a stub of NCCL."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.errors import CommError, CudaError, GroupBrokenError, UsageError
from coordinator.testing import check_device_communicator
from device_comm.cuda.custom.all_reduce import CustomAllReduce
from device_comm.fused.finalize import finalized
from device_comm.fused.fp4 import blocks_quantised
from device_comm.fused.fp8 import quantised_rows
from device_comm.fused.rms_norm import rms_norm
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from tests.cuda_worlds import STREAM, cuda_world
from tests.custom_ranks import policy_file
from tests.fake_cuda import FakeFaults, fake_devices
from tests.harness import RankPool, run_ranks
from tests.log_records import fields_of, records_of
from tests.multiproc.device_comm.test_expert_exchange import ARENA, Tokens, it_combine, sent_by
from tests.nccl_ranks import HostStreams, stub_of
from tests.samples import sampled
from tests.waiting import wait_until
from tests.worlds import meet

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def keeps_contract(rank: int, world_size: int, directory: Path, native: str, settings: dict[str, Any]) -> str:
    with cuda_world(rank, world_size, directory, native, **settings) as (group, communicator, _):
        check_device_communicator(communicator, host=group, dtypes=DTYPES, destroy=False)
        return communicator.path("all_reduce", 1024, torch.float32).algorithm


@pytest.mark.guarantee("D57")
@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        *sampled(
            2,
            [
                ({}, "push_one_shot"),
                ({"deterministic": True}, "push_two_shot"),
                ({"custom_all_reduce": False}, "nccl"),
                ({"custom_all_reduce": False, "deterministic": True}, "nccl"),
            ],
        )
    ],
    ids=["fastest", "deterministic", "nccl", "deterministic without kernels"],
)
def test_the_contract_is_kept_whatever_carries_a_call(
    ranks2: RankPool, native: str, settings: dict[str, Any], algorithm: str
) -> None:
    """Every clause holds, with the bits of the sum in rank order, over our kernels, NCCL, or NCCL that only moves."""
    assert ranks2.run(keeps_contract, native, settings) == [algorithm] * 2


def sums_by_multimem(
    rank: int, world_size: int, directory: Path, native: str, lacking: int, settings: dict[str, Any]
) -> str:
    policy = policy_file(directory / f"policy-{rank}.json", world_size, multimem_two_shot=1 << 20)
    faults = FakeFaults(multicast=rank != lacking)
    with cuda_world(rank, world_size, directory, native, faults, policy_file=policy, **settings) as (
        group,
        communicator,
        driver,
    ):
        check_device_communicator(communicator, host=group, dtypes=DTYPES, destroy=False)
        algorithm = communicator.path("all_reduce", 1024, torch.float32).algorithm
        assert (driver.calls.get("multicast_bind", 0) > 0) == (algorithm == "multimem_two_shot")
        return algorithm


@pytest.mark.guarantee("D84")
@pytest.mark.parametrize(
    ("lacking", "settings", "algorithm"),
    [
        (-1, {}, "multimem_two_shot"),
        (1, {}, "nccl"),
        (-1, {"multimem": False}, "nccl"),
        (-1, {"deterministic": True}, "push_two_shot"),
    ],
    ids=["multimem", "a device without multicast", "the setting is off", "deterministic"],
)
def test_multimem_is_used_where_all_devices_have_it(
    ranks2: RankPool, native: str, lacking: int, settings: dict[str, Any], algorithm: str
) -> None:
    """The contract holds with it; the sums of two ranks have one order. What one device lacks, no rank uses."""
    assert ranks2.run(sums_by_multimem, native, lacking, settings) == [algorithm] * 2


def large_algorithm(
    rank: int, world_size: int, directory: Path, native: str, lacking: int, settings: dict[str, Any]
) -> str:
    policy = policy_file(directory / f"policy-{rank}.json", world_size, push_one_shot=1 << 10)
    faults = FakeFaults(multicast=rank != lacking)
    with cuda_world(rank, world_size, directory, native, faults, policy_file=policy, **settings) as (
        _,
        communicator,
        driver,
    ):
        communicator.prepare_buffers(0)
        algorithm = communicator.path("all_reduce", 256 << 10, torch.float32).algorithm
        assert (driver.calls.get("multicast_bind", 0) > 0) == (algorithm == "multimem_one_shot")
        return algorithm


@pytest.mark.guarantee("D84")
@pytest.mark.parametrize(
    ("lacking", "settings", "algorithm"),
    [
        (-1, {}, "multimem_one_shot"),
        (1, {}, "nccl"),
        (-1, {"multimem": False}, "nccl"),
        (-1, {"multimem_one_shot_bytes": 0}, "nccl"),
    ],
    ids=["asked for", "a device without multicast", "the setting is off", "not asked for"],
)
def test_one_shot_multimem_is_used_by_all_ranks_or_by_none(
    ranks2: RankPool, native: str, lacking: int, settings: dict[str, Any], algorithm: str
) -> None:
    """What one rank's device lacks, no rank uses, whatever the settings ask for."""
    asked = {"staging_bytes": 256 << 10, "multimem_one_shot_bytes": 256 << 10, **settings}
    assert ranks2.run(large_algorithm, native, lacking, asked) == [algorithm] * 2


def every_way_has_the_same_bits(rank: int, world_size: int, directory: Path, native: str) -> list[str]:
    with cuda_world(rank, world_size, directory, native) as (_, it, _driver):
        assert it.path("all_reduce", 4, torch.float32).algorithm == "undecided"
        it.prepare_buffers(0)
        ways = set()
        for count in (1, 7, 1024, 4096, 9000, 20000, 40000):
            for dtype in (torch.float32, torch.bfloat16):
                inputs = [
                    torch.randn(count, generator=torch.Generator().manual_seed(r)).to(dtype) for r in (0, 1)
                ]
                expected = reduce_in_rank_order(inputs, ReduceOperation.SUM)
                ways.add(it.path("all_reduce", inputs[0].nbytes, dtype).algorithm)
                for _ in range(3):
                    assert torch.equal(it.all_reduce(inputs[rank]), expected), (count, dtype)
                assert torch.equal(it.all_reduce_(inputs[rank].clone()), expected)
                shifted = torch.cat([inputs[rank][:1], inputs[rank]])[1:]
                assert torch.equal(it.all_reduce(shifted), expected)
                # The tensor begins at an odd address on one rank alone.
                odd = shifted if rank else inputs[rank].clone()
                assert torch.equal(it.all_reduce_(odd), expected)
        return sorted(ways)


def test_small_sums_use_our_kernels_and_large_ones_nccl(ranks2: RankPool, native: str) -> None:
    """Both give the same bits. A tensor at an odd address is copied and uses the same algorithm."""
    for ways in ranks2.run(every_way_has_the_same_bits, native):
        assert "push_one_shot" in ways
        assert "nccl" in ways


def norms(rank: int, world_size: int, directory: Path, native: str) -> list[bool]:
    with cuda_world(rank, world_size, directory, native) as (_, it, _driver):
        fused = []
        for rows, hidden in ((3, 256), (64, 512), (2, 100)):
            inputs = [
                torch.randn(rows, hidden, generator=torch.Generator().manual_seed(r)).bfloat16()
                for r in (0, 1)
            ]
            residual, weight = torch.randn(rows, hidden).bfloat16(), torch.randn(hidden).bfloat16()
            residual = it.broadcast(residual)
            weight = it.broadcast(weight)
            total = reduce_in_rank_order(inputs, ReduceOperation.SUM) + residual
            got, kept = it.all_reduce_add_rms_norm(inputs[rank], residual, weight, 1e-6)
            assert torch.equal(kept, total)
            assert torch.equal(got, rms_norm(total, weight, 1e-6))
            for scale in (None, torch.tensor([0.03])):
                quantised, scales, kept = it.all_reduce_add_rms_norm_fp8(
                    inputs[rank], residual, weight, 1e-6, scale
                )
                wanted, wanted_scales = quantised_rows(got, scale)
                assert torch.equal(kept, total)
                assert torch.equal(quantised.view(torch.uint8), wanted.view(torch.uint8))
                assert scales is scale or torch.equal(scales, wanted_scales)
            if hidden % 16 == 0:
                unit = torch.tensor(99.0)
                packed, blocks, kept = it.all_reduce_add_rms_norm_nvfp4(
                    inputs[rank], residual, weight, 1e-6, unit
                )
                wanted, wanted_scales = blocks_quantised(got, unit)
                assert torch.equal(kept, total)
                assert torch.equal(packed, wanted)
                assert torch.equal(blocks.view(torch.uint8), wanted_scales.view(torch.uint8))
            custom = it._custom
            assert isinstance(custom, CustomAllReduce)
            fused.append(custom.can_fuse(rows, hidden, torch.bfloat16, STREAM))
        return fused


def test_the_fused_norm_has_the_bits_of_its_parts_whether_it_is_fused_or_not(
    ranks2: RankPool, native: str
) -> None:
    """A small one takes one kernel, a large one an all-reduce and the norm, and an odd one torch's operations."""
    assert ranks2.run(norms, native) == [[True, False, False]] * 2


def finalizes(rank: int, world_size: int, directory: Path, native: str) -> list[bool]:
    with cuda_world(rank, world_size, directory, native) as (_, it, _driver):
        fused = []
        for tokens, hidden, has_shared in ((3, 256, True), (64, 2048, False), (2, 100, True), (0, 64, True)):
            every = []
            for r in range(world_size):
                made = torch.Generator().manual_seed(r)
                # The first rank has no row for any token.
                outputs = torch.randn(4 * r, hidden, generator=made).bfloat16()
                rows = torch.randint(-1, 4 * r, (tokens, 2), generator=made, dtype=torch.int32)
                weights = torch.rand(tokens, 2, generator=made)
                shared = torch.randn(tokens, hidden, generator=made).bfloat16() if has_shared else None
                every.append((outputs, rows, weights, shared))
            expected = reduce_in_rank_order([finalized(*each) for each in every], ReduceOperation.SUM)
            assert torch.equal(it.moe_finalize_all_reduce(*every[rank]), expected)
            custom = it._custom
            assert isinstance(custom, CustomAllReduce)
            fused.append(custom.can_finalize(tokens, hidden, torch.bfloat16, STREAM))
        return fused


def test_sums_of_experts_have_the_bits_of_the_steps_whether_they_are_fused_or_not(
    ranks2: RankPool, native: str
) -> None:
    """Small ones take one kernel, large ones a kernel and an all-reduce, and odd or empty ones torch's operations."""
    assert ranks2.run(finalizes, native) == [[True, False, False, False]] * 2


def launches(
    rank: int, world_size: int, directory: Path, native: str, major: int, is_allowed: bool
) -> dict[str, bool]:
    settings: dict[str, Any] = {"dependent_launch": is_allowed, "expert_arena_bytes": ARENA}
    devices = fake_devices(world_size, capability=(major, 0))
    with cuda_world(rank, world_size, directory, native, devices=devices, **settings) as (_, it, driver):
        it.all_reduce(torch.ones(64))
        it.reduce_scatter(torch.ones(64))
        it.all_gather(torch.ones(64))
        # Small ones are fused.
        for rows, hidden in ((3, 256), (64, 2048)):
            ones = torch.ones(rows, hidden).bfloat16()
            norm = ones, ones, ones[0], 1e-6
            it.all_reduce_add_rms_norm(*norm)
            it.all_reduce_add_rms_norm_fp8(*norm, None)
            it.all_reduce_add_rms_norm_nvfp4(*norm, torch.tensor(1.0))
            it.moe_finalize_all_reduce(
                ones, torch.zeros(rows, 2, dtype=torch.int32), torch.ones(rows, 2), None
            )
        routed = sent_by(it, Tokens(rank, 1, 4), rank, (4, 4), capacity=4)
        it_combine(it, routed.hidden_states, routed)
        return driver.launched()


@pytest.mark.parametrize(
    ("major", "is_allowed", "is_dependent"),
    [(9, True, True), (10, True, True), (8, True, False), (9, False, False)],
    ids=["sm_90", "sm_100", "sm_80", "the setting is off"],
)
def test_all_kernels_begin_while_the_one_before_them_ends(
    ranks2: RankPool, native: str, major: int, is_allowed: bool, is_dependent: bool
) -> None:
    """From sm_90 on and with `cuda.dependent_launch`; no result shows whether they do."""
    for launched in ranks2.run(launches, native, major, is_allowed):
        assert set(launched.values()) == {is_dependent}
        outputs = ("", "_fp8", "_nvfp4")
        wanted = {f"{begin}add_rms_norm{output}" for begin in ("push_", "") for output in outputs}
        wanted |= {"push_one_shot", "moe_finalize", "push_moe_finalize"}
        assert wanted | {"expert_dispatch", "expert_combine"} <= set(launched)


def captures(rank: int, world_size: int, directory: Path, native: str) -> list[float]:
    with cuda_world(rank, world_size, directory, native) as (_, it, driver):
        graph_stream = driver.stream_create()
        streams = it._streams
        assert isinstance(streams, HostStreams)
        own = torch.full((100,), float(rank + 1))
        with it.capture(graph_stream):
            streams.number = graph_stream
            assert it.all_reduce(own)[0] == 3.0  # the warm-up runs the call
            driver.begin_capture(graph_stream)
            result = it.all_reduce(own)
            gathered = it.all_gather(own)
            graph = driver.end_capture(graph_stream)
            streams.number = STREAM
        seen = []
        for step in range(20):
            own.fill_(float(rank + step))
            driver.replay(graph)
            seen.append(float(result[0]))
            assert gathered.tolist() == [float(step)] * 100 + [float(step + 1)] * 100
        # The stream that was in use before the capture is in use again; no call is needed.
        assert it.all_reduce(own)[0] == seen[-1]
        # A call on another stream runs behind it.
        streams.number = graph_stream
        before = len(driver.orders)
        assert it.all_reduce(own)[0] == seen[-1]
        assert driver.orders[before:] == [(STREAM, graph_stream)]
        driver.stream_synchronize(graph_stream)
        driver.stream_destroy(graph_stream)
        return seen


@pytest.mark.guarantee("D59")
def test_a_captured_graph_is_replayed_with_new_data(ranks2: RankPool, native: str) -> None:
    """Calls run in a warm-up and are recorded in a capture. A replay reads the tensors' data of that time."""
    expected = [float(2 * step + 1) for step in range(20)]
    assert ranks2.run(captures, native) == [expected] * 2


def replays_alone(rank: int, world_size: int, directory: Path, native: str) -> str:
    with cuda_world(rank, world_size, directory, native, meets=False, deadline_s=0.3) as (group, it, driver):
        graph_stream = driver.stream_create()
        streams = it._streams
        assert isinstance(streams, HostStreams)
        own = torch.ones(100)
        with it.capture(graph_stream):
            streams.number = graph_stream
            driver.begin_capture(graph_stream)
            it.all_reduce(own)
            graph = driver.end_capture(graph_stream)
            streams.number = STREAM
        if rank == 0:
            driver.replay(graph)  # its kernel gives up, because the other rank does not replay
            wait_until(lambda: group._health.is_broken, "the group to break", 20.0, 0.01)
        meet(rank, range(world_size), directory, "told")
        driver.stream_destroy(graph_stream)
        return "broken" if group._health.is_broken else "usable"


def test_a_replay_that_fails_breaks_the_group_without_another_call(native: str) -> None:
    """Without this, a program that only replays graphs would go on with data that no kernel has computed."""
    assert run_ranks(replays_alone, 2, native)[0] == "broken"


def a_launch_fails(rank: int, world_size: int, directory: Path, native: str) -> None:
    faults = FakeFaults()
    with cuda_world(rank, world_size, directory, native, faults, meets=False, deadline_s=2.0) as (
        _,
        it,
        _driver,
    ):
        own = torch.ones(64)
        assert it.all_reduce(own)[0] == 2.0
        if rank == 0:
            custom: Any = it._custom

            def launch(*arguments: object) -> None:
                raise CudaError("launch failed", library="libcuda", function="cuLaunchKernel", code=719)

            custom._launch = launch
            with pytest.raises(CudaError, match="launch"):
                it.all_reduce(own)
            with pytest.raises(GroupBrokenError):
                it.all_reduce(own)
        else:
            it.all_reduce(own)  # its kernel gives up, because the other rank launches nothing
            with pytest.raises(CommError):
                it.all_reduce(own)


def test_a_launch_that_fails_breaks_the_group(native: str) -> None:
    """Otherwise the peers would take the next launch for this one and would sum wrong data."""
    run_ranks(a_launch_fails, 2, native)


def first_call_in_capture(rank: int, world_size: int, directory: Path, native: str) -> None:
    with cuda_world(rank, world_size, directory, native) as (_, it, driver):
        driver.begin_capture(STREAM)
        with pytest.raises(UsageError, match="graph_capture"):
            it.all_reduce(torch.ones(8))
        driver.end_capture(STREAM)
        assert it.all_reduce(torch.ones(8))[0] == 2.0


@pytest.mark.guarantee("D59")
def test_a_first_call_that_is_captured_is_refused(ranks2: RankPool, native: str) -> None:
    """Ranks cannot exchange anything in a capture. The group is intact."""
    ranks2.run(first_call_in_capture, native)


def one_rank_lacks(rank: int, world_size: int, directory: Path, native: str, fault: str) -> list[str]:
    broken: dict[str, FakeFaults] = {
        "no peer access": FakeFaults(blocked=(0, 1)),
        "writes that vanish": FakeFaults(lost_writes=(0,)),
        "no export": FakeFaults(ipc=False, vmm=False),
        "no memory": FakeFaults(memory_bytes=1 << 12),
    }
    with records_of("device_comm.cuda.communicator") as records:
        faults = broken[fault] if rank == 1 else None
        with cuda_world(rank, world_size, directory, native, faults) as (group, it, _driver):
            for _ in range(3):
                assert it.all_reduce(torch.ones(64))[0] == 2.0
            path = it.path("all_reduce", 256, torch.float32)
            assert path.algorithm == "nccl"
            assert stub_of(it.library) is not None
            fields = {"group": group.unique_name, "rank": rank, "call": "all_reduce", "algorithm": "nccl"}
            assert [fields_of(record) for record in records] == [fields]
            return [path.reason, *[record.getMessage() for record in records]]


@pytest.mark.guarantee("D58")
@pytest.mark.parametrize("fault", ["no peer access", "writes that vanish", "no export", "no memory"])
def test_all_ranks_use_nccl_if_one_cannot_use_kernels(ranks2: RankPool, native: str, fault: str) -> None:
    """All ranks have the same reason, and each logs it once."""
    first, second = ranks2.run(one_rank_lacks, native, fault)
    assert first[0] == second[0]
    assert [len(first), len(second)] == [2, 2]
    assert first[0] in first[1]
