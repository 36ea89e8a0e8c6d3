"""Decide whether a group can use our own kernels: all ranks exchange their facts and reach the same answer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from device_comm.base import CommunicatorContext
from device_comm.cuda.custom.all_reduce import CustomAllReduce, CustomContext
from device_comm.cuda.custom.launches import CubinSource
from device_comm.cuda.custom.peer_access import PROBE_BYTES, verify_peer_access
from device_comm.cuda.custom.peer_memory import PeerMemory
from device_comm.cuda.custom.peer_messages import Exchange, Kind, exchange_failure
from device_comm.cuda.driver import Driver
from device_comm.cuda.kernels import KernelCache, KernelVariant
from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda.topology import GroupTopology, gather_topology, probe
from device_comm.cuda_settings import cuda_settings
from shm_broadcast.errors import CapabilityError, CommError, InternalError

__all__ = ["build_custom", "default_cache_directory"]

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
) -> tuple[CustomAllReduce | None, str]:
    """Return our own collectives for the group, or None and the reason. Collective; the answer is equal on all ranks.

    Args:
        context: The group; `exchange` must be set.
        open_driver: Opens this rank's device, which the caller still owns.
        cubin: Returns compiled kernels; defaults to NVRTC with a cache on disk.

    Raises:
        SettingsError: This rank's policy file cannot be used.
        DisagreementError: Another rank's policy file cannot be used, or two of them differ.
    """
    settings, exchange = cuda_settings(context.cuda), context.exchange
    if exchange is None:
        raise InternalError(f"{context.name!r}: a CUDA group needs a host plane to agree over")
    if not settings.custom_all_reduce:
        return None, "cuda.custom_all_reduce is off"
    if not 2 <= context.world_size <= 8:
        return None, f"the kernels serve 2 to 8 ranks, not {context.world_size}"
    driver, trouble = None, ""
    try:
        driver = open_driver()
    except CommError as error:
        trouble = str(error)
    failed = exchange_failure(exchange, trouble, context.ranks)
    if failed or driver is None:
        return None, failed
    try:
        return _build(context, exchange, driver, cubin)
    except CapabilityError as error:
        # Equal on all ranks: a rank raises this only after it has told the others.
        return None, str(error)


def _build(
    context: CommunicatorContext,
    exchange: Exchange,
    driver: Driver,
    cubin: CubinSource | None,
) -> tuple[CustomAllReduce | None, str]:
    topology = gather_topology(probe(driver), context.ranks, exchange)
    obstacle = topology.why_not_peers()
    if obstacle:
        raise CapabilityError(obstacle, requirement="peer access between all devices")
    directory = _directory(context)
    verdict, kind = _verify(context, exchange, driver, directory)
    if verdict:
        raise CapabilityError(verdict, requirement="writes that arrive at peers")
    facts = GroupFacts(
        world_size=context.world_size,
        device_name=topology.device_name,
        arch=topology.arch,
        multiprocessors=topology.multiprocessors,
        has_nvlink=_has_fast_links(topology),
        is_verified=True,
        # Tensors' memory can be shared by CUDA IPC only, and the region that was just tested shows whether IPC works.
        is_exportable=_is_exportable(context, exchange, driver) and kind in ("ipc", "local"),
        is_deterministic=cuda_settings(context.cuda).deterministic,
    )
    source, trouble = cubin, ""
    try:
        source = source or _compiled(driver, directory, context.world_size)
    except CommError as error:
        trouble = str(error)
    failed = exchange_failure(exchange, trouble, context.ranks)
    if failed or source is None:
        raise CapabilityError(failed, requirement="a cache for compiled kernels")
    custom = CustomAllReduce.create(
        CustomContext(
            driver=driver,
            health=context.health,
            rank_in_group=context.rank_in_group,
            ranks=context.ranks,
            exchange=exchange,
            facts=facts,
            settings=cuda_settings(context.cuda),
            timeout_s=context.timeout_s,
            cubin=source,
        )
    )
    return custom, ""


def _has_fast_links(topology: GroupTopology) -> bool:
    # Ranks that share one device exchange data at the speed of its memory.
    return topology.has_nvlink or len({device.uuid for device in topology.devices}) == 1


def _directory(context: CommunicatorContext) -> Path:
    chosen = cuda_settings(context.cuda).kernel_cache
    return default_cache_directory() if chosen is None else Path(chosen)


def _verify(
    context: CommunicatorContext, exchange: Exchange, driver: Driver, directory: Path
) -> tuple[str, Kind]:
    """Return why writes to peers do not arrive ("" if they do), and how memory was shared. Collective."""
    region = PeerMemory.create(
        driver,
        context.rank_in_group,
        context.ranks,
        PROBE_BYTES * context.world_size,
        exchange,
        timeout_s=context.timeout_s,
    )
    is_over = False

    def meet() -> None:
        if not is_over:
            exchange_failure(exchange, "", context.ranks)

    try:
        verdict = verify_peer_access(
            driver, context.rank_in_group, context.ranks, region.addresses, exchange, directory
        )
    except BaseException:
        # The other ranks may not take part in another round.
        is_over = True
        raise
    finally:
        region.close(None if is_over else meet, context.health.lost)
    return "" if verdict.works else verdict.reason, region.kind


def _is_exportable(context: CommunicatorContext, exchange: Exchange, driver: Driver) -> bool:
    """Return whether torch's allocator returns memory that peers can map, on every rank. Collective."""
    trouble = ""
    try:
        sample = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, device=context.device)
        if not driver.is_legacy_ipc_capable(sample.data_ptr()):
            trouble = "the allocator's memory cannot be exported (expandable segments?)"
    except (CommError, RuntimeError) as error:  # torch has no memory left
        trouble = str(error)
    return not exchange_failure(exchange, trouble, context.ranks)


def _compiled(driver: Driver, directory: Path, world_size: int) -> CubinSource:
    cache = KernelCache(directory / "kernels")
    major, minor = driver.compute_capability()

    def source(family: str, dtype: str) -> bytes:
        return cache.cubin(KernelVariant(10 * major + minor, world_size, dtype, family))

    return source
