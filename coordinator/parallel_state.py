"""The module-level functions of vLLM's `parallel_state`, which use the current `ParallelGroups`.

This module holds no state.

`initialize_model_parallel` sets the default groups of the process, which every thread sees. Inside `with groups:` or
`with groups.as_current():` the calling context sees those groups instead.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from coordinator import group_registry, hosts
from coordinator.bootstrap.membership import world_store
from coordinator.bootstrap.rendezvous import end_interrupted, init_world, leave_world
from coordinator.bootstrap.world import declare_elastic, is_elastic_world
from coordinator.graph_capture import GraphCaptureContext, context_for
from coordinator.group import GroupCoordinator
from coordinator.groups import (
    ExtraGroup,
    ParallelGroups,
    current_groups,
    default_backend,
    destroy_at_once,
    destroy_together,
    find_current_groups,
    find_world_group,
    groups_of_process,
    set_default_groups,
    set_world_group,
)
from coordinator.launchers.init_methods import find_launch
from coordinator.launchers.launch import Caller
from coordinator.layout import ParallelLayout
from coordinator.meeting.tickets import Ticket, check_beside, checked
from coordinator.security.requirement import warn_if_unused
from coordinator.settings import (
    CoordinatorSettings,
    launched_local_rank,
    launcher_variables,
    permit_custom_all_reduce,
)
from device_comm import handles
from shm_broadcast.errors import CapabilityError, UsageError
from shm_broadcast.reports.log_fields import log_fields
from shm_broadcast.timeouts import AnyTimeout, seconds

logger: logging.Logger = logging.getLogger(__name__)

# Engines import it from here.
Handle = handles.Handle


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str | None = None,
    timeout: AnyTimeout = None,
    *,
    settings: CoordinatorSettings | None = None,
    elastic: bool = False,
    local_world_size: int = -1,
    meeting: Ticket | None = None,
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
            Other launchers are named: `slurm://[:PORT]` (srun), `mpi://HOST:PORT` (mpiexec of Open MPI or MPICH) and
            `lws://[:PORT]` (a LeaderWorkerSet of Kubernetes, port 29500 by default). Rank 0 serves the store there.
        local_rank: Index of this process's device on its host; -1 takes that of the named launcher, else `LOCAL_RANK`,
            else the rank. `lws://` needs it.
        backend: torch backend of the world: "gloo", "nccl", …; None takes the accelerator's, else "gloo".
        timeout: Deadline of collectives, in seconds or as a `timedelta`; cannot be combined with `settings`.
        settings: Settings of the world group; default: read from the environment.
        elastic: Whether the members may change; see `ParallelGroups.rebuild`. Equal on all ranks. It takes a store that
            outlives every rank: a directory, or the store of torchrun's agent, which however ends all of its
            workers when one fails. If torch.distributed is already initialised, it is the store that it uses.
        local_world_size: Number of processes in each pod, for `lws://`; -1 divides `world_size` by the number of pods.
        meeting: This process's ticket from a driver that has met all processes (`coordinator.meeting`), in place of
            world size, rank and init method: no variable of a launcher is read. It is good for one start.

    Raises:
        UsageError: The arguments contradict each other, a named launcher or an existing world; a named launcher has not
            set a variable; the ranks are on several hosts and the master's name stands for a loopback address; or rank
            0 would serve the store of a world with `elastic`. Or the ticket was made for another start.
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
    if meeting is not None:
        check_beside(checked(meeting), world_size, rank, distributed_init_method, elastic)
        if find_world_group() is not None or dist.is_initialized():
            raise UsageError(
                f"this process is in a world already and cannot use the {meeting}: call "
                "destroy_distributed_environment() first"
            )
        world_size, rank = meeting.world_size, meeting.rank
        local_rank = meeting.local_rank if local_rank < 0 else local_rank
    world = find_world_group()
    if world is not None:
        _check_same("world_size", world_size, world.world_size)
        _check_same("rank", rank, world.rank)
        if elastic and not is_elastic_world():
            raise UsageError("elastic=True, but this world was started without it")
        return
    caller = Caller(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size
    )
    launch = None if meeting else find_launch(distributed_init_method, launcher_variables(), caller)
    if launch is not None:
        rank, world_size, local_rank = launch.rank, launch.world_size, launch.local_rank
        distributed_init_method = launch.init_method
    backend = backend or default_backend()
    end_interrupted()
    joined = not dist.is_initialized()
    spent: dict[str, float] = {}
    if joined:
        destroy_distributed_environment()  # what a call that was interrupted has left
        spans_hosts = launch is not None and launch.spans_hosts
        spent = init_world(
            world_size, rank, distributed_init_method, backend, settings, elastic, spans_hosts, meeting
        )
    else:
        _check_same("world_size", world_size, dist.get_world_size())
        _check_same("rank", rank, dist.get_rank())
        warn_if_unused(settings, world_store(), dist.get_rank())
        declare_elastic(elastic)
    _create_world_group(local_rank, backend, settings, spent, joined)


def _create_world_group(
    local_rank: int, backend: str, settings: CoordinatorSettings, spent: Mapping[str, float], joined: bool
) -> None:
    """Create the group of all ranks; if it fails, leave the world if this start has `joined` it."""
    # Python runs signal handlers between the end of a constructor and the assignment of what it has made.
    group = GroupCoordinator.__new__(GroupCoordinator)
    try:
        everyone = [list(range(dist.get_world_size()))]
        group.__init__(  # type: ignore[misc]
            everyone, _local_rank(local_rank), backend, True, group_name="world", settings=settings
        )
        group.creation = group.creation.plus(**spent)
        if joined:
            fields = log_fields(group=group.unique_name, rank=group.rank, call="init_distributed_environment")
            logger.info("joined the world of %d ranks: %s", group.world_size, group.creation, extra=fields)
        set_world_group(group)
    except BaseException:
        try:
            group.destroy()
        finally:
            if joined:
                leave_world()
            set_world_group(None)
            declare_elastic(False)
        raise


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
    extra_groups: Collection[ExtraGroup] = (),
) -> None:
    """Create the groups of every dimension and make them the process's default. Collective over the world.

    `dispatch` and `combine` of the expert group then treat tokens that are not sharded as engines expect: the ranks of
    a tensor-parallel group hold the same tokens, so the replicas exchange theirs, or the prefill context ranks if
    there is one replica. With several of both, or with `expert_parallel_size`, all ranks of the expert group take
    part, as they do in groups of `ParallelGroups.create`.

    Args:
        tensor_model_parallel_size: Ranks that share a layer.
        pipeline_model_parallel_size: Number of pipeline stages.
        prefill_context_model_parallel_size: Ranks that share a sequence while it is prefilled.
        decode_context_model_parallel_size: Ranks that share the cache of a sequence while it is decoded. They are
            ranks of the prefill context group, and of the tensor group if there are more; None means 1.
        backend: torch backend of the device groups; None takes the world group's.
        data_parallel_size: Number of replicas that step together. If they do not use all ranks, the world holds
            several such sets, which share no group but the world. None means that all replicas step together.
        expert_parallel_size: Ranks that share the experts; None means all ranks of a stage.
        extra_groups: "eplb" for `get_eplb_group`, "replica" for `get_inner_dp_world_group`.

    Raises:
        UsageError: The sizes do not fit the world, or there are current groups already.
        DisagreementError: Ranks ask for different sizes.
        CommTimeoutError: Ranks did not join within `create_timeout_s`; `.missing` names them.
        PeerLostError: A rank died meanwhile; `.peers` names it.
    """
    world = get_world_group()
    if find_current_groups() is not None:
        raise UsageError(
            "model parallel groups exist already: call destroy_model_parallel() first, or use "
            "ParallelGroups.create(...) in a with block for a second model"
        )
    layout = ParallelLayout.from_world_size(
        world.world_size,
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        data=data_parallel_size,
        expert=expert_parallel_size,
        context=prefill_context_model_parallel_size,
        decode_context=1
        if decode_context_model_parallel_size is None
        else decode_context_model_parallel_size,
    )
    groups = ParallelGroups.create(
        layout,
        local_rank=world.local_rank,
        backend=backend or world.torch_distributed_backend,
        settings=world.settings,
        world=world,
        extra_groups=extra_groups,
    )
    try:
        if layout.expert is None:
            groups._set_token_group()  # noqa: SLF001 - ours
        set_default_groups(groups)
    except BaseException:
        groups.destroy()
        raise


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
) -> None:
    """Create the groups if there are none; otherwise check that they have these sizes.

    A check ignores `backend`. Collective over the world when it creates groups; a check sends nothing. The arguments
    and further errors are those of `initialize_model_parallel`.

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
        "decode context": (decode_context_model_parallel_size or 1, groups.dcp.world_size),
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


