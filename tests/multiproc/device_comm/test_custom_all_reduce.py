"""The host's side of our own CUDA collectives, over real processes with a driver that needs no GPU.

The kernels are the product's source, which g++ compiles and which run as threads. The driver is fake and strict.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from device_comm.cuda.policy.decision import Algorithm
from device_comm.rms_norm import add_rms_norm
from shm_broadcast.errors import ClosedError, CommError, UsageError
from tests.custom_ranks import FIRST_RANK, SMALL_POLICY, CustomRank, shuffled
from tests.fake_cuda import violations
from tests.harness import RankPool, run_ranks
from tests.native.cuda.host_build import build_host_library

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BF16 = torch.bfloat16
SIZES = [1, 7, 8, 511, 1024, 1025, 2049, 4096]
"""Numbers of elements: part of a vector, whole vectors and a tail, both sides of the one-shot push's limit of 2 KiB."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile kernels for 2 ranks of every dtype and for 3 ranks of bfloat16, once for all tests."""
    directory = tmp_path_factory.mktemp("kernels")
    for dtype in ("bfloat16", "float16", "float32"):
        build_host_library(2, dtype, directory)
    build_host_library(3, "bfloat16", directory)
    return str(directory)


@pytest.fixture(scope="module")
def ranks3() -> Iterator[RankPool]:
    """Start three processes that run one function after another."""
    with RankPool(3) as pool:
        yield pool


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the error that `call` raised."""
    start = time.monotonic()
    error: BaseException | None = None
    try:
        call()
    except CommError as raised:
        error = raised
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "missing": list(getattr(error, "missing", ())),
        "peers": list(getattr(error, "peers", ())),
        "seconds": time.monotonic() - start,
    }


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
    expected, expected_sum = add_rms_norm(total, residual, weight, 1e-5)
    out, out_sum = (me.buffer(rows * hidden, dtype).view(rows, hidden) for _ in range(2))
    input_ = me.buffer(rows * hidden, dtype)
    for fused in (True, False):
        input_.copy_(me.inputs(seed, rows * hidden, dtype)[me.rank] if fused else total.flatten())
        addresses = [each.data_ptr() for each in (input_, residual, weight, out, out_sum)]
        if fused:
            assert me.custom.all_reduce_add_rms_norm(addresses, rows, hidden, 1e-5, dtype, 1)
        else:
            me.custom.add_rms_norm(addresses, rows, hidden, 1e-5, dtype, 1)
        assert torch.equal(out, expected)
        assert torch.equal(out_sum, expected_sum)
        out.zero_()
    assert not me.custom.can_fuse(rows, hidden + 1, dtype, 1)
    assert not me.custom.can_fuse(1 << 16, hidden, dtype, 1)


@pytest.mark.guarantee("D52")
def test_sums_are_those_in_rank_order(ranks2: RankPool, libraries: str) -> None:
    """Every bit is right for every dtype, many sizes, and algorithms and operations in turn, in place and not."""
    for seen in ranks2.run(every_size, libraries, 3, False):
        assert seen == ["nccl", "push_one_shot", "push_two_shot"]


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


# --- graphs ---------------------------------------------------------------------------------------------------


class Graph:
    """One captured graph of all-reduces, with the inputs and outputs that it keeps."""

    def __init__(
        self,
        me: CustomRank,
        counts: list[int],
        stream: int,
        *,
        in_place: bool = False,
        inputs: list[torch.Tensor] | None = None,
    ) -> None:
        assert me.custom is not None
        self.me, self.counts = me, counts
        self.inputs = inputs or [me.buffer(count, BF16) for count in counts]
        self.outputs = self.inputs if in_place else [me.buffer(count, BF16) for count in counts]
        me.driver.begin_capture(stream)
        self.algorithms = []
        for count, input_, output in zip(counts, self.inputs, self.outputs, strict=True):
            self.algorithms.append(me.custom.plan("all_reduce", BF16, 2 * count, stream).algorithm.value)
            assert me.custom.all_reduce(input_.data_ptr(), output.data_ptr(), count, BF16, stream)
        self.graph = me.driver.end_capture(stream)

    def replay(self, seed: int, *, look: bool = True) -> None:
        for number, (count, input_) in enumerate(zip(self.counts, self.inputs, strict=True)):
            if look:
                input_.copy_(self.me.inputs(seed + number, count, BF16)[self.me.rank])
        self.me.driver.replay(self.graph)
        if look:
            for number, (count, output) in enumerate(zip(self.counts, self.outputs, strict=True)):
                assert torch.equal(output, self.me.reference(seed + number, count, BF16)), (seed, count)


ALL_COUNTS = [512, 4096, 8192, 12000]
"""Counts that select the one-shot push, the two-shot push, the one-shot pull and the two-shot pull."""


def replays(
    rank: int, world_size: int, directory: Path, libraries: str, replays: int, staged: list[int]
) -> list[str]:
    faults = {"expandable_segments": rank in staged}
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY, faults=faults)
    with me.made() as custom:
        opened = me.driver.calls.get("ipc_open_handle", 0)
        custom.begin_capture(7)
        # A warm-up call on the stream, before its capture, runs.
        assert me.all_reduce(0, 512, BF16, stream=7)
        graph = Graph(me, ALL_COUNTS, 7)
        in_place = Graph(me, [8192, 12000], 7, in_place=True)
        custom.finish_capture()
        for number in range(replays):
            graph.replay(10 * number, look=number % 20 == 0)
            if number % 40 == 0:
                in_place.replay(10 * number)
                assert me.all_reduce(number, 1000, BF16, stream=7)
        custom.check()
        opened = me.driver.calls.get("ipc_open_handle", 0) - opened
        copied = me.driver.calls.get("memcpy_dtod", 0)
        # Each pull opens one allocation of each peer whose memory can be exported.
        assert opened == 2 * sum(peer not in staged for peer in range(world_size) if peer != rank)
        assert copied == (4 if rank in staged else 2)
        return list(graph.algorithms)


ALGORITHMS = ["push_one_shot", "push_two_shot", "pull_one_shot", "pull_two_shot"]


@pytest.mark.guarantee("D52")
def test_graphs_are_replayed(ranks2: RankPool, libraries: str) -> None:
    """A graph of all four algorithms gives the right bits in two hundred replays with eager calls between them."""
    for algorithms in ranks2.run(replays, libraries, 200, [], timeout_s=120.0):
        assert algorithms == ALGORITHMS


@pytest.mark.guarantee("D53")
@pytest.mark.parametrize("staged", [[1], [0, 1, 2]])
def test_inputs_that_cannot_be_exported_are_copied(
    ranks3: RankPool, libraries: str, staged: list[int]
) -> None:
    """If memory cannot be exported on one rank or on all, the graph copies it and uses the same algorithm."""
    for algorithms in ranks3.run(replays, libraries, 3, staged):
        assert algorithms == ALGORITHMS


def pooled_inputs(rank: int, world_size: int, directory: Path, libraries: str) -> None:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    with me.made() as custom:
        pool = me.buffer(60000, BF16)
        opened = me.driver.calls.get("ipc_open_handle", 0)
        graphs = []
        for begin in (0, 30000):
            # At another offset on every rank, behind the base of the allocation.
            parts = pool[begin + 8 * (rank + 1) :]
            custom.begin_capture(7)
            graphs.append(Graph(me, [8192, 12000], 7, inputs=[parts[:8192], parts[9000:21000]]))
            custom.finish_capture()
        for seed, graph in enumerate(graphs):
            assert graph.algorithms == ["pull_one_shot", "pull_two_shot"]
            graph.replay(seed)
        assert me.driver.calls.get("memcpy_dtod", 0) == 0
        assert me.driver.calls.get("ipc_open_handle", 0) - opened == world_size - 1


@pytest.mark.guarantee("D32")
def test_inputs_are_mapped_where_they_lie(ranks2: RankPool, libraries: str) -> None:
    """Any part of an allocation is read in place, and an allocation is opened once for all captures."""
    ranks2.run(pooled_inputs, libraries)


def unfinished(rank: int, world_size: int, directory: Path, libraries: str) -> list[dict[str, Any]]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    seen = []
    with me.made() as custom:
        custom.begin_capture(7)
        Graph(me, [512, 8192], 7)
        seen.append(outcome(lambda: custom.begin_capture(7)))
        custom.end_capture()
        buffer = me.buffer(64, BF16).data_ptr()
        seen.append(outcome(lambda: custom.all_reduce(buffer, buffer, 64, BF16, 7)))
        seen.append(outcome(lambda: custom.begin_capture(7)))
        custom.finish_capture()
        assert me.all_reduce(1, 64, BF16, stream=7)
        # A capture that recorded no call must be finished too.
        custom.begin_capture(7)
        custom.finish_capture()
    return seen


@pytest.mark.guarantee("D53")
def test_a_capture_is_finished_before_the_next_call(ranks2: RankPool, libraries: str) -> None:
    """A call or a capture raises, without harm, until all ranks have exchanged the captured inputs."""
    for begun, call, again in ranks2.run(unfinished, libraries):
        assert [each["kind"] for each in (begun, call, again)] == ["UsageError"] * 3
        assert "a capture has begun already" in begun["text"]
        assert "finish_capture first, on all ranks" in call["text"]


def replayed_too_early(rank: int, world_size: int, directory: Path, libraries: str) -> list[dict[str, Any]]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    custom = me.create()
    custom.begin_capture(7)
    graph = Graph(me, [8192, 12000], 7)
    graph.outputs[0].fill_(3)
    me.driver.replay(graph.graph)
    assert torch.equal(graph.outputs[0], torch.full_like(graph.outputs[0], 3))
    seen = [outcome(custom.check), outcome(custom.finish_capture)]
    leave_alone(me)
    return seen


@pytest.mark.guarantee("D53")
def test_a_replay_before_the_exchange_breaks_the_group(ranks2: RankPool, libraries: str) -> None:
    """The kernels read and write nothing, and the next call says what was wrong."""
    for first, later in ranks2.run(replayed_too_early, libraries):
        # The rank that looks second may learn it from the first one.
        assert first["kind"] in ("UsageError", "GroupBrokenError")
        assert "replayed before finish_capture" in first["text"]
        assert later["kind"] == "GroupBrokenError"


def differing_captures(rank: int, world_size: int, directory: Path, libraries: str) -> dict[str, Any]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    with me.made() as custom:
        custom.begin_capture(7)
        Graph(me, [8192] if rank == 0 else [8200], 7)
        result = outcome(custom.finish_capture)
        assert me.all_reduce(1, 64, BF16, stream=7)
    return result


def test_captures_that_differ(ranks2: RankPool, libraries: str) -> None:
    """All ranks learn that they captured different calls, and the group goes on."""
    for result in ranks2.run(differing_captures, libraries):
        assert result["kind"] == "DisagreementError"
        assert "16384" in result["text"]
        assert "16400" in result["text"]


def failing_open(rank: int, world_size: int, directory: Path, libraries: str) -> dict[str, Any]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    with me.made() as custom:
        custom.begin_capture(7)
        Graph(me, [8192], 7)
        if rank == 1:
            me.driver.faults.fail["ipc_open_handle"] = (me.driver.calls.get("ipc_open_handle", 0) + 1, 2)
        result = outcome(custom.finish_capture)
        assert me.all_reduce(1, 64, BF16, stream=7)
    return result


@pytest.mark.guarantee("D32")
def test_an_input_that_one_rank_cannot_open(ranks2: RankPool, libraries: str) -> None:
    """All ranks raise with that rank's reason, and the group goes on."""
    for result in ranks2.run(failing_open, libraries):
        assert result["kind"] == "CapabilityError"
        assert "rank 5: ipc_open_handle on device 1 failed" in result["text"]


