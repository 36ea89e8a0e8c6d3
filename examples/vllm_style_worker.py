"""A worker in the style of vLLM on this package: `torchrun --nproc-per-node 2 examples/vllm_style_worker.py`.

Comments mark the changes: two imports, and one line for each class that is sent. The class `Worker` is unchanged.
"""

import os
from dataclasses import dataclass, field

import torch

# new: nothing is pickled, so every rank registers the classes that are sent
from coordinator import register_type

# was: from vllm.distributed.parallel_state import (...)
from coordinator.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
)

HIDDEN = 32


@register_type
@dataclass
class SchedulerOutput:
    """The scheduler's decisions for one step."""

    step: int
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str] = field(default_factory=set)


class RowParallelLinear(torch.nn.Module):
    """A linear layer whose input dimension is split over the ranks; an all-reduce sums the partial results."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Keep this rank's columns of `weight`."""
        super().__init__()
        size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.columns = slice(HIDDEN // size * rank, HIDDEN // size * (rank + 1))
        self.weight = weight[:, self.columns]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, and all-reduce over the group."""
        return get_tp_group().all_reduce(x[:, self.columns] @ self.weight.T)


class Worker:
    """One rank of the engine."""

    def __init__(self, rank: int, local_rank: int, world_size: int) -> None:
        """Store the numbers that the executor passes."""
        self.rank, self.local_rank, self.world_size = rank, local_rank, world_size

    def init_device(self) -> None:
        """Join the other ranks and create the groups."""
        init_distributed_environment(
            world_size=self.world_size,
            rank=self.rank,
            distributed_init_method="env://",
            local_rank=self.local_rank,
            backend="gloo",
        )
        ensure_model_parallel_initialized(self.world_size, 1)

    def load_model(self) -> None:
        """Generate the same weights on each rank, and keep a slice."""
        generator = torch.Generator().manual_seed(0)
        self.full_weight = torch.randint(-3, 4, (HIDDEN, HIDDEN), generator=generator).float()
        self.layer = RowParallelLinear(self.full_weight)

    def execute_model(self, scheduler_output: SchedulerOutput | None) -> torch.Tensor:
        """Run one step; rank 0 passes the plan."""
        plan = get_world_group().broadcast_object(scheduler_output, src=0)
        tokens = sum(plan.num_scheduled_tokens.values())
        hidden = torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN) % 5
        if not get_pp_group().is_first_rank:
            received = get_pp_group().recv_tensor_dict(all_gather_group=get_tp_group())
            assert received is not None
            hidden = received["hidden_states"]
        output: torch.Tensor = self.layer(hidden)
        assert torch.equal(output, hidden @ self.full_weight.T)
        return output


def main() -> None:
    """Run one rank under torchrun."""
    rank = int(os.environ["RANK"])
    worker = Worker(rank, int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    worker.init_device()
    worker.load_model()
    for step in range(3):
        plan = SchedulerOutput(step, {"a": 2, "b": step + 1}, {"c"}) if rank == 0 else None
        output = worker.execute_model(plan)
        print(f"rank {rank}, step {step}: {output.shape[0]} tokens, sum {output.sum().item():.0f}")
    destroy_model_parallel()
    destroy_distributed_environment()


if __name__ == "__main__":
    main()
