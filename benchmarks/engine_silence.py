"""Workers of vLLM that can leave out the collectives of a model, to measure what these cost."""

from typing import Any

import torch

__all__ = ["WORKER_EXTENSION"]

WORKER_EXTENSION = f"{__name__}.SilentWorker"


class SilentWorker:
    """What vLLM adds to its workers if `worker_extension_cls` names this class."""

    def leave_out_collectives(self, *, silent: bool) -> None:
        """Let the tensor-parallel group answer with this rank's own tensors from now on, or communicate again.

        The answers have the right shapes and wrong values, so the model does the same work.
        """
        from vllm.distributed.parallel_state import get_tp_group

        group: Any = get_tp_group()

        def all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            return torch.cat([input_] * group.world_size, dim)

        def gather(input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
            return all_gather(input_, dim) if group.rank_in_group == dst else None

        # Attributes of the object hide the methods of its class.
        stand_ins = {"all_reduce": lambda input_: input_, "all_gather": all_gather, "gather": gather}
        for name, stand_in in stand_ins.items():
            if silent:
                setattr(group, name, stand_in)
            else:
                vars(group).pop(name, None)