# --- streams --------------------------------------------------------------------------------------------------


def streams(rank: int, world_size: int, directory: Path, libraries: str) -> list[dict[str, Any]]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    seen = []
    with me.made() as custom:
        custom.use_stream(1)
        assert me.all_reduce(1, 64, BF16, stream=1)
        seen.append(outcome(lambda: me.all_reduce(1, 64, BF16, stream=2)))
        custom.use_stream(2)
        assert me.all_reduce(2, 64, BF16, stream=2)
        assert me.driver.calls["stream_wait_event"] == 1
        seen.append(outcome(lambda: me.all_reduce(1, 64, BF16, stream=1)))
        # Pushes may be captured on any stream, without `begin_capture`, once their kernels are loaded.
        assert me.all_reduce(3, 2048, BF16, stream=2)
        graph = Graph(me, [64, 2048], 3)
        graph.replay(3)
        me.driver.begin_capture(3)
        seen.append(outcome(lambda: custom.use_stream(3)))
        late = me.buffer(64, torch.float16).data_ptr()
        seen.append(outcome(lambda: custom.all_reduce(late, late, 64, torch.float16, 3)))
        me.driver.end_capture(3)
        seen.append(outcome(lambda: custom.all_reduce(late + 2, late, 4, BF16, 2)))
    return seen


