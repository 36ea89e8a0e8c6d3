"""Module-level functions with vLLM's names, over the current `ParallelGroups`. The module holds no state.

`initialize_model_parallel` sets the default groups of the process, which every thread sees. Inside `with groups:` or
`with groups.as_current():` the calling context sees those groups instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from coordinator.bootstrap.rendezvous import init_world, leave_world
from coordinator.graph_capture import GraphCaptureContext, context_for
from coordinator.group import GroupCoordinator
from coordinator.groups import (
    ParallelGroups,
    current_groups,
    default_backend,
    find_current_groups,
    find_world_group,
    set_default_groups,
    set_world_group,
)
from coordinator.layout import ParallelLayout
from coordinator.settings import CoordinatorSettings, launched_local_rank
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout, seconds

logger: logging.Logger = logging.getLogger(__name__)


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str | None = None,
    timeout: AnyTimeout = None,
    *,
    settings: CoordinatorSettings | None = None,
) -> None:
    """Join the world: initialise torch.distributed unless it is initialised, and create the world group.

    Collective over the world. Blocks until every rank has joined; each step takes at most `create_timeout_s`. A
    torch.distributed that is already initialised is used as it is, and never destroyed by this package. A second call
    only checks that world size and rank are the same.

    An argument beats the launcher's variable, also with `env://`, and a variable that is not needed is not read:
    engines set some of them for their own purposes. The ranks find out among themselves if two were given one rank, or
    different world sizes.

    Args:
        world_size: Number of processes; -1 takes `WORLD_SIZE`, which a launcher sets.
        rank: Global rank; -1 takes `RANK`.
        distributed_init_method: `env://` (torchrun), `tcp://HOST:PORT` with an address of rank 0's host, or, on a
            single host, `file:///DIRECTORY`. As in torch the path may also be that of a file, empty or left by an
            earlier run, or of nothing yet. What we make there or beside it is removed by the last rank to leave.
        local_rank: Index of this process's device on its host; -1 takes `LOCAL_RANK`, else the rank.
        backend: torch backend of the world: "gloo", "nccl", …; None takes the accelerator's, else "gloo".
        timeout: Deadline of collectives, in seconds or as a `timedelta`; cannot be combined with `settings`.
        settings: Settings of the world group; default: read from the environment.

    Raises:
        UsageError: The arguments contradict each other or an existing world.
        SettingsError: The environment is incomplete or malformed.
        DisagreementError: Ranks were started with different settings.
        CommTimeoutError: Ranks did not join in time; `.missing` names them.
        PeerLostError: A rank died meanwhile; `.peers` names it.
        CapabilityError: Ranks are on several hosts and one announced a loopback address.
        NativeError: A call of torch.distributed failed.
    """
    if timeout is not None:
        if settings is not None:
            raise UsageError("pass the deadline either as timeout or in settings, not both")
        settings = CoordinatorSettings.resolve(timeout_s=seconds(timeout, "timeout"))
    settings = settings or CoordinatorSettings.from_env()
    world = find_world_group()
    if world is not None:
        _check_same("world_size", world_size, world.world_size)
        _check_same("rank", rank, world.rank)
        return
    backend = backend or default_backend()
    joined = not dist.is_initialized()
    spent: dict[str, float] = {}
    if joined:
        spent = init_world(world_size, rank, distributed_init_method, backend, settings)
    else:
        _check_same("world_size", world_size, dist.get_world_size())
        _check_same("rank", rank, dist.get_rank())
    try:
        everyone = [list(range(dist.get_world_size()))]
        group = GroupCoordinator(
            everyone, _local_rank(local_rank), backend, True, group_name="world", settings=settings
        )
    except BaseException:
        if joined:
            leave_world()
        raise
    group.creation = group.creation.plus(**spent)
    if joined:
        logger.info("joined the world of %d ranks: %s", group.world_size, group.creation)
    set_world_group(group)


def _check_same(name: str, given: int, present: int) -> None:
    if given not in (-1, present):
        raise UsageError(f"{name}={given}, but torch.distributed is initialised with {name} {present}")


def _local_rank(given: int) -> int:
    if given >= 0:
        return given
    launched = launched_local_rank()
    return dist.get_rank() if launched is None else launched


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
    *,
    data_parallel_size: int | None = None,
    expert_parallel_size: int | None = None,
) -> None:
    """Create the groups of every dimension and make them the process's default. Collective over the world.

    Args:
        tensor_model_parallel_size: Ranks that share a layer.
        pipeline_model_parallel_size: Number of pipeline stages.
        prefill_context_model_parallel_size: Ranks that share a sequence.
        decode_context_model_parallel_size: Must be 1 or None in this version.
        backend: torch backend of the device groups; None takes the world group's.
        data_parallel_size: Number of replicas; None derives it from the world size.
        expert_parallel_size: Ranks that share the experts; None means all ranks of a stage.

    Raises:
        UsageError: The sizes do not fit the world, or there are current groups already.
        DisagreementError: Ranks ask for different sizes.
        CommTimeoutError: Ranks did not join within `create_timeout_s`; `.missing` names them.
        PeerLostError: A rank died meanwhile; `.peers` names it.
    """
    world = get_world_group()
    if decode_context_model_parallel_size not in (None, 1):
        raise UsageError("decode_context_model_parallel_size must be 1 or None in this version")
    if find_current_groups() is not None:
        raise UsageError(
            "model parallel groups exist already: call destroy_model_parallel() first, or use "
            "ParallelGroups.create(...) in a with block for a second model"
        )
    sizes = {
        "tensor": tensor_model_parallel_size,
        "pipeline": pipeline_model_parallel_size,
        "context": prefill_context_model_parallel_size,
    }
    if data_parallel_size is None:
        layout = ParallelLayout.from_world_size(world.world_size, **sizes, expert=expert_parallel_size)
    else:
        layout = ParallelLayout(**sizes, data=data_parallel_size, expert=expert_parallel_size)
    groups = ParallelGroups.create(
        layout,
        local_rank=world.local_rank,
        backend=backend or world.torch_distributed_backend,
        settings=world.settings,
        world=world,
    )
    set_default_groups(groups)


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
) -> None:
    """Create the groups if there are none; otherwise check that they have these sizes.

    A check ignores `decode_context_model_parallel_size` and `backend`.

    Collective over the world when it creates groups; a check sends nothing. The arguments and further errors are
    those of `initialize_model_parallel`.

    Raises:
        UsageError: The current groups have other sizes.
    """
    groups = find_current_groups()
    if groups is None:
        initialize_model_parallel(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            prefill_context_model_parallel_size,
            decode_context_model_parallel_size,
            backend,
        )
        return
    expected = {
        "tensor": (tensor_model_parallel_size, groups.tp.world_size),
        "pipeline": (pipeline_model_parallel_size, groups.pp.world_size),
        "prefill context": (prefill_context_model_parallel_size, groups.cp.world_size),
    }
    for name, (wanted, present) in expected.items():
        if wanted != present:
            raise UsageError(f"the {name} parallel group has {present} ranks, expected {wanted}")


def model_parallel_is_initialized() -> bool:
    """Return whether there are current groups."""
    return find_current_groups() is not None


def get_current_groups() -> ParallelGroups:
    """Return the current groups: those of the innermost `with groups:`, else the process's default.

    Raises:
        UsageError: There are no current groups.
    """
    return current_groups()


def maybe_get_current_groups() -> ParallelGroups | None:
    """Return the current groups, or None if there are none."""
    return find_current_groups()


def get_world_group() -> GroupCoordinator:
    """Return the group of all ranks.

    Raises:
        UsageError: There is none.
    """
    groups = find_current_groups()
    if groups is not None:
        return groups.world
    world = find_world_group()
    if world is None:
        raise UsageError("there is no world group: call init_distributed_environment(...) first")
    return world


def get_tp_group() -> GroupCoordinator:
    """Return the current tensor-parallel group."""
    return current_groups().tp


def get_pp_group() -> GroupCoordinator:
    """Return the current pipeline-parallel group."""
    return current_groups().pp


def get_dp_group() -> GroupCoordinator:
    """Return the current data-parallel group."""
    return current_groups().dp


def get_ep_group() -> GroupCoordinator:
    """Return the current expert-parallel group."""
    return current_groups().ep


def get_pcp_group() -> GroupCoordinator:
    """Return the current (prefill) context-parallel group."""
    return current_groups().cp


def get_tensor_model_parallel_group() -> GroupCoordinator:
    """Return the current tensor-parallel group."""
    return get_tp_group()


def get_pipeline_model_parallel_group() -> GroupCoordinator:
    """Return the current pipeline-parallel group."""
    return get_pp_group()


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks in the current tensor-parallel group."""
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    """Return this process's rank in the current tensor-parallel group."""
    return get_tp_group().rank_in_group


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of pipeline stages."""
    return get_pp_group().world_size


def get_pipeline_model_parallel_rank() -> int:
    """Return the index of this process's pipeline stage."""
    return get_pp_group().rank_in_group


