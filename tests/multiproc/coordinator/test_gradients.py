"""Gradients flow through the collectives that have one, with and without a compiler; the others refuse to lose them."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import GroupCoordinator, ReduceOperation, UsageError, functional
from coordinator.testing import FakeGroupCoordinator
from tests.harness import RankPool, run_ranks
from tests.worlds import outcome_of, refused, world

Call = Callable[[GroupCoordinator, torch.Tensor], torch.Tensor]


def inputs(rank: int) -> torch.Tensor:
    """Return the input of a rank: 4 rows."""
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def weights(rank: int, shape: torch.Size) -> torch.Tensor:
    """Return what a rank multiplies its result by, so that every element counts differently in its loss."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


# Each call, and what it gives rank `at` for the tensors of both ranks, by torch's own operations.
CALLS: dict[str, tuple[Call, Callable[[list[torch.Tensor], int], torch.Tensor]]] = {
    "all_reduce": (lambda g, x: g.all_reduce(x), lambda xs, _: xs[0] + xs[1]),
    "mean": (lambda g, x: g.all_reduce(x, ReduceOperation.MEAN), lambda xs, _: (xs[0] + xs[1]) / 2),
    "all_gather": (lambda g, x: g.all_gather(x), lambda xs, _: torch.cat(xs, 1)),
    "0-dim": (lambda g, x: g.all_gather(x.sum()), lambda xs, _: torch.stack([x.sum() for x in xs])),
    "all_gatherv": (
        lambda g, x: g.all_gatherv(x[: 1 + 2 * g.rank_in_group], 0, [1, 3]),
        lambda xs, _: torch.cat([xs[0][:1], xs[1][:3]]),
    ),
    "a list": (
        lambda g, x: torch.cat(g.all_gatherv([x, x * 2])),
        lambda xs, _: torch.cat([*xs, xs[0] * 2, xs[1] * 2]),
    ),
    "reduce_scatter": (
        lambda g, x: g.reduce_scatter(x.t(), 1, ReduceOperation.MEAN),
        lambda xs, at: ((xs[0] + xs[1]) / 2).t()[:, 2 * at : 2 * at + 2],
    ),
    "reduce_scatterv": (
        lambda g, x: g.reduce_scatterv(x, 0, [3, 1]),
        lambda xs, at: (xs[0] + xs[1])[3 * at : 3 + at],
    ),
    "all_to_all": (
        lambda g, x: g.all_to_all(x, 0, *([[1, 3], [1, 2]] if g.rank_in_group == 0 else [[2, 2], [3, 2]])),
        lambda xs, at: torch.cat([xs[0][:1], xs[1][:2]] if at == 0 else [xs[0][1:], xs[1][2:]]),
    ),
    "functional": (lambda g, x: functional.all_reduce(x, "avg", g), lambda xs, _: (xs[0] + xs[1]) / 2),
    "functional, large": (
        lambda g, x: functional.all_gather_tensor(x, 1, g, overlap=True),
        lambda xs, _: torch.cat(xs, 1),
    ),
    "functional exchange": (
        lambda g, x: functional.all_to_all_single(x, None, None, g),
        lambda xs, at: torch.cat([x[2 * at : 2 * at + 2] for x in xs]),
    ),
    "functional scatter": (
        lambda g, x: functional.reduce_scatter_tensor(x, "sum", 0, g),
        lambda xs, at: (xs[0] + xs[1])[2 * at : 2 * at + 2],
    ),
    "functional broadcast": (lambda g, x: functional.broadcast(x, 1, g), lambda xs, _: xs[1] * 1),
}


def expected(result: Callable[[list[torch.Tensor], int], torch.Tensor], rank: int) -> torch.Tensor:
    """Return the gradient of the sum of both ranks' losses for the input of `rank`."""
    xs = [inputs(each).requires_grad_() for each in (0, 1)]
    made = [result([x**2 for x in xs], each) for each in (0, 1)]
    loss: Any = sum((each * weights(at, each.shape)).sum() for at, each in enumerate(made))
    loss.backward()
    gradient = xs[rank].grad
    return torch.zeros_like(xs[rank]) if gradient is None else gradient


