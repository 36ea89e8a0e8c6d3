"""Dispatch and combine by the expert-parallel kernels over real processes, with a fake driver and kernels from g++."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.group import GroupCoordinator
from device_comm import all2all
from device_comm.all2all import Choice, DispatchForm, ExpertPlacement, RoutedTokens, contiguous_ranks
from shm_broadcast.errors import CommError
from tests.cuda_worlds import STREAM, cuda_world
from tests.fake_cuda import FakeFaults
from tests.harness import RankPool, run_ranks
from tests.native.cuda.host_build import build_host_library, shared_folder
from tests.native.nccl_stub.build import build_stub
from tests.nccl_ranks import HostStreams
from tests.waiting import wait_until
from tests.worlds import meet, outcome_of

EXCHANGE = DispatchForm.ALL_TO_ALL
ARENA = 1 << 16
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the stub of NCCL and the kernels for two and three ranks."""
    folder = tmp_path_factory.mktemp("cuda")
    build_stub(folder)
    for size, dtype in ((2, "float32"), (2, "float16"), (2, "bfloat16"), (3, "bfloat16")):
        library = build_host_library(size, dtype, shared_folder(tmp_path_factory))
        (folder / library.name).symlink_to(library)
    return str(folder)


class Tokens:
    """The tokens of one rank: other ones for each seed and rank."""

    def __init__(
        self, rank: int, seed: int, count: int, *, dtype: torch.dtype = BF16, hidden: int = 16
    ) -> None:
        made = torch.Generator().manual_seed(100 * seed + rank)
        self.hidden = torch.randn(count, hidden, generator=made).to(dtype)
        self.ids = torch.randint(-1, 6, (count, 2), generator=made)
        self.weights = torch.rand(count, 2, generator=made)
        self.extra = torch.arange(count, dtype=torch.int64).view(-1, 1) + 1000 * rank


def sent_by(
    communicator: Any, tokens: Tokens, rank: int, counts: tuple[int, ...], **options: Any
) -> RoutedTokens:
    """Dispatch over a communicator, with a placement of six experts."""
    size = len(counts)
    placement = ExpertPlacement(contiguous_ranks(6, size), rank, size, torch.device("cpu"))
    options = {"capacity": None, "max_rows": None, "is_static": True, **options}
    return all2all.dispatch(
        communicator,
        tokens.hidden,
        tokens.ids,
        tokens.weights,
        [tokens.extra],
        placement,
        counts,
        Choice(EXCHANGE, "the test's"),
        options.pop("capacity"),
        options.pop("max_rows"),
        **options,
    )


