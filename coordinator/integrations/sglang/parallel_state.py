"""SGLang's functions for parallel groups, over the groups of this project.

A program that was written for `sglang.srt.distributed.parallel_state` imports this module instead, and needs no SGLang.
Inside a running SGLang, call `coordinator.integrations.sglang.install` instead: SGLang's own functions then create our
groups.

SGLang reads the widths from its server arguments. Here `initialize_model_parallel` takes them by name. Groups of equal
width are one object where SGLang makes them one.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist

from coordinator import parallel_state as ours
from coordinator.graph_capture import GraphCaptureContext
from coordinator.groups import destroy_together
from coordinator.integrations.sglang.group import SglangGroupCoordinator
from coordinator.integrations.sglang.widths import Widths
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout

__all__ = [
    "create_custom_parallel_group",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "get_attn_context_model_parallel_rank",
    "get_attn_context_model_parallel_world_size",
    "get_attn_cp_group",
    "get_attn_tensor_model_parallel_rank",
    "get_attn_tensor_model_parallel_world_size",
    "get_attn_tp_group",
    "get_dcp_group",
    "get_dcp_group_no_assert",
    "get_dcp_rank",
    "get_dcp_world_size",
    "get_moe_data_parallel_rank",
    "get_moe_data_parallel_world_size",
    "get_moe_dp_group",
    "get_moe_ep_group",
    "get_moe_expert_parallel_rank",
    "get_moe_expert_parallel_world_size",
    "get_moe_tensor_parallel_rank",
    "get_moe_tensor_parallel_world_size",
    "get_moe_tp_group",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_pp_group",
    "get_self_pp_group",
    "get_shared_experts_tp_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "get_world_rank",
    "get_world_size",
    "graph_capture",
    "init_distributed_environment",
    "init_model_parallel_group",
    "init_world_group",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "monkey_patch_vllm_parallel_state",
    "patch_pipeline_parallel_group",
    "patch_tensor_parallel_group",
    "pdmux_prefill_tp_group",
]

_VLLM: Final = "vllm.distributed.parallel_state"
_VLLM_GETTERS: Final = ("get_pp_group", "get_tp_group", "get_world_group")


@dataclasses.dataclass
class _State:
    """The groups of this process.

    Attributes:
        groups: The group of each dimension, by SGLang's name for it; several names may have one group.
        owned: All groups in order of creation, each once.
        custom: Groups behind `create_custom_parallel_group`.
        vllm: vLLM's own getters, as long as ours are in their place.
        replaced: What a block has put in the place of groups, by the first of their dimensions; None hides a group.
    """

    groups: dict[str, SglangGroupCoordinator] = dataclasses.field(default_factory=dict)
    owned: list[SglangGroupCoordinator] = dataclasses.field(default_factory=list)
    custom: list[SglangGroupCoordinator] = dataclasses.field(default_factory=list)
    vllm: dict[str, Any] = dataclasses.field(default_factory=dict)
    replaced: dict[str, Mapping[str, SglangGroupCoordinator | None]] = dataclasses.field(default_factory=dict)

    def find(self, name: str) -> SglangGroupCoordinator | None:
        """Return the group that is used for a dimension now, if there is one."""
        for changes in list(self.replaced.values()):
            if name in changes:
                return changes[name]
        return self.groups.get(name)


_state: Final = _State()


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str | None = None,
    timeout: AnyTimeout = None,
    moe_a2a_backend: str | None = None,
    recovered_rank: bool = False,
    max_world_size: int | None = None,
) -> None:
    """Join the world and create the world group; see `coordinator.parallel_state.init_distributed_environment`.

    Collective over the world. `moe_a2a_backend` is ignored, as every group can exchange tokens.

    Raises:
        UsageError: `recovered_rank` or `max_world_size` asks for a world whose ranks change.
        Others: As the function that it calls.
    """
    del moe_a2a_backend
    if recovered_rank or max_world_size is not None:
        raise UsageError(
            "recovered_rank and max_world_size ask for a world whose ranks change, which ours does not"
        )
    ours.init_distributed_environment(world_size, rank, distributed_init_method, local_rank, backend, timeout)
    if "world" not in _state.groups:
        world = ours.get_world_group()
        ranks, where = list(range(world.world_size)), world.local_rank
        _state.groups["world"] = init_world_group(ranks, where, world.torch_distributed_backend)


def init_world_group(
    ranks: Sequence[int],
    local_rank: int,
    backend: str,
    recovered_rank: bool = False,
    max_world_size: int | None = None,
) -> SglangGroupCoordinator:
    """Create a group of all ranks; see `SglangGroupCoordinator`. Collective."""
    flags = (False,) * 6
    return SglangGroupCoordinator(
        [ranks],
        local_rank,
        backend,
        *flags,
        group_name="world",
        recovered_rank=recovered_rank,
        max_world_size=max_world_size,
    )


def init_model_parallel_group(
    group_ranks: Sequence[Sequence[int]],
    local_rank: int,
    backend: str,
    use_pynccl: bool | None = None,
    use_custom_allreduce: bool | None = None,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    use_mscclpp: bool | None = None,
    use_torch_symm_mem_allreduce: bool | None = None,
    recovered_rank: bool = False,
    rank_offset: int = 0,
    max_world_size: int | None = None,
) -> SglangGroupCoordinator:
    """Create this rank's group; see `SglangGroupCoordinator`. Collective over all ranks in `group_ranks`."""
    return SglangGroupCoordinator(
        group_ranks,
        local_rank,
        backend,
        bool(use_pynccl),
        bool(use_mscclpp),
        bool(use_custom_allreduce),
        bool(use_torch_symm_mem_allreduce),
        use_hpu_communicator=False,
        use_xpu_communicator=False,
        use_message_queue_broadcaster=use_message_queue_broadcaster,
        group_name=group_name,
        recovered_rank=recovered_rank,
        rank_offset=rank_offset,
        max_world_size=max_world_size,
    )


