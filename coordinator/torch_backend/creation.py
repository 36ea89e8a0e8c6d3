"""How torch makes a group of the backend: the ranks agree over torch's store, and map memory or connect by Gloo."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from coordinator.bootstrap.agreement.agreeing import agree, declining
from coordinator.bootstrap.agreement.views import View, Views
from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.bootstrap.connections import SpareConnection
from coordinator.bootstrap.creation import PROTOCOL_VERSION, give_up, undo
from coordinator.bootstrap.group_builder import GroupBuilder, prepare_region, status_store
from coordinator.bootstrap.group_parts import GroupParts, GroupPlan, kept
from coordinator.bootstrap.membership import Membership, own_address
from coordinator.bootstrap.recording import begin_record
from coordinator.bootstrap.world import World
from coordinator.host.process_groups import LOOPBACK, GlooOptions, build_gloo_backend
from coordinator.security.requirement import check_plaintext
from coordinator.settings import CoordinatorSettings
from coordinator.torch_backend.errors import for_torch
from coordinator.torch_backend.process_group import BACKEND, BackendProcessGroup
from device_comm.cpu import shared_memory
from device_comm.health import FOREVER_S
from shm_broadcast.errors import CommError, UsageError
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, fork_count, name_host, this_process
from shm_broadcast.threads import caller, owner_forks

# A deadline of zero has no meaning for the creation of a group.
_SHORTEST_S: Final = 0.001


def register() -> None:
    """Register the backend with torch. Idempotent."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def create(options: Any, given: Any = None) -> BackendProcessGroup | ProcessGroupGloo:
    """Create a group. torch calls this on every rank of it.

    Blocks until all ranks of the group have come, for at most the group's timeout.

    Args:
        options: What torch says of the group: its store, ranks, name and timeout.
        given: The options of the caller, of which there are none.

    Returns:
        A process group over shared memory, or Gloo where the ranks are on several hosts.

    Raises:
        UsageError: The caller gave options.
        CommTimeoutError: Ranks did not come in time; `.missing` names them.
        PeerLostError: A rank died meanwhile; `.peers` names it.
        DisagreementError: The ranks hold different settings or versions.
        CapabilityError: A rank could not map the memory, or announced an address that others cannot reach.
    """
    before = caller.forks
    try:
        caller.forks = owner_forks()
        if given is not None:
            raise UsageError(f"the backend {BACKEND!r} takes no options, got {given!r}")
        return _create(options)
    except CommError as error:
        raise for_torch(error) from error
    finally:
        caller.forks = before


def _create(options: Any) -> BackendProcessGroup | ProcessGroupGloo:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    rank, name = ranks[options.group_rank], f"torch:{options.group_id}"
    timeout_s = min(max(options.timeout.total_seconds(), _SHORTEST_S), FOREVER_S)
    settings = CoordinatorSettings.resolve(timeout_s=timeout_s, create_timeout_s=timeout_s)
    plan = GroupPlan(name, [ranks], Membership(rank, ranks, options.group_rank, tuple(sorted(ranks))))
    where = f"creating group {name!r} (rank {rank})"
    # torch counts groups, and ranks that make different ones may give them the same name.
    same = dist.PrefixStore(f"group_coordinator/{','.join(map(str, ranks))}", options.store)
    # A store may be used again for a group of the same name, after the first one was destroyed.
    number = ask_store(lambda: same.add(f"uses/{rank}", 1), where, timeout_s)
    store = dist.PrefixStore(str(number), same)
    forks = owner_forks()
    builders, made, agreed = list[GroupBuilder](), list[GroupParts](), threading.Event()
    # From here on only `made` holds a group that nobody has yet, and so could destroy.
    with kept(made):
        with ExitStack() as offered:
            agreement = dist.PrefixStore("agreement", store)
            with declining(agreement, f"group {name!r}", rank):
                name_host(settings.host_id)
                begin_record(options.store, rank, settings)
                region = prepare_region(plan, {}, offered)
                address = own_address(settings.interface, options.store)
            started = time.perf_counter()
            offers = msgspec.json.encode([region.offer]).decode()
            own = View(_facts(plan, settings), this_process(), address, shared_memory.host_id(), offers)
            try:
                views = _agree(agreement, plan, own, timeout_s, agreed)
                agreement_s = time.perf_counter() - started
                check_plaintext(settings, options.store, views.spans_hosts, f"group {name!r}")
                if views.share_memory:
                    builder = GroupBuilder(
                        plan,
                        region,
                        views,
                        store=store,
                        connect_store=partial(SpareConnection().lent, store),
                        device=torch.device("cpu"),
                        backend="gloo",
                        settings=settings,
                        world=World(rank, max(ranks) + 1, store, forks=forks),
                    )
                    builders.append(builder)
                    builder.share(0)
                    builder.confirm()
                    made += [builder.connect(True, agreement_s, (name,))]
            except BaseException as error:
                try:
                    unbuilt = [status_store(plan, store)] if agreed.is_set() and not builders else []
                    if forks == fork_count():  # not in a child that a signal handler has forked
                        give_up(builders, error, unbuilt)
                except BaseException:  # one more interrupt
                    undo(builders)
                    raise
                raise
        if not made:
            return build_gloo_backend(options, GlooOptions(views.listening_address(LOOPBACK)))
        return BackendProcessGroup(made[0], views.processes, options.store, store, timeout_s)


def _facts(plan: GroupPlan, settings: CoordinatorSettings) -> dict[str, str]:
    """Return what must be equal on all ranks. torch lets each rank have its own timeout."""
    held = {name: value for name, value in settings.agreed().items() if not name.endswith("timeout_s")}
    return {
        "protocol": str(PROTOCOL_VERSION),
        "ranks": str(list(plan.membership.ranks)),
        **{f"setting {name}": str(value) for name, value in held.items()},
    }


def _agree(store: dist.Store, plan: GroupPlan, own: View, timeout_s: float, agreed: threading.Event) -> Views:
    """Exchange views with the group's ranks, watching those that the default group knows."""
    rank, ranks = plan.membership.rank, plan.membership.ranks
    world = dist.group.WORLD if dist.is_initialized() else None
    others: dict[int, ProcessIdentity] = {}
    if isinstance(world, BackendProcessGroup):
        others = {
            other: process for other, process in world.processes.items() if other in ranks and other != rank
        }
    what = f"group {plan.name!r}"
    with declining(store, what, rank):
        watch = PeerWatch(own.process, others)
    with closing(watch):
        return agree(store, what, rank, ranks, own, timeout_s, watch, agreed)


__all__ = ["BACKEND", "create", "register"]
