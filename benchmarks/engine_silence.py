"""Workers of vLLM that can leave out the collectives of a model, to measure what these cost."""

import mmap
from pathlib import Path
from typing import Any

import torch

__all__ = ["WORKER_EXTENSION"]

WORKER_EXTENSION = f"{__name__}.SilentWorker"


class SilentWorker:
    """What vLLM adds to its workers if `worker_extension_cls` names this class."""

    def leave_out_collectives(self, *, silent: bool, meet_at: str = "") -> None:
        """Let the tensor-parallel group answer with this rank's own tensors from now on, or communicate again.

        The answers have the right shapes and wrong values, so the model does the same work.

        Args:
            silent: Whether to leave the collectives out.
            meet_at: A file of a page of zeros. If it is given, each call still waits until every rank has made it, and
                polls that file meanwhile: what the ranks then lose is the least that any communication could cost.
        """
        from vllm.distributed.parallel_state import get_tp_group

        group: Any = get_tp_group()
        meet = _meeting(Path(meet_at), group.rank_in_group, group.world_size) if meet_at else lambda: None

        def all_reduce(input_: torch.Tensor) -> torch.Tensor:
            meet()
            return input_

        def all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            meet()
            return torch.cat([input_] * group.world_size, dim)

        def gather(input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
            return all_gather(input_, dim) if group.rank_in_group == dst else None

        # Attributes of the object hide the methods of its class.
        stand_ins = {"all_reduce": all_reduce, "all_gather": all_gather, "gather": gather}
        for name, stand_in in stand_ins.items():
            if silent:
                setattr(group, name, stand_in)
            else:
                vars(group).pop(name, None)


def _meeting(path: Path, rank: int, world_size: int) -> Any:
    """Return a function that returns once all ranks have called it as often as this one."""
    with path.open("r+b") as file:
        counts = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("Q")

    def meet() -> None:
        counts[rank] += 1
        mine = counts[rank]
        for other in range(world_size):
            while counts[other] < mine:
                pass

    return meet