def get_dcp_group() -> GroupCoordinator:
    """Return the current decode context-parallel group."""
    return current_groups().dcp


def get_dcp_world_size_and_rank(enabled: bool = True) -> tuple[int, int]:
    """Return the number of ranks in the decode context-parallel group, and this process's rank in it.

    Args:
        enabled: If False, the result is (1, 0), as it is where there are no current groups.
    """
    groups = find_current_groups() if enabled else None
    return (1, 0) if groups is None else (groups.dcp.world_size, groups.dcp.rank_in_group)


def get_eplb_group() -> GroupCoordinator:
    """Return the group over which experts are moved while the expert-parallel group may be in use.

    Raises:
        UsageError: The current groups were created without it.
    """
    group = current_groups().eplb
    if group is None:
        raise UsageError(
            'there is no group for expert load balancing: pass extra_groups=("eplb",) to initialize_model_parallel'
        )
    return group


def get_inner_dp_world_group() -> GroupCoordinator:
    """Return the group of all ranks of this data-parallel replica; with one replica in the world, the world group.

    Raises:
        UsageError: There are several replicas, and the current groups were created without the group.
    """
    groups = current_groups()
    if groups.replica is not None:
        return groups.replica
    if groups.layout.data * groups.layout.external_data > 1:
        raise UsageError(
            'there is no group of the ranks of a replica: pass extra_groups=("replica",) to initialize_model_parallel'
        )
    return groups.world