@pytest.mark.guarantee("D55")
def test_one_stream_at_a_time(ranks2: RankPool, libraries: str) -> None:
    """A call on a second stream raises and names both. `use_stream` changes the stream; a captured one is allowed."""
    for second, first, captured, late, misaligned in ranks2.run(streams, libraries):
        everything = (second, first, captured, late, misaligned)
        assert [each["kind"] for each in everything] == ["UsageError"] * 5
        assert "on stream 0x2" in second["text"]
        assert "in use on stream 0x1" in second["text"]
        assert "in use on stream 0x2" in first["text"]
        assert "is being captured" in captured["text"]
        assert "call begin_capture before" in late["text"]
        assert "no multiple of 16" in misaligned["text"]


# --- failures -------------------------------------------------------------------------------------------------


def leave_alone(me: CustomRank) -> None:
    """Destroy alone, without the other ranks. Only the workspace is left, which peers may have open."""
    assert me.custom is not None
    me.custom.destroy()
    me.custom.destroy()
    me.health.close()
    assert all(each.startswith("memory memory-") for each in me.driver.leaks())
    assert len(me.driver.leaks()) <= 1
    assert violations(me.directory) == []
    me.health.release()
    me.meet()
    me.driver.release()


def one_is_late(rank: int, world_size: int, directory: Path, libraries: str) -> list[dict[str, Any]]:
    me = CustomRank(rank, world_size, directory, libraries, deadline_s=0.3)
    me.create()
    assert me.all_reduce(1, 64, BF16)
    seen = []
    if rank != 1:
        seen.append(outcome(lambda: me.all_reduce(2, 64, BF16)))
        seen.append(outcome(lambda: me.all_reduce(2, 64, BF16)))
    me.meet()
    # The ranks that know of the failure have no barrier at the end. Memory that others may have open stays.
    leave_alone(me)
    return seen


