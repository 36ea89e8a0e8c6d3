"""One rank of SGLang's own distributed layer: `python -m tests.real_engines.sglang_run RANK SIZE ADDRESS`.

It needs SGLang's wheel and its lighter dependencies on the path. SGLang's sampler, whose import asks for half of its
dependencies, has a stand-in: the creation of groups reads one constant of it. With `SGLANG_PLUGINS=group_coordinator`
SGLang's functions create our groups. It prints one line of JSON: the class of the groups, and what SGLang's own
functions returned.
"""

import importlib
import json
import logging
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

from coordinator.integrations.sglang import register


def answers(state: Any, operations: Any, size: int) -> dict[str, Any]:
    """Call SGLang's functions; return what they answered, as lists."""
    group = state.get_tp_group()
    rank = group.rank_in_group
    mine = torch.arange(8, dtype=torch.float32).reshape(2, 4) + rank
    output, part = torch.zeros(2 * size, 4), torch.zeros(1, 4)
    group.all_gather_into_tensor(output, mine)
    group.reduce_scatter_tensor(part, mine.clone())
    found = {
        "all_reduce": operations.tensor_model_parallel_all_reduce(mine.clone()),
        "attention": operations.attention_tensor_model_parallel_all_reduce(mine.clone()),
        "experts": operations.moe_expert_parallel_all_reduce(mine.clone()),
        "all_gather": operations.tensor_model_parallel_all_gather(mine),
        "gather": operations.tensor_model_parallel_gather(mine) if rank == 0 else _none(operations, mine),
        "into": output,
        "scattered": part,
        "dict": operations.broadcast_tensor_dict({"x": mine} if rank == 0 else None, 0)["x"],
    }
    custom = state.create_custom_parallel_group(group_ranks=list(range(size)), backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=custom)
    found["custom"] = total
    with state.patch_tensor_parallel_group(group, owns_attention=True):
        found["patched"] = state.get_attn_tp_group().all_reduce(mine.clone())
    return {name: each.tolist() for name, each in found.items()} | {
        "ranks": group.ranks,
        "pipeline": state.get_pp_group().world_size,
        "same node": state.in_the_same_node_as(group.cpu_group),
    }


def _none(operations: Any, mine: torch.Tensor) -> torch.Tensor:
    assert operations.tensor_model_parallel_gather(mine) is None
    return torch.zeros(0)


def stand_in_for_the_sampler() -> None:
    """Give the creation of groups the constant that it reads."""
    module: Any = types.ModuleType("sglang.srt.layers.sampler")
    module.SYNC_TOKEN_IDS_ACROSS_TP = False
    sys.modules[module.__name__] = module


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    stand_in_for_the_sampler()
    register()
    operations: Any = importlib.import_module("sglang.srt.distributed.communication_op")
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    get_parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel

    state.init_distributed_environment(size, rank, sys.argv[3], rank, backend="gloo")
    widths = {"attn_dp_size": 1, "attn_cp_size": 1, "moe_dp_size": 1, "attn_dcp_size": 1, "pp_size": 1}
    with get_parallel().override(tp_size=size, moe_ep_size=size, shared_experts_tp_size=None, **widths):
        state.initialize_model_parallel()
        found = answers(state, operations, size)
        found["class"] = type(state.get_tp_group()).__name__
        # SGLang's `destroy_model_parallel` imports its models, and these torchvision.
        for group in {state.get_tp_group(), state.get_attn_cp_group(), state.get_pp_group()}:
            group.destroy()
        state.get_self_pp_group().destroy()
    state.destroy_distributed_environment()
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
