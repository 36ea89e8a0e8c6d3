"""Exchanges, broadcasts and coalesced calls in `torch.compile` make one graph with the bits of the plain calls."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import ClosedError, GroupCoordinator, UsageError, functional
from coordinator.testing import FakeGroupCoordinator
from tests.harness import RankPool
from tests.worlds import new_group, outcome_of, world

OPS = torch.ops.group_coordinator


def step(group: GroupCoordinator, x: torch.Tensor) -> list[torch.Tensor]:
    """Use every call with and without its optional arguments. Sizes depend on the number of rows, which is symbolic."""
    rows = x.shape[0]
    own = 1 if group.rank_in_group == 0 else rows - 1
    sent, received = [1, rows - 1], [own, own]
    several = [x * 2, x[0].sum(), x[:, :1].to(torch.int32), x + 1]
    halves = [x.t(), x[:1].repeat(2, 1)]
    return [
        functional.all_to_all_single(torch.cat([x, x]), None, None, group),
        functional.all_to_all_single(x, received, sent, group),
        group.all_to_all(x.t(), 1, sent, received, timeout_s=20.0),
        functional.broadcast(x.t(), 1, group) * 1,
        *functional.all_reduce_coalesced(several, "sum", group),
        *functional.all_reduce_coalesced([x], "max", group),
        *functional.all_gather_tensor_coalesced(several, 0, group),
        *functional.reduce_scatter_tensor_coalesced(halves, "sum", 0, group),
        *group.all_gather_coalesced([x], 1),
        *group.all_reduce_coalesced([x, x], timeout_s=20.0),
        *group.reduce_scatter_coalesced([x.t()], 0),
        *functional.all_reduce_coalesced([], "sum", group),
    ]


def plain(rank: int, world_size: int, directory: Path) -> None:
    """Make the calls of the rank that compiles."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        generator = torch.Generator().manual_seed(rank)
        for rows in (3, 12, 3):
            x = torch.randn(rows, 4, generator=generator)
            for first, second in zip(step(group, x), step(group, x), strict=True):
                assert torch.equal(first, second)


def compiled(rank: int, world_size: int, directory: Path) -> list[Any] | None:
    # A compiler costs seconds. One rank compiles, and its graph must match the other rank's plain calls.
    if rank == 1:
        plain(rank, world_size, directory)
        return None
    # Import this before there is a world, because torch keeps the present world as a default argument.
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    with world(rank, world_size, directory) as everyone:
        group = new_group(everyone)
        generator = torch.Generator().manual_seed(rank)
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
        for rows in (3, 12):
            x = torch.randn(rows, 4, generator=generator)
            before = x.clone()
            results = run(group, x)
            for got, expected in zip(results, step(group, x), strict=True):
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                assert got.is_contiguous() == expected.is_contiguous()
                assert torch.equal(got, expected)
            assert torch.equal(x, before)
            places = {each.untyped_storage().data_ptr() for each in (x, *results)}
            assert len(places) == len(results) + 1, "each has memory of its own"
        assert counter.frame_count == 1, "the number of rows is symbolic"
        leaf = torch.randn(3, 4, generator=generator).requires_grad_()
        with torch.no_grad():
            assert not any(each.requires_grad for each in run(group, leaf))
            step(group, leaf)
        group.destroy()
        outcome = outcome_of(lambda: run(group, x))
        torch._dynamo.reset()
        return [outcome["kind"]]


def test_exchanges_broadcasts_and_lists_are_traced(compilers2: RankPool) -> None:
    """They become one graph with symbolic sizes and the bits of the plain calls. A destroyed group is closed."""
    # The compiler leaves pipes and sockets itself.
    assert compilers2.run(compiled, timeout_s=120, check_leaks=False) == [["ClosedError"], None]


# --- one process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_the_traced_operations_pass_torchs_opcheck(size: int) -> None:
    """Schemas, shapes, strides and gradients are right. No result shares memory, even in a group of one."""
    with FakeGroupCoordinator(0, size) as group:
        name = group.unique_name
        x = torch.randn(4, 4).requires_grad_()
        # Lists have no gradients.
        values = x.detach()
        lists = [values, values, torch.tensor(1.0)]
        whole = [values, values.t()]
        sizes = [4] if size == 1 else [1, 3]
        cases: list[tuple[Any, tuple[Any, ...]]] = [
            (OPS.all_to_all, (x.t(), name, size, 1)),
            (OPS.all_to_all, (x, name, size, 0, sizes, sizes)),
            (OPS.broadcast, (x.t(), name)),
            (OPS.all_reduce_coalesced, (lists, name)),
            (OPS.all_gather_coalesced, (lists, name, size)),
            (OPS.reduce_scatter_coalesced, (whole, name, size)),
        ]
        for operation, args in cases:
            made = operation(*args)
            results = made if isinstance(made, list) else [made]
            places = {each.untyped_storage().data_ptr() for each in (x, *results)}
            assert len(places) == len(results) + 1
            # This leaves out the check that takes longest, because the compiled step above shows the same.
            torch.library.opcheck(
                operation.default,
                args,
                test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
            )


def test_mistakes_are_refused() -> None:
    """The traced operation and the call itself refuse them. If the group is gone, the error has its name."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(4, 2)
    group = FakeGroupCoordinator(0, 2)
    name = group.unique_name
    attempts: dict[str, tuple[Any, bool]] = {
        "given together": (lambda x: OPS.all_to_all(x, name, 2, 0, [2, 2]), True),
        "send_sizes has 1 entries": (lambda x: OPS.all_to_all(x, name, 2, 0, [4], [4]), True),
        "must be counts": (lambda x: OPS.all_to_all(x, name, 2, 0, [5, -1], [5, 1]), True),
        "split evenly": (lambda x: OPS.all_to_all(x[:3], name, 2), True),
        "add up to 2": (lambda x: OPS.all_to_all(x, name, 2, 0, [1, 1], [1, 1]), False),
        "made for a group of 3": (lambda x: OPS.all_gather_coalesced([x], name, 3), False),
        "out of range": (lambda x: OPS.all_gather_coalesced([x], name, 2, 2), True),
        "cannot be split": (lambda x: OPS.reduce_scatter_coalesced([x[:3]], name, 2), True),
        "src is 2": (lambda x: OPS.broadcast(x, name, 2), False),
        "unknown reduction 'xor'": (lambda x: OPS.all_reduce_coalesced([x], name, "xor"), False),
    }
    for text, (call, is_seen_by_shapes) in attempts.items():
        with pytest.raises(UsageError, match=text):
            call(x)
        if is_seen_by_shapes:
            with FakeTensorMode() as mode, pytest.raises(UsageError, match=text):
                call(mode.from_tensor(x))
    group.destroy()
    for call in (
        lambda: OPS.all_to_all(x, name, 2),
        lambda: OPS.broadcast(x, name),
        lambda: OPS.all_reduce_coalesced([x], name),
        lambda: OPS.all_gather_coalesced([x], name, 2),
        lambda: OPS.reduce_scatter_coalesced([x], name, 2),
    ):
        with pytest.raises(ClosedError, match=name):
            call()