def initialize_model_parallel(
    backend: str | None = None,
    duplicate_tp_group: bool = False,
    enable_symm_mem: bool = False,
    recovered_rank: bool = False,
    rank_offset: int = 0,
    max_world_size: int | None = None,
    *,
    tensor_model_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    attention_data_parallel_size: int = 1,
    attention_context_model_parallel_size: int = 1,
    moe_data_model_parallel_size: int = 1,
    decode_context_parallel_size: int = 1,
    shared_experts_tensor_parallel_size: int | None = None,
    use_message_queue_broadcaster: bool = False,
) -> None:
    """Create the groups of every dimension. Collective over the world.

    Args:
        backend: torch backend of the device groups; default: that of the world group.
        duplicate_tp_group: Whether to create a second tensor-parallel group; see `pdmux_prefill_tp_group`.
        enable_symm_mem: Ignored: a group's communicator chooses its memory.
        recovered_rank: Must be False; see `SglangGroupCoordinator`.
        rank_offset: Must be 0.
        max_world_size: Must be None.
        tensor_model_parallel_size: Ranks of a pipeline stage.
        expert_model_parallel_size: Ranks of a stage over which the experts are spread.
        pipeline_model_parallel_size: Number of stages.
        attention_data_parallel_size: Copies of the attention layers in a stage.
        attention_context_model_parallel_size: Ranks that share a sequence in attention.
        moe_data_model_parallel_size: Copies of the experts in a stage.
        decode_context_parallel_size: Ranks of a stage that share the cache of a sequence; 1 creates no group.
        shared_experts_tensor_parallel_size: Ranks over which shared experts are split; None or 1 creates no group.
        use_message_queue_broadcaster: Whether the tensor-parallel groups broadcast objects by a queue.

    Raises:
        UsageError: There are groups already, there is no world group, or the sizes do not divide each other.
        Others: As `SglangGroupCoordinator`. The groups that exist by then are destroyed.
    """
    del enable_symm_mem
    if model_parallel_is_initialized():
        raise UsageError("there are groups already: call destroy_model_parallel() first")
    world = get_world_group()
    widths = Widths(
        world=world.world_size,
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        attn_dp=attention_data_parallel_size,
        attn_cp=attention_context_model_parallel_size,
        moe_ep=expert_model_parallel_size,
        moe_dp=moe_data_model_parallel_size,
        dcp=decode_context_parallel_size,
        shared_experts_tp=shared_experts_tensor_parallel_size or 1,
    )
    tables = widths.tables()
    if duplicate_tp_group:
        tables["pdmux_prefill_tp"] = tables["tp"]
    elastic = {
        "recovered_rank": recovered_rank,
        "rank_offset": rank_offset,
        "max_world_size": max_world_size,
    }
    try:
        for name, table in tables.items():
            group = init_model_parallel_group(
                table,
                world.local_rank,
                backend or world.torch_distributed_backend,
                use_message_queue_broadcaster=use_message_queue_broadcaster and name.endswith("tp"),
                group_name=name,
                **elastic,  # type: ignore[arg-type]
            )
            _state.owned.append(group)
            _state.groups[name] = group
        for name, same in widths.aliases().items():
            _state.groups[name] = _state.groups[same]
    except BaseException:
        destroy_model_parallel()
        raise


def model_parallel_is_initialized() -> bool:
    """Return whether `initialize_model_parallel` has created groups."""
    return "tp" in _state.groups and "pp" in _state.groups


def _group(name: str) -> SglangGroupCoordinator:
    group = _state.find(name)
    if group is None:
        wanted = "init_distributed_environment" if name == "world" else "initialize_model_parallel"
        raise UsageError(
            f"there is no group {name!r}: call {wanted}(...) first, with a size that needs this group"
        )
    return group


