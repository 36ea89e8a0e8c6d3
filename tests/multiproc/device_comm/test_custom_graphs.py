"""CUDA graphs and streams of our own collectives, over real processes with a driver that needs no GPU.

The kernels are the product's source, which g++ compiles and which run as threads. The driver is fake and strict.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.custom_ranks import SMALL_POLICY, CustomRank
from tests.harness import RankPool
from tests.worlds import outcome_of

BF16 = torch.bfloat16


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
        seen.append(outcome_of(lambda: custom.begin_capture(7)))
        custom.end_capture()
        buffer = me.buffer(64, BF16).data_ptr()
        seen.append(outcome_of(lambda: custom.all_reduce(buffer, buffer, 64, BF16, 7)))
        seen.append(outcome_of(lambda: custom.begin_capture(7)))
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
    seen = [outcome_of(custom.check), outcome_of(custom.finish_capture)]
    me.leave_alone()
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
        result = outcome_of(custom.finish_capture)
        assert me.all_reduce(1, 64, BF16, stream=7)
    return result


def test_captures_that_differ(ranks2: RankPool, libraries: str) -> None:
    """All ranks learn that they captured different calls, and the group goes on."""
    for result in ranks2.run(differing_captures, libraries):
        assert result["kind"] == "DisagreementError"
        assert "16384" in result["text"]
        assert "16400" in result["text"]


def invalid_capture(rank: int, world_size: int, directory: Path, libraries: str) -> list[dict[str, Any]]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    with me.made() as custom:
        custom.begin_capture(7)
        if rank == 1:
            me.driver.faults.fail["launch"] = (me.driver.calls.get("launch", 0) + 1, 901)
            seen = [outcome_of(lambda: Graph(me, [512, 8192], 7))]
            me.driver.end_capture(7)
            custom.fail_capture(RuntimeError("another library has synchronized"))
        else:
            Graph(me, [512, 8192], 7)
            seen = [outcome_of(custom.finish_capture)]
        assert me.all_reduce(1, 64, BF16, stream=7)
        custom.begin_capture(7)
        graph = Graph(me, [512, 8192], 7)
        custom.finish_capture()
        graph.replay(3)
    return seen


@pytest.mark.guarantee("D53")
def test_a_capture_that_other_code_has_made_invalid_breaks_no_group(ranks2: RankPool, libraries: str) -> None:
    """The rank raises the driver's error, the other one learns of it at once, and the next capture works."""
    (other,), (own,) = ranks2.run(invalid_capture, libraries)
    assert own["kind"] == "CudaError"
    assert other["kind"] == "CapabilityError"
    assert (
        "rank 5: its graph capture has failed: RuntimeError: another library has synchronized"
        in other["text"]
    )
    assert other["seconds"] < 5.0


def invalid_branch(rank: int, world_size: int, directory: Path, libraries: str) -> dict[str, Any]:
    me = CustomRank(rank, world_size, directory, libraries)
    with me.made() as custom:
        driver, address = me.driver, me.buffer(64, BF16).data_ptr()
        assert custom.all_reduce(address, address, 64, BF16, 5)
        driver.begin_capture(5)
        event = driver.event_create()
        driver.event_record(event, 5)
        driver.stream_wait_event(6, event)
        driver.event_destroy(event)
        # The order itself fails, before the launch.
        driver.faults.fail["event_record"] = (driver.calls["event_record"] + 1, 901)
        result = outcome_of(lambda: custom.all_reduce(address, address, 64, BF16, 6))
        driver.end_capture(5)
        assert me.all_reduce(1, 64, BF16, stream=5)
    return result


def test_a_branch_of_an_invalid_capture_breaks_no_group(ranks2: RankPool, libraries: str) -> None:
    """Nothing of the capture runs, whether the launch or the order behind another branch has found it invalid."""
    for result in ranks2.run(invalid_branch, libraries):
        assert result["kind"] == "CudaError"
        assert "901" in result["text"]


def failing_open(rank: int, world_size: int, directory: Path, libraries: str) -> dict[str, Any]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    with me.made() as custom:
        custom.begin_capture(7)
        Graph(me, [8192], 7)
        if rank == 1:
            me.driver.faults.fail["ipc_open_handle"] = (me.driver.calls.get("ipc_open_handle", 0) + 1, 2)
        result = outcome_of(custom.finish_capture)
        assert me.all_reduce(1, 64, BF16, stream=7)
    return result


@pytest.mark.guarantee("D32")
def test_an_input_that_one_rank_cannot_open(ranks2: RankPool, libraries: str) -> None:
    """All ranks raise with that rank's reason, and the group goes on."""
    for result in ranks2.run(failing_open, libraries):
        assert result["kind"] == "CapabilityError"
        assert (
            "rank 5: the inputs of the other ranks cannot be read: ipc_open_handle on device 1 failed"
            in result["text"]
        )


# --- streams --------------------------------------------------------------------------------------------------


