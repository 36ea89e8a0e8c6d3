"""Every communicator keeps the contract of `DeviceCommunicator`, and the suite finds those that do not."""

import gc
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import CommTimeoutError, DisagreementError, GroupCoordinator, UsageError
from coordinator.testing import (
    ConformanceError,
    FakeCommunicator,
    FakeGroupCoordinator,
    check_device_communicator,
)
from device_comm import registry
from device_comm.base import DeviceCommunicator
from device_comm.process_group import ProcessGroupCommunicator
from device_comm.solo import SoloCommunicator
from tests.conformance.wrong_communicators import (
    WRONG_FAKES,
    WRONG_OVER_GLOO,
    BlocksInIrecv,
    ForgetsTheLastRank,
    SumsBackwards,
    SumsFromItself,
)
from tests.harness import RankPool
from tests.samples import sampled
from tests.worlds import world


@pytest.fixture(scope="module")
def ranks3() -> Iterator[RankPool]:
    """Start three processes, the fewest for which the order of a sum matters."""
    with RankPool(3, brief=True) as pool:
        yield pool


# --- ours -----------------------------------------------------------------------------------------------------


def general_group(group: GroupCoordinator) -> GroupCoordinator:
    """Create a group of the same ranks with a process group, and the general communicator on it."""
    ranks, settings = [group.ranks], group.settings
    return GroupCoordinator(ranks, group.local_rank, "gloo", False, group_name="general", settings=settings)


def keeps_contract(
    rank: int, world_size: int, directory: Path, use_host: bool, is_general: bool = False
) -> str:
    with world(rank, world_size, directory, timeout_s=20.0) as first, general_group(first) as general:
        group = general if is_general else first
        communicator = group.device_communicator
        check_device_communicator(communicator, host=group if use_host else None)
        return type(communicator).__name__


# Two and three ranks over Gloo show what more ranks, or another mode, would show again.
GLOO_IF_THOROUGH = [
    pytest.param(True, marks=pytest.mark.thorough, id="over Gloo"),
    pytest.param(False, id="over shared memory"),
]


# Over Gloo by the host plane, three ranks show what two would show.
@pytest.mark.parametrize(
    ("use_host", "is_general"),
    [
        pytest.param(True, True, marks=pytest.mark.thorough, id="by the host plane, over Gloo"),
        pytest.param(True, False, id="by the host plane, over shared memory"),
        pytest.param(False, True, id="by itself, over Gloo"),
        pytest.param(False, False, id="by itself, over shared memory"),
    ],
)
def test_the_communicators_of_two_ranks(ranks2: RankPool, use_host: bool, is_general: bool) -> None:
    """Two ranks conform with the general communicator and with the one over shared memory."""
    name = "ProcessGroupCommunicator" if is_general else "SharedMemoryCommunicator"
    assert ranks2.run(keeps_contract, use_host, is_general) == [name] * 2


def keeps_contract_in_inference_mode(rank: int, world_size: int, directory: Path, is_general: bool) -> None:
    with torch.inference_mode():
        keeps_contract(rank, world_size, directory, True, is_general)


@pytest.mark.parametrize("is_general", GLOO_IF_THOROUGH)
def test_the_communicators_in_inference_mode(ranks2: RankPool, is_general: bool) -> None:
    """The communicators conform in inference mode, in which engines run their models."""
    ranks2.run(keeps_contract_in_inference_mode, is_general)


@pytest.mark.guarantee("D1")
@pytest.mark.guarantee("D2")
@pytest.mark.guarantee("D3")
@pytest.mark.guarantee("D5")
@pytest.mark.thorough
@pytest.mark.parametrize("is_general", [True, False], ids=["over Gloo", "over shared memory"])
def test_the_communicators_of_three_ranks(ranks3: RankPool, is_general: bool) -> None:
    """Three ranks conform, of which no tensor size is a multiple."""
    name = "ProcessGroupCommunicator" if is_general else "SharedMemoryCommunicator"
    assert ranks3.run(keeps_contract, True, is_general) == [name] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("is_general", [True, False], ids=["over Gloo", "over shared memory"])
def test_the_communicators_of_four_ranks(ranks4: RankPool, is_general: bool) -> None:
    """Four ranks conform."""
    name = "ProcessGroupCommunicator" if is_general else "SharedMemoryCommunicator"
    assert ranks4.run(keeps_contract, True, is_general) == [name] * 4


DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4},
    key=str,
)