def get_world_group() -> SglangGroupCoordinator:
    """Return the group of all ranks; raise `UsageError` if there is none, as every getter here."""
    return _group("world")


def get_tp_group() -> SglangGroupCoordinator:
    """Return the group of the ranks of this pipeline stage."""
    return _group("tp")


def get_attn_tp_group() -> SglangGroupCoordinator:
    """Return the group of the ranks that split an attention layer."""
    return _group("attn_tp")


def get_attn_cp_group() -> SglangGroupCoordinator:
    """Return the group of the ranks that share a sequence in attention."""
    return _group("attn_cp")


def get_shared_experts_tp_group() -> SglangGroupCoordinator:
    """Return the group of the ranks that split the shared experts."""
    return _group("shared_experts_tp")


def get_dcp_group() -> SglangGroupCoordinator:
    """Return the group of the ranks that share the cache of a sequence while it is decoded."""
    return _group("dcp")


def get_dcp_group_no_assert() -> SglangGroupCoordinator | None:
    """Return what `get_dcp_group` does, or None if there is no such group."""
    return _state.find("dcp")


def get_moe_dp_group() -> SglangGroupCoordinator:
    """Return the group of the ranks that hold the same part of the experts."""
    return _group("moe_dp")


def get_moe_ep_group() -> SglangGroupCoordinator:
    """Return the group of the ranks over which the experts are spread."""
    return _group("moe_ep")


def get_moe_tp_group() -> SglangGroupCoordinator:
    """Return the group of the ranks that split an expert."""
    return _group("moe_tp")


def get_pp_group() -> SglangGroupCoordinator:
    """Return the group of the ranks at the same place in each pipeline stage."""
    return _group("pp")


def get_self_pp_group() -> SglangGroupCoordinator:
    """Return a pipeline group of this rank alone, for draft models of one stage."""
    return _group("self_pp")


get_tensor_model_parallel_group = get_tp_group
get_pipeline_model_parallel_group = get_pp_group


def get_world_size() -> int:
    """Return the number of all ranks."""
    return get_world_group().world_size


def get_world_rank() -> int:
    """Return this process's global rank."""
    return get_world_group().rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks in the tensor-parallel group."""
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    """Return this process's rank in the tensor-parallel group."""
    return get_tp_group().rank_in_group


def get_dcp_world_size() -> int:
    """Return the number of ranks in the decode context group."""
    return get_dcp_group().world_size


def get_dcp_rank() -> int:
    """Return this process's rank in the decode context group."""
    return get_dcp_group().rank_in_group


def get_attn_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks that split an attention layer."""
    return get_attn_tp_group().world_size


def get_attn_tensor_model_parallel_rank() -> int:
    """Return this process's rank among those that split an attention layer."""
    return get_attn_tp_group().rank_in_group


def get_attn_context_model_parallel_world_size() -> int:
    """Return the number of ranks that share a sequence in attention."""
    return get_attn_cp_group().world_size


def get_attn_context_model_parallel_rank() -> int:
    """Return this process's rank among those that share a sequence in attention."""
    return get_attn_cp_group().rank_in_group


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of pipeline stages."""
    return get_pp_group().world_size


def get_pipeline_model_parallel_rank() -> int:
    """Return the index of this process's pipeline stage."""
    return get_pp_group().rank_in_group


def get_moe_data_parallel_world_size() -> int:
    """Return the number of copies of the experts."""
    return get_moe_dp_group().world_size


def get_moe_data_parallel_rank() -> int:
    """Return the index of this process's copy of the experts."""
    return get_moe_dp_group().rank_in_group


def get_moe_expert_parallel_world_size() -> int:
    """Return the number of ranks over which the experts are spread."""
    return get_moe_ep_group().world_size


def get_moe_expert_parallel_rank() -> int:
    """Return this process's rank among those over which the experts are spread."""
    return get_moe_ep_group().rank_in_group


def get_moe_tensor_parallel_world_size() -> int:
    """Return the number of ranks that split an expert."""
    return get_moe_tp_group().world_size


def get_moe_tensor_parallel_rank() -> int:
    """Return this process's rank among those that split an expert."""
    return get_moe_tp_group().rank_in_group


@contextmanager
def pdmux_prefill_tp_group() -> Iterator[None]:
    """Use the second tensor-parallel group as `get_tp_group` inside the block; not collective."""
    with _replaced({"tp": _group("pdmux_prefill_tp")}):
        yield


@contextmanager
def patch_pipeline_parallel_group(pp_group: SglangGroupCoordinator) -> Iterator[None]:
    """Make `pp_group` the pipeline group inside the block; not collective, and not nestable."""
    with _replaced({"pp": pp_group}):
        yield