def streams(rank: int, world_size: int, directory: Path, libraries: str) -> list[dict[str, Any]]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    seen = []
    with me.made() as custom:
        orders = me.driver.orders
        assert me.all_reduce(1, 64, BF16, stream=1)
        assert orders == []
        # A call on another stream waits for what the last one had queued; a second call there waits for nothing.
        assert me.all_reduce(2, 64, BF16, stream=2)
        assert me.all_reduce(3, 64, BF16, stream=2)
        assert orders == [(1, 2)]
        custom.use_stream(1)
        custom.use_stream(2)
        assert orders == [(1, 2), (2, 1), (1, 2)]
        # Pushes may be captured on any stream, without `begin_capture`, once their kernels are loaded.
        assert me.all_reduce(3, 2048, BF16, stream=2)
        graph = Graph(me, [64, 2048], 3)
        graph.replay(3)
        assert len(orders) == 3
        me.driver.begin_capture(3)
        seen.append(outcome_of(lambda: custom.use_stream(3)))
        late = me.buffer(64, torch.float16).data_ptr()
        seen.append(outcome_of(lambda: custom.all_reduce(late, late, 64, torch.float16, 3)))
        me.driver.end_capture(3)
        seen.append(outcome_of(lambda: custom.all_reduce(late + 2, late, 4, BF16, 2)))
        # What was queued on a stream that is captured by now cannot be waited for.
        me.driver.begin_capture(2)
        seen.append(outcome_of(lambda: me.all_reduce(1, 64, BF16, stream=1)))
        me.driver.end_capture(2)
        assert me.all_reduce(4, 64, BF16, stream=1)
    return seen


@pytest.mark.guarantee("D55")
def test_calls_on_several_streams_run_one_after_the_other(ranks2: RankPool, libraries: str) -> None:
    """A change of stream waits for the earlier stream, except between one that is captured and one that is not."""
    for captured, late, misaligned, behind in ranks2.run(streams, libraries):
        everything = (captured, late, misaligned, behind)
        assert [each["kind"] for each in everything] == ["UsageError"] * 4
        assert "stream 0x3 is being captured" in captured["text"]
        assert "stream 0x1 cannot be ordered behind stream 0x2" in behind["text"]
        assert "call begin_capture before" in late["text"]
        assert "no multiple of 16" in misaligned["text"]


def one_is_left_out(
    rank: int, world_size: int, directory: Path, libraries: str, how: str
) -> list[dict[str, Any]]:
    me = CustomRank(rank, world_size, directory, libraries)
    me.create()
    driver = me.driver
    first = driver.stream_create()
    assert me.all_reduce(1, 64, BF16, stream=first)
    stream = 0
    if rank == 1 and how == "the legacy stream":
        driver.begin_capture(9, is_blocking=True)
    if rank == 1 and how == "an event":
        driver.faults.fail["event_create"] = (driver.calls.get("event_create", 0) + 1, 2)
    if rank == 1 and how == "a destroyed stream":
        driver.stream_destroy(first)
    seen = [outcome_of(lambda: me.all_reduce(2, 64, BF16, stream=stream))]
    if rank == 1 and how == "the legacy stream":
        driver.end_capture(9)
    # What makes the next call fail, if anything does, is that the group is broken.
    seen.append(outcome_of(lambda: me.all_reduce(3, 64, BF16, stream=first if how == "an event" else 5)))
    me.meet()
    if first in driver._streams:
        driver.stream_destroy(first)
    me.leave_alone()
    return seen


@pytest.mark.guarantee("D55")
@pytest.mark.parametrize("how", ["the legacy stream", "an event", "a destroyed stream"])
def test_a_call_that_one_rank_does_not_queue_breaks_the_group(
    ranks2: RankPool, libraries: str, how: str
) -> None:
    """Otherwise the others would take its next call for this one, and every later sum would be silently wrong."""
    (other, later), (own, refused) = ranks2.run(one_is_left_out, libraries, how)
    assert own["kind"] == "CudaError"
    assert other["kind"] == "GroupBrokenError"
    assert other["seconds"] < 10.0, "the kernel does not wait until its deadline of 20 s"
    assert [later["kind"], refused["kind"]] == ["GroupBrokenError"] * 2
    words = {"the legacy stream": "906", "an event": "OUT_OF_MEMORY", "a destroyed stream": "must outlive"}
    assert words[how] in own["text"]
    assert words[how] in other["text"]


def forked(rank: int, world_size: int, directory: Path, libraries: str) -> list[list[int]]:
    me = CustomRank(rank, world_size, directory, libraries, policy=SMALL_POLICY)
    with me.made() as custom:
        driver = me.driver
        tensors = [me.buffer(64, BF16) for _ in range(4)]

        def call(index: int, stream: int) -> None:
            address = tensors[index].data_ptr()
            assert custom.all_reduce(address, address, 64, BF16, stream)

        def fork(stream: int, into: int) -> None:
            event = driver.event_create()
            driver.event_record(event, stream)
            driver.stream_wait_event(into, event)
            driver.event_destroy(event)

        # On the stream of the last call, which is captured from here on, and on two branches of the same graph.
        call(0, 5)
        driver.begin_capture(5)
        call(0, 5)
        fork(5, 6)
        fork(5, 8)
        driver.orders.clear()
        call(1, 6)
        call(2, 6)
        call(3, 8)
        call(1, 5)
        in_graph = list(driver.orders)
        fork(6, 5)
        fork(8, 5)
        graph = driver.end_capture(5)
        assert graph.launches == ["push_one_shot"] * 5
        # Another graph, and calls beside it, have an order of their own.
        driver.orders.clear()
        driver.begin_capture(6)
        call(1, 6)
        driver.end_capture(6)
        call(0, 5)
        call(0, 7)
        return [list(pair) for pair in in_graph + driver.orders]


@pytest.mark.guarantee("D55")
def test_branches_of_one_capture_are_chained(ranks2: RankPool, libraries: str) -> None:
    """Two kernels of one group in different branches would run at once in each replay, with one epoch and one arena."""
    for orders in ranks2.run(forked, libraries):
        assert orders == [[5, 6], [6, 8], [8, 5], [5, 7]]
