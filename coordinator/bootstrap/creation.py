"""Creating groups: the ranks agree on the facts and connect; if one of them cannot, everything is undone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from coordinator.bootstrap.agreement.agreeing import LINGER_S, agree, declining
from coordinator.bootstrap.agreement.views import View, Views
from coordinator.bootstrap.group_builder import GroupBuilder, prepare_region, status_store
from coordinator.bootstrap.group_parts import GroupParts, GroupPlan
from coordinator.bootstrap.membership import is_served_here, own_address, serves_store
from coordinator.bootstrap.recording import begin_record
from coordinator.bootstrap.status_store import WorldStatusStore
from coordinator.bootstrap.world import World
from coordinator.heartbeats.joining import join_heartbeats
from coordinator.host.process_groups import LOOPBACK
from coordinator.meeting.losses import listen_for_losses
from coordinator.security.requirement import check_plaintext
from coordinator.security.store import generation_facts
from coordinator.settings import CoordinatorSettings
from device_comm.cpu import shared_memory
from device_comm.health import SLICE_S, GroupHealth, Operation
from device_comm.registry import communicator_name
from shm_broadcast.errors import CapabilityError, GroupBrokenError, UsageError
from shm_broadcast.liveness import PeerWatch, name_host, this_process
from shm_broadcast.reports.failure_record import failure_of
from shm_broadcast.threads import caller

# Ranks of different protocol versions refuse to form a group. Increase this when a message or a key changes.
PROTOCOL_VERSION = 15

# The name of the call, for the texts of the other ranks' errors.
_WHAT: Final = "creating groups"


def create_parts(
    plans: Sequence[GroupPlan],
    made: list[GroupParts],
    *,
    world: World,
    what: str,
    round_name: str,
    facts: Mapping[str, str],
    local_rank: int,
    backend: str,
    use_device_communicator: bool,
    settings: CoordinatorSettings,
    beside: GroupParts | None = None,
    create_timeout_s: float | None = None,
) -> None:
    """Create this rank's groups in one step. Collective over all ranks of every plan.

    Everything that the ranks must know of each other, for all of the groups, is exchanged at once. Each further group
    costs one segment, and no round trip through the store.

    Args:
        plans: The groups, in the same order on all ranks. A rank without plans still compares facts with all ranks of
            the world, so that a rank that has plans is noticed.
        made: Gets the groups, in this order, as the last step. The caller holds it in `kept` until the groups
            have another owner, because an interrupt may come before this call has returned.
        world: The processes among which they are created.
        what: What is being created, for errors.
        round_name: Name of this agreement, which prefixes its keys in the store; never used before.
        facts: Facts that must be equal on all ranks, in addition to those that every group needs.
        local_rank: Index of this process's device on its host.
        backend: torch backend of the device groups.
        use_device_communicator: Whether tensor operations may use a communicator written for the device.
        settings: Settings of every group.
        beside: A group of all of these ranks, if there is one: it knows their host ids, and nothing is created once it
            is broken or closed. Its error is then raised on every rank.
        create_timeout_s: How long this creation may take, in seconds; None for what the settings say. What the groups
            do later has the deadlines of the settings.
    """
    brief = settings
    if create_timeout_s is not None:
        brief = msgspec.structs.replace(settings, create_timeout_s=create_timeout_s)
    prefix = f"group_coordinator/{round_name}"
    store, device = world.store, device_of(backend, local_rank)
    every_fact = _facts(plans, device, backend, use_device_communicator, world, settings) | dict(facts)
    named = {rank for plan in plans for rank in plan.membership.everyone}
    everyone = sorted(named or range(world.size))
    stores = [dist.PrefixStore(_scope(plan), store) for plan in plans]
    check_parent = partial(_check_parent, None if beside is None else beside.health)
    check_parent(asks=False)
    builders, agreed, before = list[GroupBuilder](), threading.Event(), caller.forks
    with ExitStack() as offered:
        try:
            caller.forks = world.forks
            with declining(dist.PrefixStore(prefix, store), what, world.rank):
                regions, address = _prepare(plans, world, brief, beside, offered)
            offers = msgspec.json.encode([region.offer for region in regions]).decode()
            own = View(every_fact, this_process(), address, shared_memory.host_id(), offers)
            started = time.perf_counter()
            views = _agree(world, prefix, what, everyone, own, brief, agreed, check_parent)
            agreement_s = time.perf_counter() - started
            given = partial(GroupBuilder, world=world, device=device, backend=backend, settings=settings)
            given = partial(given, create_timeout_s=create_timeout_s)
            for plan, region, own_store in zip(plans, regions, stores, strict=True):
                members = views.of(plan.membership.ranks)
                lend = partial(world.spare_connection().lent, store, _scope(plan))
                builders.append(given(plan, region, members, store=own_store, connect_store=lend))
            _join_heartbeats(builders, world, prefix, what, brief)
            _share(builders)
            how = use_device_communicator, agreement_s, tuple(plan.name for plan in plans)
            # No function is called after this: an interrupt comes before it, or finds all groups in `made`.
            made += [builder.connect(*how) for builder in builders]
        except BaseException as error:
            try:
                # If all ranks had just agreed, the others wait in groups that this rank has not begun.
                rest = list(zip(plans, stores, strict=True))[len(builders) :] if agreed.is_set() else []
                if not world.is_inherited:
                    give_up(builders, error, [status_store(*each) for each in rest], beside)
            except BaseException:  # one more interrupt
                undo(builders)
                raise
            raise
        finally:
            caller.forks = before


def _check_parent(parent: GroupHealth | None, *, asks: bool = True) -> None:
    """Raise if the group whose ranks create others, if there is one, cannot be used.

    With `asks` it asks the status store whether another rank has broken that group.
    """
    if parent is None:
        return
    broken = None
    try:
        parent.check_usable(_WHAT)
    except GroupBrokenError as error:
        broken = error
    # Both threads of a creation ask. Once one has found the record of another rank, the group is broken for the other
    # thread, too, which may be the first to raise: both raise what the record says.
    if asks and (broken is None or parent.others_failed()):
        parent.check_record(Operation("host", _WHAT, 0))
    if broken is not None:
        raise broken


def _scope(plan: GroupPlan) -> str:
    """Return what precedes the keys of a group in the store of its world."""
    return f"group_coordinator/{plan.name}"


def _prepare(
    plans: Sequence[GroupPlan],
    world: World,
    settings: CoordinatorSettings,
    beside: GroupParts | None,
    offered: ExitStack,
) -> tuple[list[shared_memory.Preparation], str]:
    """Return what this rank brings to the agreement: the memory of its groups, and its address."""
    if world.is_elastic and is_served_here(world.store):
        raise UsageError(
            f"elastic=True needs a store that outlives every rank, and rank {world.rank} serves the store of this "
            "world: initialise torch.distributed with a store that another process serves, or with a FileStore"
        )
    name_host(settings.host_id)
    begin_record(world.lasting_store, world.rank, settings)
    host_ids = {} if beside is None else beside.host_ids
    regions = [prepare_region(plan, host_ids, offered) for plan in plans]
    return regions, own_address(settings.interface, world.store)


def _agree(
    world: World,
    prefix: str,
    what: str,
    ranks: Sequence[int],
    own: View,
    settings: CoordinatorSettings,
    agreed: threading.Event,
    check_parent: Callable[[], None],
) -> Views:
    """Exchange views with `ranks`, below `prefix` in the store, over a connection of its own."""
    store = world.store
    connect = partial(world.spare_connection().lent, store, prefix)
    scoped, timeout_s = dist.PrefixStore(prefix, store), settings.create_timeout_s
    # A rank that has died since it joined the world will not join: the others need not wait for it.
    with declining(scoped, what, world.rank):
        watch = PeerWatch(own.process, world.processes_of(set(ranks) - {world.rank}))
    with closing(watch):
        heartbeats = world.heartbeats(settings.remote.lost_after_s)
        heartbeats.listen(watch, ranks)
        # After `listen`: a reported loss is held back while the rank's host may have vanished as a whole.
        if world.is_torch:
            listen_for_losses(watch, ranks)
        views = agree(
            scoped,
            what,
            world.rank,
            ranks,
            own,
            timeout_s,
            watch,
            agreed,
            connect,
            check_store=heartbeats.check_store,
            check_parent=check_parent,
        )
    check_plaintext(settings, store, views.spans_hosts, what)
    return views


def _join_heartbeats(
    builders: Sequence[GroupBuilder], world: World, prefix: str, what: str, settings: CoordinatorSettings
) -> None:
    """Open the links to other hosts that the groups need. Collective over those of their ranks that are partners."""
    needing = [builder for builder in builders if builder.partners]
    if not needing:
        return
    for builder in needing:
        builder.refuse_clones()

    def check() -> None:
        for builder in builders:
            builder.check_others()

    with world.spare_connection().lent(world.store, prefix) as store:
        join_heartbeats(
            world.heartbeats(settings.remote.lost_after_s),
            world.rank,
            sorted({partner for builder in needing for partner in builder.partners}),
            store,
            needing[0].members.listening_address(LOOPBACK),
            serves_store=serves_store(world.store),
            check=check,
            where=f"creating {what} (rank {world.rank})",
            timeout_s=settings.create_timeout_s,
        )


def _share(builders: Sequence[GroupBuilder]) -> None:
    """Map the memory of all groups, and return when every rank has."""
    for builder in builders:
        builder.refuse_clones()
    for number, builder in enumerate(builders):
        builder.share(number)
    # Groups of the same ranks share one barrier: only the last of them confirms, for all of them.
    for last in {builder.plan.membership.ranks: builder for builder in builders}.values():
        last.confirm()


def _facts(
    plans: Sequence[GroupPlan],
    device: torch.device,
    backend: str,
    use_device_communicator: bool,
    world: World,
    settings: CoordinatorSettings,
) -> dict[str, str]:
    """Return the facts that must be equal on all ranks for any group."""
    return {
        "protocol": str(PROTOCOL_VERSION),
        "group_ranks": str([[list(ranks) for ranks in plan.group_ranks] for plan in plans]),
        "groups": ", ".join(plan.name for plan in plans),
        "torch_distributed_backend": backend,
        "device type": device.type,
        "use_device_communicator": str(use_device_communicator),
        "communicator": communicator_name(device.type, 2),
        **generation_facts(world.store),
        "elastic": str(world.is_elastic),
        **{f"setting {field}": str(value) for field, value in settings.agreed().items()},
    }


def give_up(
    builders: Sequence[GroupBuilder],
    error: BaseException,
    unbuilt: Sequence[WorldStatusStore] = (),
    beside: GroupParts | None = None,
) -> None:
    """Undo what was built, and publish the reason to ranks that wait for this one in any of the groups.

    Args:
        builders: The groups that this rank has begun to build.
        error: The reason.
        unbuilt: The status stores of groups that the ranks have agreed on, and that this rank has not begun to build.
        beside: The group whose ranks create these. If it is broken, that is the reason.
    """
    records = [builder.health.failure_record for builder in builders]
    records += [] if beside is None else [beside.health.failure_record]
    known = next((record for record in records if record is not None), None)
    for builder in builders:
        if not builder.health.is_broken:
            builder.health.fail(error, _WHAT, known)
    for store in unbuilt:
        store.publish(known or failure_of(error, store.rank, _WHAT), within_s=SLICE_S)
    undo(builders)
    if isinstance(error, CapabilityError) and (builders or unbuilt):
        # Stay alive for a moment: this rank may host the store from which the others read the reason.
        time.sleep(LINGER_S)


def undo(builders: Sequence[GroupBuilder]) -> None:
    """Release all that was connected for groups that nobody gets, even if interrupted once. Idempotent."""
    try:
        for builder in builders:
            builder.undo()
    except BaseException:
        for builder in builders:
            builder.undo()
        raise


def device_of(backend: str, local_rank: int) -> torch.device:
    """Return the device that a torch backend serves.

    A plain name selects the CPU if the backend supports it ("gloo"), else its first device type ("nccl"). The form
    "cpu:gloo,cuda:nccl" selects the accelerator.

    Raises:
        UsageError: torch lists no such backend.
    """
    if not isinstance(backend, str) or not backend:
        raise UsageError(f"torch_distributed_backend must be text such as 'gloo' or 'nccl', not {backend!r}")
    if ":" in backend:
        types = [part.partition(":")[0].strip() for part in backend.lower().split(",")]
        chosen = next((each for each in types if each != "cpu"), "cpu")
    else:
        capability = dist.Backend.backend_capability
        types = capability.get(backend.lower(), [])
        if not types:
            raise UsageError(
                f"torch_distributed_backend is {backend!r}; the backends that torch lists are {', '.join(capability)}"
            )
        chosen = "cpu" if "cpu" in types else types[0]
    return torch.device("cpu") if chosen == "cpu" else torch.device(chosen, local_rank)