@contextmanager
def patch_tensor_parallel_group(tp_group: SglangGroupCoordinator, *, owns_attention: bool) -> Iterator[None]:
    """Make `tp_group` the tensor-parallel group inside the block, for a draft model; not collective, not nestable.

    Args:
        tp_group: The group of the draft model.
        owns_attention: Whether it is also the draft's attention group and splits its experts. There are then no
            attention context and expert groups inside the block: their getters raise `UsageError`.
    """
    changes: dict[str, SglangGroupCoordinator | None] = {"tp": tp_group}
    if owns_attention:
        changes |= {"attn_tp": tp_group, "moe_tp": tp_group, "attn_cp": None, "moe_ep": None}
    with _replaced(changes):
        yield


@contextmanager
def _replaced(changes: Mapping[str, SglangGroupCoordinator | None]) -> Iterator[None]:
    first = next(iter(changes))
    if first in _state.replaced:
        raise UsageError(f"the group {first!r} is replaced already; leave that block first")
    # Set and taken back in one step each, so that an interrupt finds all of it or nothing. `destroy_model_parallel` may
    # have taken it back before.
    _state.replaced[first] = changes
    try:
        yield
    finally:
        _state.replaced.pop(first, None)


@contextmanager
def graph_capture(stream: torch.Stream | None = None) -> Iterator[GraphCaptureContext]:
    """Capture a CUDA graph in which every group may be used; on the CPU a no-op. Collective over all groups.

    They are the world's, those that `initialize_model_parallel` has created, in the order of their creation, and those
    that a block has put in their place.

    Raises:
        UsageError: There is no world group.
    """
    replacing = [group for changes in list(_state.replaced.values()) for group in changes.values()]
    every = [get_world_group(), *_state.owned, *replacing]
    found = dict.fromkeys(group for group in every if group is not None)
    with ExitStack() as stack:
        first, *others = found
        context = stack.enter_context(first.graph_capture(stream=stream))
        for group in others:
            stack.enter_context(group.graph_capture(context))
        yield context


def create_custom_parallel_group(group_ranks: Sequence[int], backend: str = "gloo") -> dist.ProcessGroup:
    """Return a torch process group of `group_ranks`, which contain this rank. Collective over the world.

    Every rank passes the ranks of its own group. The process group lives until `destroy_model_parallel`.

    Args:
        group_ranks: Global ranks, in any order.
        backend: "gloo" for CPU tensors, or the backend of a device.

    Raises:
        UsageError: A rank is not in its own group, or names a rank that names another group. Every rank raises this,
            and nothing was created.
    """
    world = get_world_group()
    named = world.all_gather_object(sorted(set(group_ranks)))
    members = range(world.world_size)
    wrong = [
        rank
        for rank, ranks in enumerate(named)
        if rank not in ranks or any(each not in members or named[each] != ranks for each in ranks)
    ]
    if wrong:
        raise UsageError(
            "every rank must be in the group that it names, and its members must name the same one; this is not so for "
            + ", ".join(f"rank {rank} with {named[rank]}" for rank in wrong)
        )
    lists = [ranks for rank, ranks in enumerate(named) if rank == ranks[0]]
    group = init_model_parallel_group(lists, world.local_rank, backend, group_name="custom")
    _state.custom.append(group)
    return group.cpu_group if backend == "gloo" else group.device_group


def monkey_patch_vllm_parallel_state(reverse: bool = False) -> None:
    """Make vLLM's getters of its tensor, pipeline and world groups return ours; with `reverse` undo that.

    Without vLLM this does nothing: then no code of vLLM can ask.
    """
    try:
        module = importlib.import_module(_VLLM)
    except ImportError:
        return
    if reverse:
        for name, getter in _state.vllm.items():
            setattr(module, name, getter)
        _state.vllm.clear()
    else:
        if not _state.vllm:
            _state.vllm.update({name: getattr(module, name) for name in _VLLM_GETTERS})
        for name in _VLLM_GETTERS:
            setattr(module, name, globals()[name])


def _leaving() -> list[SglangGroupCoordinator]:
    return [*_state.owned, *_state.custom][::-1]


def destroy_model_parallel() -> None:
    """Destroy all groups but that of the world. Idempotent, not collective."""
    destroy_together(_leaving())
    _state.owned.clear()
    _state.custom.clear()
    _state.replaced.clear()
    for name in _state.groups.keys() - {"world"}:
        _state.groups.pop(name, None)


def destroy_distributed_environment() -> None:
    """Destroy all groups, and torch.distributed if `init_distributed_environment` opened it. Idempotent.

    Another call does the rest of one that was interrupted.
    """
    world = _state.groups.get("world")
    destroy_together(_leaving() if world is None else [*_leaving(), world])
    destroy_model_parallel()
    _state.groups.pop("world", None)
    ours.destroy_distributed_environment()