def get_etp_group() -> GroupCoordinator:
    """Return the ranks over which one engram table is sharded: the tensor-parallel group.

    vLLM can choose another size for these tables. This package has no group of another size.
    """
    return current_groups().tp


def get_engram_dp_group() -> None:
    """Return None: no replicas share an engram table, each has its own."""


def get_engram_dp_size() -> int:
    """Return 1, the number of replicas over which an engram table is sharded."""
    return 1


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


def is_local_first_rank() -> bool:
    """Return whether this process is the first one on its host; True if there is no world yet.

    Without a world group, `LOCAL_RANK` decides or, if it is not set, the global rank.

    Raises:
        SettingsError: There is no world group, and `LOCAL_RANK` is malformed.
    """
    world = find_world_group()
    if world is not None:
        return world.local_rank == 0
    return _local_rank(-1) == 0 if dist.is_available() and dist.is_initialized() else True


def get_node_count() -> int:
    """Return on how many hosts the ranks of the world are. Not collective.

    Raises:
        UsageError: There is no world group.
    """
    return hosts.host_count(get_world_group())


def in_the_same_node_as(pg: object, source_rank: int = 0) -> list[bool]:
    """Return for each rank of a group whether it is on the host of rank `source_rank`, so that they can share memory.

    Ranks are on one host if they see the same kernel and the same network namespace. For a group of this package, or a
    process group that one of them made, this is known: nothing is sent. Otherwise the call is collective over `pg`.

    Args:
        pg: A `GroupCoordinator`, a torch process group for CPU tensors, or an object with `all_gather_obj`.
        source_rank: Rank in the group.

    Raises:
        UsageError: `pg` is none of these, or there is no such rank.
    """
    return hosts.same_host(pg, source_rank)


def _node_count(pg: object) -> int:
    """Return on how many hosts the ranks of `pg` are; see `in_the_same_node_as`."""
    return hosts.host_count(pg)


def set_custom_all_reduce(enable: bool) -> None:
    """Allow or forbid our own CUDA kernels in groups that are created from now on; call it alike on all ranks.

    False acts as `cuda.custom_all_reduce=False` in the settings of every later group. True, as at the start, leaves the
    choice to the settings.

    Raises:
        UsageError: `enable` is not a bool.
    """
    permit_custom_all_reduce(enable)


@contextmanager
def graph_capture(device: torch.device, stream: torch.Stream | None = None) -> Iterator[GraphCaptureContext]:
    """Capture a CUDA graph in which every current group may be used; a no-op on the CPU.

    Collective over the current groups: all ranks capture the same calls.

    Args:
        device: The device on which a stream is created, if it has streams and none is given.
        stream: The stream that is captured; default: one of its own.
    """
    with current_groups().graph_capture(context_for(device, None, stream)) as context:
        yield context


def destroy_model_parallel() -> None:
    """Destroy the process's default groups, except for the world group. Idempotent, not collective."""
    groups, _ = groups_of_process()
    if groups is not None:
        groups.destroy()
        set_default_groups(None)  # behind it: another call finishes one that was interrupted


def destroy_distributed_environment() -> None:
    """Destroy the current groups, the world group, and torch.distributed if this package initialised it.

    Idempotent, not collective. Another call, or the next world, finishes one that was interrupted.
    """
    groups, world = groups_of_process()
    leaving = [] if groups is None else groups._leaving()  # noqa: SLF001 - ours
    leaving += [] if world is None or world in leaving else [world]
    try:
        destroy_together(leaving)
    except BaseException:
        destroy_at_once(leaving)  # before the store ends, also where the call above has not begun
        raise
    finally:  # Ctrl-C ends the waits only
        leave_world()
    set_default_groups(None)
    set_world_group(None)


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


# --- what engines import for coordinators of their own -----------------------------------------------------------


class TensorMetadata(NamedTuple):
    """Stands in a dict for a tensor that is sent separately.

    Attributes:
        device: Type of the sender's device, such as "cpu".
        dtype: Element type.
        size: Shape.
    """

    device: str
    dtype: torch.dtype
    size: torch.Size


