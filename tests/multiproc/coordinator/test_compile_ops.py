"""Collectives inside of `torch.compile` make one graph, give the results of the plain calls, and raise our errors."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import ClosedError, GroupCoordinator, ReduceOperation, UsageError, group_registry
from coordinator.testing import FakeGroupCoordinator
from tests.harness import RankPool, run_ranks
from tests.worlds import join_world, new_group, outcome_of, world

ROOT = Path(__file__).parents[3]
OPS = torch.ops.group_coordinator


def step(group: GroupCoordinator, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Use every call that can be compiled, with and without its optional arguments."""
    total = group.all_reduce(torch.sin(x))
    gathered = group.all_gather(total + 1, 0)
    part = group.reduce_scatter(gathered * 2)
    normed, residual = group.all_reduce_add_rms_norm(x, total, weight, 1e-5)
    by_row = group.all_reduce_add_rms_norm_fp8(x, total, weight, 1e-5)
    by_tensor = group.all_reduce_add_rms_norm_fp8(x, total, weight, 1e-5, weight[1:2], timeout_s=20)
    pair, both = torch.cat([x, x], 1), torch.cat([weight, weight])
    blocks = group.all_reduce_add_rms_norm_nvfp4(pair, pair, both, 1e-5, weight[:1])
    rows = torch.arange(4 * x.shape[0]).view(-1, 4).int() % 4 - 1
    return [
        *(each.float() for each in (*by_row, *by_tensor, *blocks)),
        group.moe_finalize_all_reduce(x, rows, total[:, :4].contiguous()),
        group.moe_finalize_all_reduce(
            x, rows, total[:, :4].contiguous(), gathered[: x.shape[0]], timeout_s=20
        ),
        total,
        gathered.sum(0),
        part,
        normed,
        residual,
        group.all_gather(x.t(), timeout_s=20.0),
        group.all_reduce(x.long(), ReduceOperation.MAX, timeout_s=20),
        group.reduce_scatter(gathered, 0, ReduceOperation.MIN),
        group.all_gather(x.sum(), 0),
        group.all_reduce(x) - x,
    ]


def compiled(rank: int, world_size: int, directory: Path) -> None:
    # Import this before there is a world, because torch keeps the present world as a default argument.
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    with world(rank, world_size, directory) as group:
        generator = torch.Generator().manual_seed(rank)
        weight = torch.linspace(-1, 1, 8)
        # Two ranks trace with the same shapes as four. Four only show that more ranks change nothing.
        for backend in ["aot_eager" if world_size == 2 else "eager"]:
            torch._dynamo.reset()
            counter = CompileCounterWithBackend(backend)
            run = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
            for tokens in (3, 12):
                x = torch.randn(tokens, 8, generator=generator)
                before = x.clone()
                for got, expected in zip(run(group, x, weight), step(group, x, weight), strict=True):
                    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                    assert got.is_contiguous()
                    assert torch.equal(got, expected)
                assert torch.equal(x, before)
            assert counter.frame_count == 1, "the number of tokens is symbolic"
            # Engines pass parameters, and keep no gradients.
            leaf = torch.randn(3, 8, generator=generator).requires_grad_()
            with torch.no_grad():
                assert not any(each.requires_grad for each in run(group, leaf, weight))
        torch._dynamo.reset()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_compiled_step_is_one_graph_with_the_same_results(compilers2: RankPool, size: int) -> None:
    """There is no graph break, sizes are symbolic, and the results have the bits of the plain calls."""
    if size == 2:
        compilers2.run(compiled)
    else:
        run_ranks(compiled, size)


def failures(rank: int, world_size: int, directory: Path) -> list[str]:
    import torch._dynamo

    join_world(rank, world_size, directory)
    from coordinator.parallel_state import destroy_distributed_environment, get_world_group

    group = new_group(get_world_group())
    x = torch.ones(4)
    run = torch.compile(lambda x: group.all_reduce(x) * 1, fullgraph=True, backend="eager")
    assert run(x).tolist() == [world_size] * 4
    name = group.unique_name
    assert group_registry.find(name, "all_reduce").reference() is group
    found = []
    if rank == 0:
        outcome = outcome_of(lambda: OPS.all_reduce(x, name, timeout_s=0.3))
        assert (outcome["kind"], outcome["missing"]) == ("CommTimeoutError", [1])
        found.append(outcome_of(lambda: run(x))["kind"])
    get_world_group().barrier()
    group.destroy()
    outcome = outcome_of(lambda: run(x))
    assert name in outcome["text"]
    found.append(outcome["kind"])
    # The next world has a group of the same name, and the graph finds it.
    destroy_distributed_environment()
    join_world(rank, world_size, directory / "again")
    again = new_group(get_world_group())
    assert again.unique_name == name
    group.destroy()
    assert OPS.all_reduce(x, name).tolist() == [world_size] * 4
    again.barrier()
    again.destroy()
    destroy_distributed_environment()
    torch._dynamo.reset()
    return found


def test_errors_in_a_graph_are_those_of_the_call(compilers2: RankPool) -> None:
    """At a deadline the error names the missing ranks and the group is broken. A destroyed group is closed."""
    assert compilers2.run(failures) == [["GroupBrokenError", "ClosedError"], ["ClosedError"]]


# --- one process ------------------------------------------------------------------------------------------------