def check(rank: int, group: GroupCoordinator, name: str, run: Call | None = None) -> None:
    call, result = CALLS[name]
    x = inputs(rank).requires_grad_()
    made = run(group, x) if run else call(group, x**2)
    assert made.requires_grad, name
    (made * weights(rank, made.shape)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected(result, rank), msg=lambda text: f"{name}: {text}")


def eager(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for name in CALLS:
            check(rank, group, name)
        # Twice: the gradient of a gradient.
        x = inputs(rank).requires_grad_()
        (first,) = torch.autograd.grad(group.all_gather(x**3).square().sum(), x, create_graph=True)
        first.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 2 * 30 * x.detach() ** 4)
        # Without grad mode, results do not require grad, though the parameters do.
        with torch.no_grad():
            assert not group.all_reduce(x).requires_grad
            assert not group.all_reduce_(x.detach().clone().requires_grad_() * 1).requires_grad


@pytest.mark.guarantee("D61")
def test_gradients_are_those_of_the_sum_of_all_losses(ranks2: RankPool) -> None:
    """Each call's gradient equals the one that torch computes with both ranks' tensors in one process."""
    ranks2.run(eager)


def compiled(rank: int, world_size: int, directory: Path) -> None:
    import torch._dynamo

    with world(rank, world_size, directory) as group:
        for name in ("all_gatherv", "all_to_all", "functional broadcast"):
            call = CALLS[name][0]
            run = torch.compile(lambda g, x, c=call: c(g, x**2), fullgraph=True, backend="aot_eager")
            check(rank, group, name, run if rank == 0 else None)
        torch._dynamo.reset()


@pytest.mark.guarantee("D61")
def test_a_compiler_traces_the_gradients(compilers2: RankPool) -> None:
    """The graph of one rank, forward and backward, meets the plain calls of the other and has the same gradients."""
    # The compiler leaves pipes and sockets itself.
    compilers2.run(compiled, timeout_s=180, check_leaks=False)


def lost(group: GroupCoordinator) -> dict[str, Callable[[], Any]]:
    """Return calls that would lose the gradient of `x`, in a group of any size."""
    x = torch.ones(4, 3, requires_grad=True)
    y = x * 1  # not a leaf
    plain = torch.ones(4, 3)
    whole = torch.empty(4 * group.world_size, 3)
    weight = torch.ones(3, requires_grad=True)
    return {
        "all_reduce max": lambda: group.all_reduce(x, ReduceOperation.MAX),
        "all_reduce async": lambda: group.all_reduce(x, async_op=True),
        "all_reduce out": lambda: group.all_reduce(x, out=plain.clone()),
        "all_reduce_": lambda: group.all_reduce_(y),
        "all_reduce_ max": lambda: group.all_reduce_(y, ReduceOperation.MAX),
        "broadcast": lambda: group.broadcast(y, 0),
        "reduce": lambda: group.reduce(x),
        "gather": lambda: group.gather(x),
        "scatter": lambda: group.scatter(plain.clone(), x.repeat(group.world_size, 1), group.rank_in_group),
        "into tensor": lambda: group.all_gather_into_tensor(whole, x),
        "into list": lambda: group.all_gather(x, output_tensor_list=list(whole.chunk(group.world_size))),
        "scatter tensor": lambda: group.reduce_scatter_tensor(plain.clone(), x.repeat(group.world_size, 1)),
        "all_to_all_single": lambda: group.all_to_all_single(plain.clone(), x),
        "coalesced": lambda: group.all_reduce_coalesced([plain, x]),
        "fused": lambda: group.all_reduce_add_rms_norm(plain, plain, weight, 1e-5),
        "fused fp8": lambda: group.all_reduce_add_rms_norm_fp8(plain, plain, weight, 1e-5),
        "fused nvfp4": lambda: group.all_reduce_add_rms_norm_nvfp4(
            torch.ones(2, 16), torch.ones(2, 16), torch.ones(16, requires_grad=True), 1e-5, torch.ones(1)
        ),
        "finalize": lambda: group.moe_finalize_all_reduce(plain, torch.zeros(2, 1).int(), x[:2, :1]),
        "functional max": lambda: functional.all_reduce(x, "max", group),
        "functional list": lambda: functional.all_gather_tensor_coalesced([x], 0, group),
        "dispatch": lambda: group.dispatch(
            plain, torch.ones(4, 2, requires_grad=True), torch.ones(4, 2).int()
        ),
        "combine": lambda: group.combine(x),
        "to list": lambda: group.all_gather_to_list(x),
        "async of a sequence": lambda: group.all_gatherv(UserList([plain, x]), async_op=True),
    }