@pytest.mark.guarantee("D54")
def test_a_late_rank_is_named(ranks3: RankPool, libraries: str) -> None:
    """Kernels give up at their deadline, the error names the late rank, and later calls raise at once."""
    for first, later in [seen for seen in ranks3.run(one_is_late, libraries) if seen]:
        assert (first["kind"], first["missing"]) == ("CommTimeoutError", [FIRST_RANK + 1])
        assert 0.3 <= first["seconds"] < 5.0
        assert f"no answer from rank {FIRST_RANK + 1}" in first["text"]
        assert later["kind"] == "GroupBrokenError"


def one_dies(rank: int, world_size: int, directory: Path, libraries: str) -> list[dict[str, Any]]:
    me = CustomRank(rank, world_size, directory, libraries)
    custom = me.create()
    assert me.all_reduce(1, 64, BF16)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = [outcome(lambda: me.all_reduce(2, 64, BF16)), outcome(custom.check)]
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
    result = outcome(me.create)
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


def failing_capture(rank: int, world_size: int, directory: Path, libraries: str) -> dict[str, Any]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    with me.made() as custom:
        me.broken_compiler = rank == 1
        result = outcome(lambda: custom.begin_capture(7))
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
    left = me.driver.leaks()
    leave_alone(me)
    return left


def test_without_a_barrier_memory_that_peers_may_use_stays(ranks2: RankPool, libraries: str) -> None:
    """To free memory that a peer has open by IPC is undefined. At most the workspace stays, until the process ends."""
    for left in ranks2.run(unmet, libraries):
        assert len(left) <= 1
        assert all(each.startswith("memory memory-") for each in left)


def test_usage_errors_are_value_errors() -> None:
    """A caller that catches `ValueError` also catches a `UsageError`."""
    assert issubclass(ClosedError, UsageError)