def filled(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return a [4, 6] tensor of any dtype whose bytes depend on the rank."""
    places = torch.arange(24 * dtype.itemsize) * 7 + rank
    return (
        (places % 3 == 0).view(4, 6) if dtype is torch.bool else places.to(torch.uint8).view(dtype).view(4, 6)
    )


def as_bytes(tensor: torch.Tensor) -> list[int]:
    flat = tensor.view(-1).view(torch.uint8)
    return [int(value) for value in flat.tolist()]


def moves_every_dtype(rank: int, world_size: int, directory: Path) -> None:
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),  # of torch, about ComplexHalf
        world(rank, world_size, directory, timeout_s=20.0) as group,
    ):
        communicator = group.device_communicator
        for dtype in DTYPES:
            own, both = filled(dtype, rank), [as_bytes(filled(dtype, each)) for each in (0, 1)]
            everything = both[0] + both[1]
            assert as_bytes(group.all_gather(own, 0)) == everything, dtype
            columns = group.all_gather(own.t(), 1)
            assert columns.dtype is dtype
            assert columns.shape == (6, 8)
            assert columns.is_contiguous()
            sizes = [1, 3]
            rows = [int(len(both[0]) / 4 * size) for size in sizes]
            uneven = group.all_gatherv([own[: sizes[rank]]], 0, sizes)[0]
            assert as_bytes(uneven) == both[0][: rows[0]] + both[1][: rows[1]], dtype
            gathered = group.gather(own, 1, 0)
            assert (gathered is None) == (rank == 0)
            assert gathered is None or as_bytes(gathered) == everything, dtype
            target = filled(dtype, rank)
            assert group.broadcast(target, 1) is target
            assert as_bytes(target) == both[1], dtype
            half = len(both[0]) // 2
            mine = slice(rank * half, (rank + 1) * half)
            exchanged = group.all_to_all(own)
            assert exchanged.dtype is dtype
            assert as_bytes(exchanged) == both[0][mine] + both[1][mine], dtype
            assert group.all_to_all(own.t(), 1).shape == (6, 4)
            part = filled(dtype, 5)[:2]
            assert group.scatter(part, own if rank == 1 else None, 1) is part
            assert as_bytes(part) == both[1][mine], dtype
            handle = communicator.isend(own)
            assert as_bytes(group.recv((4, 6), dtype)) == both[1 - rank], dtype
            handle.wait()


@pytest.mark.guarantee("D4")
def test_every_dtype_is_moved_unchanged(ranks2: RankPool) -> None:
    """Every dtype is moved unchanged, including those for which torch has hardly any kernels."""
    ranks2.run(moves_every_dtype)


def drops_handles(rank: int, world_size: int, directory: Path) -> list[float]:
    with world(rank, world_size, directory, timeout_s=20.0) as group:
        communicator = group.device_communicator
        if rank == 0:
            for number in range(4):
                # No one else references the tensor, and it exceeds what the kernel buffers without a receiver.
                communicator.isend(torch.full((1 << 20,), float(number)).t())
                gc.collect()
                torch.full((1 << 20,), -1.0)
            group.barrier()
            group.barrier()
            return []
        group.barrier()
        targets = [torch.empty(2, 1 << 20)[0] for _ in range(4)]
        last = [communicator.irecv(target) for target in targets][-1]
        gc.collect()
        last.wait()
        last.wait()
        group.barrier()
        return [float(target.min()) for target in targets]


@pytest.mark.guarantee("D11")
def test_handles_may_be_dropped(ranks2: RankPool) -> None:
    """A transfer keeps its tensors alive until they have arrived, in order, even if its handle is dropped."""
    assert ranks2.run(drops_handles) == [[], [0.0, 1.0, 2.0, 3.0]]


def test_a_group_of_one() -> None:
    """In a group of one every result is the input itself, and there is no peer."""
    with FakeGroupCoordinator(0, 1) as group:
        assert type(group.device_communicator) is SoloCommunicator
        check_device_communicator(group.device_communicator, host=group)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 2), (2, 3), (3, 4)])
def test_fakes(rank: int, world_size: int) -> None:
    """A fake keeps every part of the contract that one process can show."""
    with FakeGroupCoordinator(rank, world_size) as group:
        check_device_communicator(group.device_communicator)


def test_some_dtypes_only() -> None:
    """A communicator that supports few dtypes is tested with those."""
    with FakeGroupCoordinator(0, 2) as group:
        check_device_communicator(group.device_communicator, dtypes=[torch.bfloat16], destroy=False)
        assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]


def test_arguments_of_the_suite_are_checked() -> None:
    """The suite refuses wrong arguments and names what it needs."""
    with FakeGroupCoordinator(0, 2) as group:
        with pytest.raises(UsageError, match="expected a DeviceCommunicator, not FakeGroupCoordinator"):
            check_device_communicator(group)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="dtypes must be"):
            check_device_communicator(group.device_communicator, dtypes=[])


# --- wrong ones -----------------------------------------------------------------------------------------------

# Enough to convict what is wrong whatever the dtype is.
FEW_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.guarantee("D12")
@pytest.mark.parametrize("kind", sampled(2, WRONG_FAKES), ids=lambda kind: kind.__name__)
def test_a_wrong_communicator_is_convicted(kind: type[FakeCommunicator]) -> None:
    """The suite finds each broken clause and names the call."""
    with FakeGroupCoordinator(1, 4) as group:
        communicator = kind(group.device_communicator.context)
        with pytest.raises(ConformanceError) as caught:
            check_device_communicator(communicator, host=group, dtypes=FEW_DTYPES)
    assert caught.value.clause in WRONG_FAKES[kind], str(caught.value)
    assert caught.value.ranks == (1,)
    assert str(caught.value).startswith(f"{kind.__name__} violates '{caught.value.clause}' on rank")
    assert caught.value.call in str(caught.value)


def convicted(rank: int, world_size: int, directory: Path, use_host: bool) -> dict[str, Any]:
    found = {}
    with world(rank, world_size, directory, timeout_s=20.0) as first, general_group(first) as group:
        for kind in WRONG_OVER_GLOO:
            communicator = kind(group.device_communicator.context)
            try:
                check_device_communicator(
                    communicator, dtypes=[torch.float32], host=group if use_host else None
                )
            except ConformanceError as error:
                found[kind.__name__] = [error.clause, list(error.ranks)]
            group.barrier()
            communicator.destroy()
    return found


@pytest.mark.guarantee("D12")
def test_ranks_convict_together(ranks3: RankPool) -> None:
    """A fault that only some ranks can see is raised on all of them, with the same text."""
    expected = {kind.__name__: [clause, ranks] for kind, (clause, ranks) in WRONG_OVER_GLOO.items()}
    assert ranks3.run(convicted, True) == [expected] * 3


def rounds_otherwise(rank: int, world_size: int, directory: Path) -> list[str]:
    clauses = []
    with world(rank, world_size, directory, timeout_s=20.0) as first, general_group(first) as group:
        backwards = SumsBackwards(group.device_communicator.context)
        check_device_communicator(backwards, dtypes=[torch.float32], host=group, exact_reductions=False)
        for host in (group, None):
            communicator = SumsFromItself(group.device_communicator.context)
            with pytest.raises(ConformanceError) as caught:
                check_device_communicator(
                    communicator, dtypes=[torch.float32], host=host, exact_reductions=False
                )
            clauses.append(caught.value.clause)
            communicator.destroy()
    return clauses


@pytest.mark.thorough
def test_rounding_may_be_allowed_to_differ_but_not_between_ranks(ranks3: RankPool) -> None:
    """Another summation order can be allowed; different bits on different ranks cannot."""
    assert ranks3.run(rounds_otherwise) == [["all_reduce: same bits on every rank"] * 2] * 3


def convicts_without_host(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory, timeout_s=20.0) as first, general_group(first) as group:
        communicator = ForgetsTheLastRank(group.device_communicator.context)
        with pytest.raises(ConformanceError) as caught:
            check_device_communicator(communicator)
        communicator.destroy()
        return [caught.value.clause, list(caught.value.ranks)]


def test_ranks_convict_together_without_a_host_plane(ranks3: RankPool) -> None:
    """Without a host plane the communicator itself tells ranks that saw nothing, and they raise too."""
    assert ranks3.run(convicts_without_host) == [
        ["a clause of the contract", [2]],
        ["a clause of the contract", [2]],
        ["broadcast: value", [2]],
    ]


def waits_in_irecv(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory, timeout_s=20.0) as first, general_group(first) as group:
        communicator = BlocksInIrecv(group.device_communicator.context)
        with pytest.raises(ConformanceError) as caught:
            check_device_communicator(communicator, host=group, timeout_s=0.5)
        assert isinstance(caught.value.__cause__, CommTimeoutError)
        communicator.destroy()
        return caught.value.clause


def test_a_communicator_that_hangs_is_convicted_by_the_deadline(ranks2: RankPool) -> None:
    """Receives in the suite have a deadline, so a communicator that hangs fails."""
    assert ranks2.run(waits_in_irecv) == ["irecv: no error"] * 2


# --- third parties --------------------------------------------------------------------------------------------


class ThirdParty(ProcessGroupCommunicator):
    """Stands for a communicator of another package."""

    algorithm = "third party"


def uses_registered(rank: int, world_size: int, directory: Path) -> list[str]:
    registry.register_communicator("cpu", ThirdParty)
    try:
        with world(rank, world_size, directory, timeout_s=20.0) as group:
            check_device_communicator(group.device_communicator, dtypes=[torch.float32], host=group)
            with (
                GroupCoordinator([[each] for each in group.ranks], 0, "gloo", True) as alone,
                GroupCoordinator([group.ranks], 0, "gloo", False) as plain,
            ):
                return [each.device_communicator.algorithm for each in (group, alone, plain)]
    finally:
        registry.unregister_communicator("cpu")


@pytest.mark.guarantee("D12")
def test_a_registered_communicator_serves_its_device(ranks2: RankPool) -> None:
    """A registered communicator serves groups of several ranks on its device and conforms there."""
    assert ranks2.run(uses_registered) == [["third party", "alone", "process group"]] * 2


class Older(ThirdParty):
    """Stands for a communicator written before the contract had all of its methods."""

    _reduce = DeviceCommunicator._reduce
    _scatter = DeviceCommunicator._scatter
    _all_to_all = DeviceCommunicator._all_to_all


def uses_older(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory, timeout_s=20.0) as first, general_group(first) as group:
        communicator = Older(group.device_communicator.context)
        kinds = [torch.float32, torch.bool]
        check_device_communicator(communicator, dtypes=kinds, host=group, destroy=False)
        with pytest.raises(DisagreementError) as caught:
            communicator.all_to_all(torch.ones(3), 0, [1, 1, 1], [1, 1 + (rank == 0), 1])
        assert communicator.all_reduce(torch.ones(1)).item() == world_size
        communicator.destroy()
        return str(caught.value).partition("expected: ")[2]


@pytest.mark.guarantee("D12")
def test_a_communicator_needs_few_methods_of_its_own(ranks3: RankPool) -> None:
    """Methods that a communicator lacks are derived from those that it has, and conform."""
    others = "; ".join(f"rank {rank}: sends (1, 1, 1), expects (1, 1, 1)" for rank in (1, 2))
    assert ranks3.run(uses_older) == [f"rank 0: sends (1, 1, 1), expects (1, 2, 1); {others}"] * 3


def differs(rank: int, world_size: int, directory: Path) -> str:
    if rank == 0:
        registry.register_communicator("cpu", ThirdParty)
    try:
        with pytest.raises(DisagreementError) as caught, world(rank, world_size, directory, timeout_s=20.0):
            pass
        return str(caught.value)
    finally:
        registry.unregister_communicator("cpu")


def test_ranks_with_different_communicators_disagree(ranks2: RankPool) -> None:
    """Group creation compares the communicators, as two different algorithms would wait for each other."""
    for text in ranks2.run(differs):
        assert "ThirdParty" in text
        assert "connect_cpu" in text


def uses_declared(rank: int, world_size: int, directory: Path) -> str:
    site = directory / f"site-{rank}"
    install(site, "other-package", "cpu = other_package_comm:Declared")
    (site / "other_package_comm.py").write_text(
        "from device_comm.process_group import ProcessGroupCommunicator\n"
        "class Declared(ProcessGroupCommunicator):\n"
        "    algorithm = 'declared'\n"
    )
    sys.path.insert(0, str(site))
    try:
        with world(rank, world_size, directory, timeout_s=20.0) as group:
            check_device_communicator(group.device_communicator, dtypes=[torch.float32], host=group)
            return group.device_communicator.algorithm
    finally:
        sys.path.remove(str(site))
        sys.modules.pop("other_package_comm", None)


@pytest.mark.guarantee("D12")
def test_a_declared_communicator_serves_its_device(ranks2: RankPool) -> None:
    """The entry point of an installed package is enough to register a communicator."""
    assert ranks2.run(uses_declared) == ["declared"] * 2


def install(site: Path, name: str, entry_point: str) -> None:
    """Write the metadata that pip would leave for a package into `site`."""
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{registry.ENTRY_POINTS}]\n{entry_point}\n")
