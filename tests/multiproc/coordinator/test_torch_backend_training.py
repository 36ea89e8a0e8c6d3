"""DDP, FSDP2, DTensor and pipelining of torch train over the backend as they do over Gloo.

Only the ranks of a program import what it needs of torch: collecting this file would take more than a second otherwise.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.harness import RankPool
from tests.torch_groups import BACKENDS, OURS, torch_world

Numbers = list[Any]

WIDTH = 8


def network() -> nn.Sequential:
    """Return a small network with the same parameters on all ranks."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def batch(rank: int, step: int) -> torch.Tensor:
    """Return this rank's input of one step."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, rank: int, steps: int = 3) -> None:
    """Make some steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> Numbers:
    """Return all parameters; those of sharded ones are gathered."""
    found = []
    for parameter in model.parameters():
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.append(value.detach().flatten().tolist())
    return found


def ddp(rank: int, world_size: int) -> Numbers:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.0005)
    train(model, rank)
    return whole(model)


def ddp_with_hooks(rank: int, world_size: int) -> Numbers:
    found = []
    for state, hook in (
        (None, default_hooks.fp16_compress_hook),
        (None, default_hooks.allreduce_hook),
        (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    ):
        # The look for unused parameters is a collective of the training thread. PowerSGD makes its own in callbacks,
        # and between the two torch keeps no order that all ranks share.
        model = DistributedDataParallel(network(), find_unused_parameters=state is None)
        model.register_comm_hook(state, hook)
        train(model, rank, 4)
        found.append(whole(model))
    model = DistributedDataParallel(network())
    with model.join():
        train(model, rank, 2 + rank)
    return [*found, whole(model)]


def fsdp2(rank: int, world_size: int) -> Numbers:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)):
        model = network()
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        train(model, rank)
        found.append(whole(model))
    return found


def dtensor(rank: int, world_size: int) -> Numbers:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world_size,))
    values = torch.arange(float(WIDTH * WIDTH)).view(WIDTH, WIDTH)
    rows, columns = distribute_tensor(values, mesh, [Shard(0)]), distribute_tensor(values, mesh, [Shard(1)])
    product: Any = columns @ rows
    product = product.redistribute(mesh, [Replicate()]).to_local()
    moved = rows.redistribute(mesh, [Shard(1)]).to_local()
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, 0)
    return [product.tolist(), moved.tolist(), whole(model)]


def pipelining(rank: int, world_size: int) -> Numbers:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    first, middle, last = network()
    part = nn.Sequential(first, middle) if rank == 0 else nn.Sequential(last)
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().sum()
    )
    losses: list[torch.Tensor] = []
    for step in range(2):
        inputs = torch.cat([batch(0, step), batch(1, step)])
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=torch.zeros_like(inputs), losses=losses)
    grads = [parameter.grad for parameter in part.parameters()]
    return [[loss.item() for loss in losses], [grad.flatten().tolist() for grad in grads if grad is not None]]


PROGRAMS: dict[str, Callable[[int, int], Numbers]] = {
    "DDP": ddp,
    "DDP with hooks": ddp_with_hooks,
    "FSDP2": fsdp2,
    "DTensor": dtensor,
    "pipelining": pipelining,
}


def train_over_both(rank: int, world_size: int, directory: Path, program: str) -> list[Numbers]:
    found = []
    torch.set_num_threads(1)
    for backend in BACKENDS:
        with torch_world(rank, world_size, directory, backend), warnings.catch_warnings():
            # torch warns of its own experimental parts.
            warnings.simplefilter("ignore")
            torch.manual_seed(11)
            found.append(PROGRAMS[program](rank, world_size))
            assert dist.get_backend() == backend
    return found


@pytest.mark.slow
@pytest.mark.guarantee("G42")
@pytest.mark.parametrize("program", PROGRAMS)
def test_training_gives_the_numbers_of_gloo(program: str, ranks2: RankPool) -> None:
    """Every parameter after some steps has the same bits: two ranks' elements are added in one order only."""
    for theirs, ours in ranks2.run(train_over_both, program, check_leaks=False, timeout_s=180.0):
        assert theirs
        assert ours == theirs, f"{OURS} differs from gloo"