def same(one: RoutedTokens, other: RoutedTokens) -> bool:
    """Return whether rows, ids, weights, further tensors, lost tokens and counts are equal."""
    pairs = [
        *((one.hidden_states, other.hidden_states), (one.topk_ids, other.topk_ids)),
        *((one.topk_weights, other.topk_weights), (one.local_ids, other.local_ids)),
        *((one.lost, other.lost), (one.received, other.received)),
        *zip(one.extra_tensors, other.extra_tensors, strict=True),
    ]
    return all(a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def plane_of(group: GroupCoordinator) -> Any:
    """Return the communicator of the world's CPU tensors, which has no kernels."""
    return group._routing._communicator


def keeps_the_contract(rank: int, world_size: int, directory: Path, native: str) -> list[str]:
    reasons = set()
    with cuda_world(rank, world_size, directory, native, expert_arena_bytes=ARENA) as (group, it, _):
        plain = plane_of(group)
        for seed, (sizes, dtype, options) in enumerate(
            (
                ((5, 7), BF16, {"capacity": 7}),
                ((0, 9), torch.float32, {"capacity": 9}),
                ((9, 4), torch.float16, {"capacity": 3}),  # some do not fit
                ((6, 8), BF16, {"max_rows": 20}),
                ((0, 0), BF16, {"max_rows": 1}),
                ((300, 200), BF16, {"max_rows": 500}),
            )
        ):
            tokens = Tokens(rank, seed, sizes[rank], dtype=dtype)
            routed = sent_by(it, tokens, rank, sizes, **options)
            wanted = sent_by(plain, tokens, rank, sizes, **options)
            assert same(routed, wanted), options
            lost = routed.lost
            assert lost is not None
            reasons.add(routed.choice.reason)
            assert "without kernels: this communicator has no kernels" in wanted.choice.reason
            each = torch.tanh(routed.hidden_states.float())[:, None] * torch.tensor([[2.0], [3.0]])
            for results in (routed.hidden_states * 3, each.to(dtype)):
                one, other = it_combine(it, results, routed), it_combine(plain, results, wanted)
                assert one.dtype == other.dtype
                assert torch.equal(one.nan_to_num(9e3), other.nan_to_num(9e3)), options
                assert torch.equal(one.isnan().any(1), lost)
        it.check()
    return sorted(reasons)


def it_combine(communicator: Any, results: torch.Tensor, routed: RoutedTokens) -> torch.Tensor:
    """Combine over a communicator."""
    return all2all.combine(communicator, results, routed)


@pytest.mark.guarantee("D80")
def test_the_kernels_keep_the_contract_of_the_all_to_all(ranks2: RankPool, native: str) -> None:
    """Padded and compact rows, both kinds of results, and lost tokens are those of shared memory."""
    assert ranks2.run(keeps_the_contract, native) == [["the test's; by kernels"]] * 2


# --- the device alone -------------------------------------------------------------------------------------------


@contextmanager
def nothing_read() -> Iterator[None]:
    """Refuse within the context what makes the host wait for a device: reading a value of a tensor."""
    names = ("item", "tolist", "nonzero", "__bool__", "__int__", "cpu", "numpy")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:

            def refuse(*_: Any, called: str = name) -> Any:
                raise AssertionError(f"{called} of a tensor waits for the device")

            patch.setattr(torch.Tensor, name, refuse)
        yield


def waits_for_nothing(rank: int, world_size: int, directory: Path, native: str) -> dict[str, int]:
    with cuda_world(rank, world_size, directory, native, expert_arena_bytes=ARENA) as (_, it, driver):
        tokens = Tokens(rank, 1, 5)
        routed = sent_by(it, tokens, rank, (5, 5), capacity=5)
        it_combine(it, routed.hidden_states, routed)
        before = dict(driver.calls)
        for options in ({"capacity": 5}, {"max_rows": 12}):
            with nothing_read():
                routed = sent_by(it, tokens, rank, (5, 5), **options)
                result = it_combine(it, routed.hidden_states, routed)
            assert result.shape == tokens.hidden.shape
        return {name: count - before.get(name, 0) for name, count in driver.calls.items()}


@pytest.mark.guarantee("D85")
def test_neither_call_waits_for_the_device(ranks2: RankPool, native: str) -> None:
    """After the first calls, only launches reach the driver, and no value of a tensor is read."""
    for made in ranks2.run(waits_for_nothing, native):
        assert {name for name, count in made.items() if count} == set()


def captures(rank: int, world_size: int, directory: Path, native: str, options: dict[str, int]) -> list[str]:
    with cuda_world(rank, world_size, directory, native, expert_arena_bytes=ARENA) as (group, it, driver):
        plain, streams, sizes = plane_of(group), it._streams, (6, 4)
        assert isinstance(streams, HostStreams)
        graph_stream = driver.stream_create()
        tokens = Tokens(rank, 0, sizes[rank])
        with it.capture(graph_stream):
            streams.number = graph_stream
            driver.begin_capture(graph_stream)
            early = outcome_of(
                lambda: sent_by(it, tokens, rank, sizes, is_captured=True, **options).choice.reason
            )
            driver.end_capture(graph_stream)
            streams.number = STREAM
        with it.capture(graph_stream):
            streams.number = graph_stream
            routed = sent_by(it, tokens, rank, sizes, **options)  # the warm-up
            it_combine(it, routed.hidden_states, routed)
            driver.begin_capture(graph_stream)
            routed = sent_by(it, tokens, rank, sizes, is_captured=True, **options)
            result = it_combine(it, routed.hidden_states, routed)
            unloaded = outcome_of(lambda: it_combine(it, routed.hidden_states.float(), routed))
            graph = driver.end_capture(graph_stream)
            streams.number = STREAM
        assert graph.launches == ["expert_dispatch", "expert_combine"]
        for seed in range(1, 6):
            new = Tokens(rank, seed, sizes[rank])
            for old, now in (
                (tokens.hidden, new.hidden),
                (tokens.ids, new.ids),
                (tokens.weights, new.weights),
            ):
                old.copy_(now)
            driver.replay(graph)
            wanted = sent_by(plain, tokens, rank, sizes, **options)
            assert same(routed, wanted), seed
            assert torch.equal(result, it_combine(plain, wanted.hidden_states, wanted)), seed
        # An eager call on the stream of before runs between replays.
        again = sent_by(it, tokens, rank, sizes, **options)
        assert same(again, wanted)
        driver.replay(graph)
        assert same(routed, wanted)
        driver.stream_synchronize(graph_stream)
        driver.stream_destroy(graph_stream)
        again = sent_by(it, tokens, rank, sizes, **options)
        assert same(again, wanted)
        return [early["kind"], early["value"] or early["text"], unloaded["kind"], unloaded["text"]]


@pytest.mark.guarantee("D85")
@pytest.mark.parametrize("options", [{"capacity": 6}, {"max_rows": 10}], ids=["padded", "compact"])
def test_a_replay_follows_the_ids_of_its_time(ranks2: RankPool, native: str, options: dict[str, int]) -> None:
    """The graph holds two launches; each replay routes anew. Nothing is built or loaded in a capture.

    There, rows with a capacity go without kernels if none were built before; the rest is refused.
    """
    for kind, text, other, why in ranks2.run(captures, native, options):
        assert (kind, other) == ("UsageError" if "max_rows" in options else "NoneType", "UsageError")
        assert ("cannot be captured" in text) == ("max_rows" in options)
        assert "there were no kernels for it before the capture" in text
        assert "float32 cannot be loaded" in why


# --- what is not carried ----------------------------------------------------------------------------------------


def goes_elsewhere(
    rank: int, world_size: int, directory: Path, native: str, settings: dict[str, Any], change: str
) -> list[str]:
    faults = FakeFaults(**settings.pop("faults")) if rank == 1 and "faults" in settings else FakeFaults()
    settings.pop("faults", None)
    chosen = {"expert_arena_bytes": ARENA, **settings}
    with cuda_world(rank, world_size, directory, native, faults, **chosen) as (group, it, _):
        tokens = Tokens(rank, 3, 4, hidden=20 if change == "rows" else 16)
        if change == "ids":
            tokens.ids = tokens.ids.to(torch.int16)
        if change == "extra":
            tokens.extra = tokens.extra.to(torch.int8)
        reasons = []
        for options in ({"capacity": 4}, {"max_rows": 8}):
            routed = sent_by(it, tokens, rank, (4, 4), **options)
            wanted = sent_by(plane_of(group), tokens, rank, (4, 4), **options)
            assert same(routed, wanted)
            results = routed.hidden_states * 2
            assert torch.equal(it_combine(it, results, routed), it_combine(plane_of(group), results, wanted))
            reasons.append(routed.choice.reason)
        captured = outcome_of(lambda: sent_by(it, tokens, rank, (4, 4), max_rows=8, is_captured=True))
        assert captured["kind"] == "UsageError"
        overfull = outcome_of(lambda: sent_by(it, tokens, rank, (4, 4), max_rows=1))
        assert (overfull["kind"], "max_rows is 1" in overfull["text"]) == ("UsageError", True)
        assert it.all_reduce(torch.ones(4))[0] == 2.0
        return reasons


@pytest.mark.guarantee("D79")
@pytest.mark.parametrize(
    ("settings", "change", "reason"),
    [
        ({"custom_all_reduce": False}, "", "this communicator has no kernels"),
        ({"expert_arena_bytes": 0}, "", "this communicator has no kernels"),
        # The module of the sums is the first that a rank loads; that of the exchange fails on rank 1 alone.
        ({"faults": {"fail": {"module_load": (2, 2)}}}, "", "this communicator has no kernels"),
        ({"expert_arena_bytes": 4096}, "hidden", ""),
        ({}, "rows", "a multiple of 16 bytes, not 40"),
        ({}, "ids", "int32 and int64, not torch.int16"),
        ({}, "extra", "a multiple of 4 bytes, not 1"),
    ],
    ids=["off", "no arena", "no module on one rank", "small arena", "rows", "ids", "extra"],
)
def test_what_the_kernels_do_not_carry_goes_through_nccl_on_all_ranks(
    ranks2: RankPool, native: str, settings: dict[str, Any], change: str, reason: str
) -> None:
    """The rows are the same, the reason is named, and what would then need the host cannot be captured."""
    if change == "hidden":
        for reasons in ranks2.run(too_much, native, settings):
            assert all("bytes, cuda.expert_arena_bytes is 4096" in each for each in reasons)
        return
    for reasons in ranks2.run(goes_elsewhere, native, settings, change):
        assert all(reason in each for each in reasons), reasons


def too_much(rank: int, world_size: int, directory: Path, native: str, settings: dict[str, Any]) -> list[str]:
    with cuda_world(rank, world_size, directory, native, **settings) as (group, it, _):
        tokens = Tokens(rank, 3, 4, hidden=512)
        routed = sent_by(it, tokens, rank, (4, 4), capacity=4)
        assert same(routed, sent_by(plane_of(group), tokens, rank, (4, 4), capacity=4))
        # The rows of a dispatch may fit where the results do not: that is refused, as the rows have gone.
        small = Tokens(rank, 3, 4, hidden=16)
        routed_small = sent_by(it, small, rank, (4, 4), capacity=4)
        assert "by kernels" in routed_small.choice.reason
        wide = torch.zeros(8, 4096)
        refused = outcome_of(lambda: it_combine(it, wide, routed_small))
        assert (refused["kind"], "its slots take" in refused["text"]) == ("UsageError", True)
        double = outcome_of(lambda: it_combine(it, routed_small.hidden_states.double(), routed_small))
        assert (double["kind"], "not torch.float64" in double["text"]) == ("UsageError", True)
        odd = outcome_of(lambda: it_combine(it, routed_small.hidden_states[:, :3], routed_small))
        assert (odd["kind"], "a multiple of 16 bytes, not 6" in odd["text"]) == ("UsageError", True)
        it_combine(it, routed_small.hidden_states, routed_small)
        return [routed.choice.reason]


def asks(rank: int, world_size: int, directory: Path, native: str) -> list[bool]:
    with cuda_world(rank, world_size, directory, native, expert_arena_bytes=ARENA) as (group, it, driver):
        tokens = Tokens(rank, 3, 4)
        placement = ExpertPlacement(contiguous_ranks(6, world_size), rank, world_size, torch.device("cpu"))

        def answer(communicator: Any, capacity: int, *, is_captured: bool = False) -> bool:
            moved = [tokens.hidden, tokens.weights, tokens.extra]
            return all2all.is_carried(
                *(communicator, moved, tokens.ids, placement, capacity), is_captured=is_captured
            )

        before = dict(driver.calls)
        first = answer(it, 4, is_captured=True)
        assert driver.calls == before  # nothing was built
        return [
            first,
            answer(it, 4),
            answer(it, 4, is_captured=True),
            answer(it, 1 << 20),
            answer(plane_of(group), 4),
        ]


def test_what_is_carried_is_known_before_the_form_is_chosen(ranks2: RankPool, native: str) -> None:
    """During a capture only what was built before counts, so all ranks choose alike and nothing is built."""
    assert ranks2.run(asks, native) == [[False, True, True, False, False]] * 2


# --- failures ---------------------------------------------------------------------------------------------------


def overflows(rank: int, world_size: int, directory: Path, native: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"expert_arena_bytes": ARENA, "deadline_s": 2.0}
    with cuda_world(rank, world_size, directory, native, None, False, **settings) as (group, it, _):
        tokens = Tokens(rank, 3, 4)
        tokens.ids.fill_(5)
        routed = sent_by(it, tokens, rank, (4, 4), max_rows=8)
        assert routed.received is not None
        assert routed.received.tolist() == ([0, 0] if rank == 0 else [4, 4])
        sent_by(it, tokens, rank, (4, 4), max_rows=7)
        if rank == 1:
            wait_until(lambda: group._health.is_broken, "the watch to find the report", 20.0, 0.01)
        meet(rank, range(world_size), directory, "told")
        if rank == 0:
            # Rank 1 makes no call any more, so this kernel waits in vain.
            sent_by(it, tokens, rank, (4, 4), max_rows=8)
        return outcome_of(lambda: sent_by(it, tokens, rank, (4, 4), max_rows=8))


@pytest.mark.guarantee("D77")
def test_too_many_rows_break_the_group_with_a_usage_error(native: str) -> None:
    """The rank that has no room for them raises; the other one learns of it."""
    other, own = run_ranks(overflows, 2, native)
    assert own["kind"] == "UsageError"
    assert "more rows came to expert_dispatch than its max_rows" in own["text"]
    assert other["kind"] == "GroupBrokenError"
    assert "max_rows" in other["text"]


def one_is_late(rank: int, world_size: int, directory: Path, native: str) -> list[Any]:
    settings: dict[str, Any] = {"expert_arena_bytes": ARENA, "deadline_s": 2.0}
    with cuda_world(rank, world_size, directory, native, None, False, **settings) as (_, it, _driver):
        tokens = Tokens(rank, 3, 4)
        routed = sent_by(it, tokens, rank, (4,) * 3, capacity=4)
        error: CommError | None = None
        if rank != 1:
            # The kernel gives up at its deadline; what it was to compute is undefined, so the next call raises.
            it_combine(it, routed.hidden_states, routed)
            try:
                it.check()
            except CommError as found:
                error = found
        meet(rank, range(world_size), directory, "told")
        return [type(error).__name__, sorted(getattr(error, "missing", ()))]


@pytest.mark.guarantee("D78")
def test_a_rank_that_does_not_come_is_named(native: str) -> None:
    """Both waiting ranks raise `CommTimeoutError` with the rank that they missed, or learn of it from the other."""
    first, late, last = run_ranks(one_is_late, 3, native)
    assert late == ["NoneType", []]
    assert ["CommTimeoutError", [1]] in (first, last)
    for kind, missing in (first, last):
        assert kind in ("CommTimeoutError", "GroupBrokenError")
        assert missing in ([], [1])


def closes(rank: int, world_size: int, directory: Path, native: str) -> dict[str, Any]:
    with cuda_world(rank, world_size, directory, native, expert_arena_bytes=ARENA) as (group, it, _):
        tokens = Tokens(rank, 3, 4)
        routed = sent_by(it, tokens, rank, (4, 4), capacity=4)
        group.barrier()
        it.destroy()
        it.destroy()
        return outcome_of(lambda: it_combine(it, routed.hidden_states, routed))


def test_a_destroyed_group_refuses_and_leaves_nothing(ranks2: RankPool, native: str) -> None:
    """The driver finds no leak at the end."""
    for outcome in ranks2.run(closes, native):
        assert outcome["kind"] == "ClosedError"