def _split_tensor_dict(
    tensor_dict: Mapping[str, Any],
) -> tuple[list[tuple[str, Any]], list[torch.Tensor]]:
    """Return the items of a dict with `TensorMetadata` in the place of tensors, and the tensors in the same order."""
    items, tensors = list[tuple[str, Any]](), list[torch.Tensor]()
    for key, value in tensor_dict.items():
        if isinstance(value, torch.Tensor):
            items.append((key, TensorMetadata(value.device.type, value.dtype, value.shape)))
            tensors.append(value)
        else:
            items.append((key, value))
    return items, tensors


def init_model_parallel_group(
    group_ranks: Sequence[Sequence[int]],
    local_rank: int,
    backend: str,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    use_device_communicator: bool = True,
    use_all2all: bool = False,
) -> GroupCoordinator:
    """Create a group, as the constructor of `GroupCoordinator` does. Collective over all ranks in `group_ranks`."""
    queue = use_message_queue_broadcaster
    return GroupCoordinator(
        group_ranks, local_rank, backend, use_device_communicator, queue, group_name, use_all2all
    )


def _get_unique_name(name: str) -> str:
    """Return `name:0`, `name:1` …: a name that no group of this process has, different in each call."""
    return group_registry.free_name(name)


def _register_group(group: object) -> None:
    """Check that compiled graphs find `group` by its name: a group of this package is registered when it is created.

    Raises:
        UsageError: `group` is no group of this package, or it was destroyed.
    """
    if not group_registry.is_registered(group):
        raise UsageError(
            f"{type(group).__name__} {getattr(group, 'unique_name', '')!r} cannot be registered: compiled graphs find "
            "only groups that the constructor of GroupCoordinator made, and only until they are destroyed"
        )


def suspend_device_comms() -> None:
    """Release the device memory of all groups' communicators. Groups on the CPU have none.

    Raises:
        CapabilityError: A group of several ranks is on an accelerator. Nothing is released.
    """
    _refuse_on_accelerators("suspend_device_comms")


def resume_device_comms() -> None:
    """Undo `suspend_device_comms`. Raises as it does."""
    _refuse_on_accelerators("resume_device_comms")


def _refuse_on_accelerators(name: str) -> None:
    for group in group_registry.live_groups():
        if group.world_size > 1 and group.device.type != "cpu":
            raise CapabilityError(
                f"{name}: the communicator of {group.unique_name!r} on {group.device} keeps its memory until the group "
                "is destroyed; destroy the groups and create them again",
                requirement="a communicator that can be suspended",
            )


def checkpoint_prepare_distributed_state() -> None:
    """Prepare all groups for a checkpoint of this process; only groups of one rank need nothing for that.

    Raises:
        CapabilityError: There is a group of several ranks. It stays usable.
    """
    _refuse_with_peers("checkpoint_prepare_distributed_state")


def checkpoint_restore_distributed_state() -> None:
    """Restore all groups after a checkpoint of this process. Raises as `checkpoint_prepare_distributed_state`."""
    _refuse_with_peers("checkpoint_restore_distributed_state")


def _refuse_with_peers(name: str) -> None:
    for group in group_registry.live_groups():
        if group.world_size > 1:
            raise CapabilityError(
                f"{name}: {group.unique_name!r} holds memory and descriptors of other processes, which no checkpoint "
                "of one process restores; destroy the groups before, and create them again afterwards",
                requirement="no group of several ranks",
            )


def _init_stateless_group(
    group_ranks: Sequence[Sequence[int]],
    group_name: str,
    host: str,
    backend: str,
    coord_store: dist.Store,
    use_device_communicator: bool = True,
    use_all2all: bool = False,
) -> NoReturn:
    """Refuse: the ranks of a group come from one world.

    Raises:
        CapabilityError: Always; the arguments are those of vLLM's function.
    """
    del group_ranks, host, backend, coord_store, use_device_communicator, use_all2all
    raise _not_elastic(f"cannot create group {group_name!r} without a world")


def _replace_active_groups(
    *,
    world: GroupCoordinator | None,
    dp: GroupCoordinator | None,
    ep: GroupCoordinator | None,
    eplb: GroupCoordinator | None,
    node_count: int | None,
) -> NoReturn:
    """Refuse: the groups of a world stay the same while they exist.

    Raises:
        CapabilityError: Always; the arguments are those of vLLM's function. The groups stay as they are.
    """
    del world, dp, ep, eplb, node_count
    raise _not_elastic("cannot replace groups that are in use")


def _not_elastic(refusal: str) -> CapabilityError:
    return CapabilityError(
        f"{refusal}: elastic expert parallelism is not supported; start the engine without it, or call "
        "destroy_model_parallel() and initialize_model_parallel(...) with the new sizes",
        requirement="a world of fixed size",
    )