def get_data_parallel_world_size() -> int:
    """Return the number of ranks in the current data-parallel group."""
    return get_dp_group().world_size


def get_data_parallel_rank() -> int:
    """Return this process's rank in the current data-parallel group."""
    return get_dp_group().rank_in_group


def get_expert_parallel_world_size() -> int:
    """Return the number of ranks in the current expert-parallel group."""
    return get_ep_group().world_size


def get_expert_parallel_rank() -> int:
    """Return this process's rank in the current expert-parallel group."""
    return get_ep_group().rank_in_group


def is_global_first_rank() -> bool:
    """Return whether this process is rank 0 of the world; True if there is no world yet."""
    return dist.get_rank() == 0 if dist.is_available() and dist.is_initialized() else True


@contextmanager
def graph_capture(device: torch.device) -> Iterator[GraphCaptureContext]:
    """Capture a CUDA graph in which every current group may be used; a no-op on the CPU.

    Collective over the current groups: all ranks capture the same calls.
    """
    groups = current_groups()
    with groups.graph_capture(context_for(device, None)) as context:
        yield context


def destroy_model_parallel() -> None:
    """Destroy the process's default groups, except for the world group. Idempotent, not collective."""
    groups = set_default_groups(None)
    if groups is not None:
        groups.destroy()


def destroy_distributed_environment() -> None:
    """Destroy the current groups, the world group, and torch.distributed if this package initialised it.

    Idempotent, not collective.
    """
    destroy_model_parallel()
    world = set_world_group(None)
    if world is not None:
        world.destroy()
    leave_world()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Do what `destroy_distributed_environment` does, under vLLM's name.

    Args:
        shutdown_ray: Must be False: this package does not start Ray.

    Raises:
        UsageError: `shutdown_ray` is True. Nothing is destroyed.
    """
    if shutdown_ray:
        raise UsageError(
            "shutdown_ray must be False: this package does not start Ray; call ray.shutdown() yourself"
        )
    destroy_distributed_environment()
