"""Creating groups: agree on the facts, connect, and undo all of it if a rank cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing

import msgspec
import torch
import torch.distributed as dist

from coordinator.bootstrap.agreement import LINGER_S, View, agree
from coordinator.bootstrap.group_builder import GroupBuilder, GroupOffer
from coordinator.bootstrap.group_parts import GroupParts, GroupPlan
from coordinator.bootstrap.membership import master_endpoint, own_address
from coordinator.bootstrap.rendezvous import world_processes
from coordinator.settings import CoordinatorSettings
from device_comm.cpu import shared_memory
from device_comm.registry import communicator_name
from shm_broadcast.errors import CapabilityError, PeerLostError, UsageError
from shm_broadcast.liveness import PeerWatch, this_process

# Ranks that run different protocols must not try to talk; raised when a message or a key changes.
PROTOCOL_VERSION = 2


def create_parts(
    plans: Sequence[GroupPlan],
    *,
    what: str,
    meeting: str,
    facts: Mapping[str, str],
    local_rank: int,
    backend: str,
    use_device_communicator: bool,
    store: dist.Store,
    settings: CoordinatorSettings,
    places: Mapping[int, str] | None = None,
    agreed: Callable[[], None] | None = None,
) -> list[GroupParts]:
    """Build this rank's groups in one step. Collective over all ranks of every plan.

    Everything that ranks must know of each other, for all of the groups, is exchanged at once: each group more costs
    one segment, no round trip through the store.

    Args:
        plans: The groups, in the same order on all ranks. Without any, all ranks of the world agree on that: others may
            hold some.
        what: What is being created, for errors.
        meeting: A name under which the ranks meet, never used before.
        facts: What all ranks must hold alike besides what every group needs.
        local_rank: Index of this process's device on its host.
        backend: Of the device groups.
        use_device_communicator: Whether tensors may take a communicator made for the device.
        store: The world's store.
        settings: Of every group.
        places: Where the ranks are, if that is known already.
        agreed: Called once the ranks agree.
    """
    device = device_of(backend, local_rank)
    every_fact = {
        **_facts(plans, device, backend, use_device_communicator),
        **{f"setting {field}": str(value) for field, value in settings.agreed().items()},
        **facts,
    }
    everyone = sorted({rank for plan in plans for rank in plan.membership.everyone}) or list(
        range(dist.get_world_size())
    )
    rank, builders = dist.get_rank(), list[GroupBuilder]()
    with ExitStack() as offered:
        try:
            offers = [offered.enter_context(closing(GroupOffer(plan, places or {}))) for plan in plans]
            address = own_address(settings.interface, master_endpoint(store))
            texts = msgspec.json.encode([offer.text for offer in offers]).decode()
            own = View(every_fact, this_process(), address, shared_memory.place(), texts)
            started = time.perf_counter()
            # A rank that has died since it joined the world never comes: the others need not wait for it.
            known = {other: who for other, who in world_processes().items() if other in everyone}
            known.pop(rank, None)
            with closing(PeerWatch(own.process, known)) as watch:
                place = dist.PrefixStore(f"group_coordinator/{meeting}", store)
                views = agree(place, what, rank, everyone, own, settings.create_timeout_s, watch)
            if agreed is not None:
                agreed()
            agreement_s = time.perf_counter() - started
            for plan, offer in zip(plans, offers, strict=True):
                members = {member: views[member] for member in plan.membership.ranks}
                of_group = dist.PrefixStore(f"group_coordinator/{plan.name}", store)
                builders.append(
                    GroupBuilder(
                        *(plan, offer, members),
                        store=of_group,
                        device=device,
                        backend=backend,
                        settings=settings,
                    )
                )
            for number, builder in enumerate(builders):
                builder.share(number)
            together = tuple(plan.name for plan in plans)
            return [builder.connect(use_device_communicator, agreement_s, together) for builder in builders]
        except BaseException as error:
            _give_up(builders, error)
            raise


def _facts(
    plans: Sequence[GroupPlan], device: torch.device, backend: str, use_device_communicator: bool
) -> dict[str, str]:
    """Return what all ranks must hold alike to create groups."""
    return {
        "protocol": str(PROTOCOL_VERSION),
        "group_ranks": str([[list(ranks) for ranks in plan.group_ranks] for plan in plans]),
        "groups": ", ".join(plan.name for plan in plans),
        "torch_distributed_backend": backend,
        "device type": device.type,
        "use_device_communicator": str(use_device_communicator),
        "communicator": communicator_name(device.type, 2),
    }


def _give_up(builders: Sequence[GroupBuilder], error: BaseException) -> None:
    """Undo what was built, and tell the ranks that wait for this one in another of the groups why it does not come."""
    if isinstance(error, (CapabilityError, PeerLostError)):
        for builder in builders:
            if not builder.health.is_broken:
                builder.health.fail(error)
    for builder in builders:
        builder.undo()
    if isinstance(error, CapabilityError) and builders:
        # The store may go with this rank, and the others have to read there why.
        time.sleep(LINGER_S)


def device_of(backend: str, local_rank: int) -> torch.device:
    """Return the device that a torch backend is for.

    A plain name means the CPU if the backend serves it ("gloo"), else its first device type ("nccl"); the
    form "cpu:gloo,cuda:nccl" means its accelerator.

    Raises:
        UsageError: torch knows no such backend.
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
                f"torch_distributed_backend is {backend!r}; this torch knows {', '.join(capability)}"
            )
        chosen = "cpu" if "cpu" in types else types[0]
    return torch.device("cpu") if chosen == "cpu" else torch.device(chosen, local_rank)