def test_an_error_names_a_group_that_does_not_exist() -> None:
    """The group was destroyed, was garbage-collected, or never existed."""
    x = torch.ones(2)
    group = FakeGroupCoordinator(0, 2)
    name = group.unique_name
    assert OPS.all_reduce(x, name).tolist() == [2, 2]
    group.destroy()
    with pytest.raises(ClosedError, match=name):
        OPS.all_reduce(x, name)
    group = FakeGroupCoordinator(0, 2)
    name = group.unique_name
    del group
    gc.collect()
    with pytest.raises(ClosedError, match=name):
        OPS.all_gather(x, name, 2)
    with pytest.raises(UsageError, match="no group of that name") as refusal:
        OPS.reduce_scatter(x, "tp:12345", 2)
    assert type(refusal.value) is UsageError


def test_mistakes_in_a_graph_are_refused() -> None:
    """Wrong arguments raise, and so does a graph that was compiled for a group of another size."""
    x = torch.ones(3, 4)
    with FakeGroupCoordinator(1, 3) as group:
        attempts: dict[str, Any] = {
            "made for a group of 2": lambda: OPS.all_gather(x, group.unique_name, 2),
            "unknown reduction 'xor'": lambda: OPS.all_reduce(x, group.unique_name, "xor"),
            "out of range": lambda: OPS.all_gather(x, group.unique_name, 3, 2),
            "cannot be split evenly": lambda: OPS.reduce_scatter(x, group.unique_name, 3, 1),
        }
        for text, call in attempts.items():
            with pytest.raises(UsageError) as refusal:
                call()
            assert text in str(refusal.value)


def test_operations_return_new_tensors_also_in_a_group_of_one() -> None:
    """An operation must not return its input and copies it."""
    x = torch.ones(2, 4)
    with FakeGroupCoordinator(0, 1) as group:
        name = group.unique_name
        for result in (
            OPS.all_reduce(x, name),
            OPS.all_gather(x, name, 1, 0),
            OPS.reduce_scatter(x, name, 1, 1),
        ):
            assert result is not x
            assert result.data_ptr() != x.data_ptr()
            assert torch.equal(result, x)


def compiled_alone(rank: int, world_size: int, directory: Path) -> None:
    """Compile the methods of a group of one."""
    x = torch.ones(2, 4)
    with FakeGroupCoordinator(rank, world_size) as group:
        run = torch.compile(
            lambda x: group.reduce_scatter(group.all_reduce(x)), fullgraph=True, backend="eager"
        )
        assert run(x) is x


def test_compiled_methods_return_their_input_in_a_group_of_one() -> None:
    """As the plain methods do."""
    run_ranks(compiled_alone, 1)


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_the_operations_pass_torchs_opcheck(world_size: int) -> None:
    """Their schemas, shapes with symbolic sizes, strides, aliases and gradients are right."""
    with FakeGroupCoordinator(0, world_size) as group:
        name = group.unique_name
        x, leaf = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
        uneven = [8, *[1] * (world_size - 1)]
        for operation, args in (
            (OPS.all_reduce, (leaf, name)),
            (OPS.all_reduce, (x.t(), name, "max", 1.0)),
            (OPS.all_gather, (leaf, name, world_size, 0)),
            (OPS.all_gather, (torch.tensor(1.0, requires_grad=True), name, world_size)),
            (OPS.reduce_scatter, (leaf, name, world_size, -1, "mean")),
            (OPS.all_gatherv, (leaf, name, world_size, 0, 1, uneven)),
            (OPS.reduce_scatterv, (torch.randn(4, sum(uneven)), name, world_size, 0, 1, uneven)),
            (OPS.gather, (x, name, world_size, 0, 0)),
            (OPS.sum_on, (leaf, name, 0)),
            (OPS.broadcast_, (x.clone(), name)),
            (OPS.all_reduce_into_output, (x, x.new_empty(4, 8), name)),
            (OPS.all_gatherv_into_output, (x, x.new_empty(4 * world_size, 8), name)),
            (OPS.all_reduce_add_rms_norm, (x, x, torch.ones(8), 1e-6, name)),
            (OPS.all_reduce_add_rms_norm_fp8, (x, x, torch.ones(8), 1e-6, name)),
            (OPS.all_reduce_add_rms_norm_fp8, (x, x, torch.ones(8), 1e-6, name, torch.ones(1))),
            (
                OPS.all_reduce_add_rms_norm_nvfp4,
                (x.view(2, 16), x.view(2, 16), torch.ones(16), 1e-6, name, torch.ones(1)),
            ),
            (OPS.moe_finalize_all_reduce, (x, torch.zeros(3, 2).int(), torch.ones(3, 2), name)),
            (
                OPS.moe_finalize_all_reduce,
                (x, torch.zeros(3, 2).int(), torch.ones(3, 2), name, x[:3].clone()),
            ),
        ):
            torch.library.opcheck(operation.default, args)


INDUCTOR = """
import torch
from coordinator.testing import FakeGroupCoordinator

torch._inductor.config.compile_threads = 1
group = FakeGroupCoordinator(0, 2)
weight = torch.randn(8, 8)

def body(x):
    # Of what surrounds them only what torch has as a whole: C++ that is generated takes 20 s to compile.
    return group.all_gather(torch.mm(group.all_reduce(x), weight), 0)

run = torch.compile(body, fullgraph=True, dynamic=True)
for rows in (6, 9):
    x = torch.randn(rows, 8)
    torch.testing.assert_close(run(x), body(x))
"""


@pytest.mark.thorough
def test_inductor_compiles_the_operations() -> None:
    """The compiler that engines use calls the operations with sizes that it does not know."""
    subprocess.run([sys.executable, "-c", INDUCTOR], check=True, cwd=ROOT, timeout=300)
