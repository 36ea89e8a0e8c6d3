"""Functional collectives return tensors that wait at their first use, take groups in any form and can be traced."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from coordinator import ClosedError, UsageError, functional
from tests.harness import RankPool
from tests.worlds import new_group, outcome_of, world

LARGE = (1024, 512)


def results(rank: int, world_size: int, directory: Path) -> list[Any]:
    found: list[Any] = []
    with world(rank, world_size, directory) as group:
        for shape in ((4, 3), LARGE):
            x = torch.arange(shape[0] * shape[1]).view(shape).remainder(101).float() * (rank + 1)
            before = x.clone()
            pairs = {
                "all_reduce": (functional.all_reduce(x, "sum", group), group.all_reduce(x)),
                "max": (functional.all_reduce(x, "max", group), group.all_reduce(x, "max")),  # type: ignore[call-overload]
                "all_gather": (functional.all_gather_tensor(x, 1, group), group.all_gather(x, 1)),
                "reduce_scatter": (
                    functional.reduce_scatter_tensor(x, "sum", 0, group),
                    group.reduce_scatter(x, 0),
                ),
                "all_to_all": (
                    functional.all_to_all_single(x, None, None, group),
                    group.all_to_all(x),
                ),
                "part": (
                    functional.all_to_all_single(x[:2], [1, 1], [1, 1], group),
                    group.all_to_all(x[:2], 0, [1, 1], [1, 1]),
                ),
                "broadcast": (functional.broadcast(x, 1, group), group.broadcast(x.clone(), 1)),
            }
            is_waiting = [isinstance(made, AsyncCollectiveTensor) for made, _ in pairs.values()]
            found.append(all(is_waiting[i] == (shape == LARGE) for i in (0, 1, 2, 3, 4, 6)))
            for made, expected in pairs.values():
                found.append(made.shape == expected.shape and made.dtype == expected.dtype)
                found.append(torch.equal(made, expected))
                found.append(torch.equal(functional.wait_tensor(made), expected))
            found.append(torch.equal(x, before))
        # After that the result is an ordinary tensor.
        made = functional.all_reduce(torch.ones(LARGE), "sum", group)
        found.append(float((made.view(-1)[:4] + 1).sum()) == 12.0)
        again = functional.all_reduce(made, "sum", group)
        found.append(again.tolist()[0][0] == 4.0 and again.numpy()[0, 0] == 4.0 and "4." in repr(again))
        found.append(float(functional.all_reduce(torch.ones(3), "sum", group, overlap=True)[0]) == 2.0)
        found.append(
            isinstance(functional.all_reduce(torch.ones(LARGE), "sum", group, overlap=False), torch.Tensor)
        )
        made = functional.all_reduce(torch.ones(LARGE), "sum", group)
        found.append(torch.empty(LARGE).copy_(made)[3, 3].item() == 2.0)
        del made
        sums = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3).int()], "sum", group)
        found.append([each.tolist() for each in sums] == [[2.0, 2.0], [2, 2, 2]])
        found.append(
            functional.all_gather_tensor_coalesced([torch.ones(2)], 0, group)[0].tolist() == [1.0] * 4
        )
        found.append(
            functional.reduce_scatter_tensor_coalesced([torch.ones(2)], "sum", 0, group)[0].tolist() == [2.0]
        )
        found.append(
            outcome_of(lambda: functional.all_gather_tensor(torch.ones(2), 3, group))["kind"] == "UsageError"
        )
        wrong = torch.ones(513, 512)
        found.append(
            outcome_of(lambda: functional.wait_tensor(functional.reduce_scatter_tensor(wrong, group=group)))[
                "kind"
            ]
            == "UsageError"
        )
    return found


def test_results_wait_at_first_use(ranks2: RankPool) -> None:
    """They have the bits of the group's own calls. Small results are complete at once."""
    for found in ranks2.run(results):
        assert all(found), found


def forms(rank: int, world_size: int, directory: Path) -> list[Any]:
    found: list[Any] = []
    with world(rank, world_size, directory) as everyone:
        x = torch.ones(2)
        pairs = [[0, 1], [2, 3]]
        with new_group(everyone, "other"), everyone.split_group(pairs, group_name="pair") as pair:  # type: ignore[union-attr]
            own = pairs[rank // 2]
            meant: list[tuple[Any, int]] = [
                (pair, 2),
                (pair.unique_name, 2),
                (own, 2),
                (pairs, 2),
                (pair.cpu_group, 2),
                (pair.as_process_group(), 2),
                ([0, 1, 2, 3], 4),
                (dist.group.WORLD, 4),
            ]
            for form, size in meant:
                found.append(functional.all_reduce(x, "sum", form).tolist() == [float(size)] * 2)
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            found.append(functional.all_reduce(x, "sum", (mesh, 1)).tolist() == [2.0] * 2)
            found.append(functional.all_reduce(x, "sum", (mesh, "b")).tolist() == [2.0] * 2)
            found.append(functional.all_reduce(x, "sum", mesh["b"]).tolist() == [2.0] * 2)
            for wrong in ([0, 3, 1], (mesh, 0), 5, [], "nobody:0"):
                try:
                    functional.all_reduce(x, "sum", wrong)  # type: ignore[arg-type]
                    found.append(False)
                except (UsageError, ClosedError):
                    found.append(True)
            # No call above was collective over "a": a rank may still look whether its connection in it is open.
            everyone.barrier()
            for each in ("a", "b"):
                dist.destroy_process_group(mesh.get_group(each))
    return found


def test_a_group_is_given_in_any_form(ranks4: RankPool) -> None:
    """It may be a coordinator, a name, ranks, nested ranks, a process group, or a mesh with a dimension."""
    for found in ranks4.run(forms):
        assert all(found), found


def compiled(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        x = torch.arange(8.0).view(4, 2) * (rank + 1)

        def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            total = functional.all_reduce(x * 2, "sum", group)
            whole = functional.all_gather_tensor(total, 0, group)
            return total + 1, functional.reduce_scatter_tensor(whole, "sum", 0, group)

        expected = model(x)
        made = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        torch.compiler.reset()
        return [torch.equal(a, b) for a, b in zip(made, expected, strict=True)]


def test_functional_collectives_are_traced(compilers2: RankPool) -> None:
    """They become one graph with the operations of this package."""
    # The compiler leaves pipes and sockets itself.
    assert compilers2.run(compiled, timeout_s=120, check_leaks=False) == [[True, True]] * 2


def lazy_inputs(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        ones = torch.ones(1 << 19)
        lazy = functional.all_reduce(ones, "sum", group)
        assert type(lazy) is not torch.Tensor
        assert group.all_reduce(lazy)[0] == world_size**2
        lazy = functional.all_reduce(ones, "sum", group)
        assert group.all_reduce_(lazy)[0] == world_size**2
        lazy = functional.all_reduce(ones, "sum", group)
        output = torch.empty(world_size << 19)
        group.all_gather_into_tensor(output, lazy)
        assert output[-1] == world_size
        lazy = functional.all_reduce(ones, "sum", group)
        assert group.all_reduce(lazy, out=output[: 1 << 19])[0] == world_size**2
        lazy = functional.all_reduce(ones, "sum", group)
        total = group.reduce(lazy)
        assert rank or (total is not None and total[0] == world_size**2)


def test_a_result_that_waits_can_be_reduced_again(ranks2: RankPool) -> None:
    """The result has no memory before it is used."""
    ranks2.run(lazy_inputs)