# Of these, the calls that copy in a group of one too; the others return what they are given.
COPIES = (
    *("all_reduce out", "scatter", "into tensor", "into list", "scatter tensor", "all_to_all_single"),
    *("fused", "fused fp8", "fused nvfp4", "finalize"),
)


@pytest.mark.guarantee("D61")
@pytest.mark.parametrize("size", [1, 2])
def test_calls_without_a_gradient_refuse_to_lose_it(size: int) -> None:
    """They raise before anything is sent; without grad mode the same calls are made."""
    with FakeGroupCoordinator(0, size) as group:
        for name, call in lost(group).items():
            if size == 1 and name not in COPIES:
                call()
                continue
            with pytest.raises(UsageError) as refusal:
                call()
            assert "requires grad" in str(refusal.value), name
        with torch.no_grad():
            for name, call in lost(group).items():
                if name != "combine":
                    call()
        # A leaf is overwritten, as under no_grad: this is how parameters are shared.
        parameter = torch.nn.Parameter(torch.ones(2))
        assert group.broadcast(parameter, 0) is parameter
        assert group.all_reduce_(parameter) is parameter
        assert parameter.tolist() == [size, size]


def compiled_into_a_list(rank: int, world_size: int, directory: Path, size: int) -> None:
    """Compile a gather into a list in a group of `size`."""
    with FakeGroupCoordinator(0, size) as group:
        outputs = list(torch.empty(size, 3).unbind(0))

        def gather(x: torch.Tensor) -> torch.Tensor:
            return torch.stack(group.all_gather(x, output_tensor_list=outputs)).sum()

        run = torch.compile(gather, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="requires grad"):
            run(torch.ones(3, requires_grad=True))
        with torch.no_grad():
            assert run(torch.ones(3, requires_grad=True)).item() == 3.0 * size


@pytest.mark.guarantee("D61")
@pytest.mark.parametrize("size", [1, 2])
def test_a_compiled_gather_into_a_list_refuses_to_lose_a_gradient(size: int) -> None:
    """As the plain call does: the compiler fails with our words. Without grad mode it compiles."""
    run_ranks(compiled_into_a_list, 1, size)


def test_a_group_of_one_passes_gradients_on() -> None:
    """It returns its input, and with it the gradient."""
    x = torch.ones(4, 3, requires_grad=True)
    with FakeGroupCoordinator(0, 1) as group:
        for result in (
            group.gather(x),
            group.reduce(x),
            group.all_reduce(x, ReduceOperation.MAX),
            group.all_gatherv([x])[0],
            group.all_reduce_coalesced([x])[0],
            group.all_gather(x, async_op=True).wait(),
            functional.all_reduce(x, "max", group),
            functional.broadcast(x, 0, group),
            group.combine(group.dispatch(x, x)[0]),
        ):
            assert result is not None
            (gradient,) = torch.autograd.grad((result * 2).sum(), x)
            assert torch.equal(gradient, torch.full_like(x, 2.0))


def test_a_sequence_of_any_type_carries_gradients() -> None:
    """`all_gatherv` of a sequence that is neither a list nor a tuple gives results that require grad."""
    x = torch.ones(2, requires_grad=True)
    with FakeGroupCoordinator(0, 2) as group:
        assert [each.requires_grad for each in group.all_gatherv(UserList([x, x.detach()]))] == [True, False]


def lost_in_a_rank(rank: int, world_size: int, directory: Path) -> list[bool]:
    with world(rank, world_size, directory) as group:
        found = [refused(call) for call in lost(group).values()]
        assert outcome_of(lambda: group.all_reduce(torch.ones(2)).tolist())["value"] == [2.0, 2.0]
        return found


def test_a_group_goes_on_after_it_refused_to_lose_a_gradient(ranks2: RankPool) -> None:
    """Every rank refuses, and nothing was sent."""
    for found in ranks2.run(lost_in_a_rank):
        assert all(found), found
