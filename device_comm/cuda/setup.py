"""Decide whether a group can use our own kernels: all ranks exchange their facts and reach the same answer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from device_comm.base import CommunicatorContext
from device_comm.cuda.custom.all_reduce import CustomAllReduce
from device_comm.cuda.custom.expert_parallel import ExpertKernels
from device_comm.cuda.custom.launches import CubinSource
from device_comm.cuda.custom.peer_access import PROBE_BYTES, verify_peer_access
from device_comm.cuda.custom.peer_memory import PeerMemory
from device_comm.cuda.custom.peer_messages import Kind, PeerExchange
from device_comm.cuda.custom.release import release_together, release_when_idle
from device_comm.cuda.custom.resources import CustomContext
from device_comm.cuda.custom.streams import StreamOrder
from device_comm.cuda.driver import Driver
from device_comm.cuda.kernel_layout import MAX_WORLD_SIZE, MIN_WORLD_SIZE
from device_comm.cuda.kernels import KernelCache, KernelVariant
from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda.topology import gather_topology, probe
from device_comm.cuda_settings import cuda_settings
from shm_broadcast.errors import CapabilityError, CommError, InternalError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["build_custom", "build_experts", "default_cache_directory"]

# Above 1 MiB, the limit of torch's pool for small tensors, so that the sample comes from the pool of large ones.
_SAMPLE_BYTES: Final = 2 << 20


def default_cache_directory() -> Path:
    """Return the default directory for compiled kernels and results of the peer access test: the user's cache.

    The home directory comes from the password database, because only the settings may read the environment.
    """
    import pwd

    try:
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        # Some clusters run containers as a user without an entry. The cache checks who owns the directory in any case.
        return Path(tempfile.gettempdir()) / f"group-coordinator-{os.geteuid()}"
    return home / ".cache" / "group-coordinator"


def build_custom(
    context: CommunicatorContext,
    open_driver: Callable[[], Driver],
    cubin: CubinSource | None = None,
    order: Callable[[], StreamOrder | None] = lambda: None,
) -> tuple[CustomAllReduce | None, str]:
    """Return our own collectives for the group, or None and the reason. Collective; the answer is equal on all ranks.

    Args:
        context: The group; `exchange` must be set.
        open_driver: Opens this rank's device, which the caller still owns.
        cubin: Returns compiled kernels; defaults to NVRTC with a cache on disk.
        order: Returns what orders the calls of the group, NCCL's too; None lets only our kernels have an order.

    Raises:
        SettingsError: This rank's policy file cannot be used.
        DisagreementError: Another rank's policy file cannot be used, or two of them differ.
    """
    if context.exchange is None:
        raise InternalError(f"{context.name!r}: a CUDA group needs a host plane to agree over")
    if not cuda_settings(context.cuda).custom_all_reduce:
        return None, "cuda.custom_all_reduce is off"
    if not MIN_WORLD_SIZE <= context.world_size <= MAX_WORLD_SIZE:
        return None, f"the kernels serve 2 to {MAX_WORLD_SIZE} ranks, not {context.world_size}"
    fields = context.health.log_fields()
    peers = PeerExchange(context.exchange, context.rank_in_group, context.ranks, fields)
    driver, trouble = None, ""
    try:
        driver = open_driver()
    except CommError as error:
        trouble = str(error)
    failed = peers.failures(trouble)
    if failed or driver is None:
        return None, failed
    try:
        return _build(context, peers, driver, cubin, order()), ""
    except CapabilityError as error:
        # Equal on all ranks: a rank raises this only after it has told the others.
        return None, str(error)


def build_experts(
    custom: CustomAllReduce | None, stream: Callable[[], int]
) -> tuple[ExpertKernels | None, str]:
    """Return the expert-parallel kernels of a group, or None and the reason. Collective; equal on all ranks.

    Args:
        custom: The group's own collectives, as `build_custom` returned them.
        stream: Returns the current stream.
    """
    if custom is None:
        return None, ""
    if not custom.context.settings.expert_arena_bytes:
        return None, "cuda.expert_arena_bytes is 0"
    try:
        return ExpertKernels.create(custom.context, stream), ""
    except CapabilityError as error:
        # Equal on all ranks: a rank raises this only after it has told the others.
        return None, str(error)


def _build(
    context: CommunicatorContext,
    peers: PeerExchange,
    driver: Driver,
    cubin: CubinSource | None,
    order: StreamOrder | None,
) -> CustomAllReduce:
    settings = cuda_settings(context.cuda)
    topology = gather_topology(probe(driver), peers)
    obstacle = topology.why_not_peers()
    if obstacle:
        raise CapabilityError(obstacle, requirement="peer access between all devices")
    directory = default_cache_directory() if settings.kernel_cache is None else Path(settings.kernel_cache)
    kind = _verify(context, peers, driver, directory)
    facts = GroupFacts(
        world_size=context.world_size,
        device_name=topology.device_name,
        arch=topology.arch,
        multiprocessors=topology.multiprocessors,
        has_nvlink=topology.has_nvlink,
        # Tensors' memory can be shared by CUDA IPC only, and the region that was just tested shows whether IPC works.
        is_exportable=_is_exportable(context, peers, driver) and kind in ("ipc", "local"),
        has_multicast=topology.has_multicast and settings.multimem,
        multimem_one_shot_bytes=settings.multimem_one_shot_bytes,
        is_deterministic=settings.deterministic,
    )
    source, trouble = cubin, ""
    try:
        source = source or _compiled(driver, directory, context.world_size)
    except CommError as error:
        trouble = str(error)
    failed = peers.failures(trouble)
    if failed or source is None:
        raise CapabilityError(failed, requirement="a cache for compiled kernels")
    return CustomAllReduce.create(
        CustomContext(
            driver=driver,
            health=context.health,
            peers=peers,
            facts=facts,
            settings=settings,
            timeout_s=context.timeout_s,
            cubin=source,
            # Shared with the kernels for expert parallelism, which are built from this context.
            order=order or StreamOrder(driver, context.health.where),
        )
    )


def _verify(context: CommunicatorContext, peers: PeerExchange, driver: Driver, directory: Path) -> Kind:
    """Return how memory was shared to test that writes arrive at peers. Collective.

    Raises:
        CapabilityError: They do not arrive, or no memory can be shared; raised on every rank.
    """
    region = PeerMemory.create(
        *(driver, peers, PROBE_BYTES * context.world_size, context.health.lost), timeout_s=context.timeout_s
    )
    what = "the test of peer access"
    where, fields = context.health.where(what), context.health.log_fields(what)
    try:
        failure = verify_peer_access(driver, peers, region.addresses, directory)
    except BaseException:
        # The other ranks may not take part in another round.
        release_when_idle(driver, where, fields, lambda _is_awaited: region.close(None))
        raise
    release_together(
        *(driver, where, fields, peers), lambda is_together: region.close(peers.meet if is_together else None)
    )
    if failure:
        raise CapabilityError(failure, requirement="writes that arrive at peers")
    return region.kind


def _is_exportable(context: CommunicatorContext, peers: PeerExchange, driver: Driver) -> bool:
    """Return whether torch's allocator returns memory that peers can map, on every rank. Collective."""
    trouble = ""
    try:
        sample = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, device=context.device)
        if not driver.is_legacy_ipc_capable(sample.data_ptr()):
            trouble = "the allocator's memory cannot be exported (expandable segments?)"
    except (CommError, RuntimeError) as error:  # torch has no memory left
        if raised_by_handler(error):
            raise
        trouble = str(error)
    return not peers.failures(trouble)


def _compiled(driver: Driver, directory: Path, world_size: int) -> CubinSource:
    cache = KernelCache(directory / "kernels")
    major, minor = driver.compute_capability()

    def source(family: str, dtype: str) -> bytes:
        return cache.cubin(KernelVariant(10 * major + minor, world_size, dtype, family))

    return source
