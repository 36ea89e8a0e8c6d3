"""Whether a group can use our own kernels: every fact is told to all ranks, and all come to the same answer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from device_comm.base import CommunicatorContext
from device_comm.cuda_settings import cuda_settings
from device_comm.custom_all_reduce import CustomAllReduce, CustomContext
from device_comm.custom_launches import CubinSource
from device_comm.driver import Driver
from device_comm.kernels import KernelCache, KernelVariant
from device_comm.peer_access import PROBE_BYTES, verify_peer_access
from device_comm.peer_memory import PeerMemory
from device_comm.peer_messages import Exchange, Kind, Remark, said, speak
from device_comm.policy import GroupFacts
from device_comm.topology import GroupTopology, gather_topology, probe
from shm_broadcast.errors import CapabilityError, CommError, InternalError

__all__ = ["build_custom", "default_cache_directory"]

_TEXT: Final = 1900
# Enough for torch to take a block of its own for it.
_SAMPLE_BYTES: Final = 2 << 20


def default_cache_directory() -> Path:
    """Return where compiled kernels and verdicts are kept if the settings do not say: the user's own cache.

    By the password database, not by the environment, which only the settings may read.
    """
    import pwd

    try:
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        # A user without a name, as some clusters give to containers. Who owns the directory is checked in any case.
        return Path(tempfile.gettempdir()) / f"group-coordinator-{os.geteuid()}"
    return home / ".cache" / "group-coordinator"


def build_custom(
    context: CommunicatorContext,
    open_driver: Callable[[], Driver],
    cubin: CubinSource | None = None,
) -> tuple[CustomAllReduce | None, str]:
    """Return our own collectives for the group, or None with the reason. Collective; equal on all ranks.

    Args:
        context: The group; `exchange` must be there.
        open_driver: Opens this rank's device, which stays the caller's.
        cubin: Gives the compiled kernels; by default NVRTC and a cache on disk do.

    Raises:
        SettingsError: This rank's policy file cannot be used.
        DisagreementError: Another rank's cannot, or they say different things.
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
        trouble = str(error)[:_TEXT]
    failed = _said(Remark(trouble), context, exchange)
    if failed or driver is None:
        return None, failed
    try:
        return _build(context, exchange, driver, cubin)
    except CapabilityError as error:
        # The same on all ranks: whoever raises this has told the others.
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
        # The memory of tensors goes by CUDA IPC alone, which the region that was just tried has shown to work, or not.
        is_exportable=_is_exportable(context, exchange, driver) and kind in ("ipc", "local"),
        is_deterministic=cuda_settings(context.cuda).deterministic,
    )
    source, trouble = cubin, ""
    try:
        source = source or _compiled(driver, directory, context.world_size)
    except CommError as error:
        trouble = str(error)[:_TEXT]
    failed = _said(Remark(trouble), context, exchange)
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


def _said(remark: Remark, context: CommunicatorContext, exchange: Exchange) -> str:
    return said([each.failure for each in speak(exchange, remark, context.ranks)], context.ranks)


def _has_fast_links(topology: GroupTopology) -> bool:
    # Ranks that share a device reach each other at the speed of its memory.
    return topology.has_nvlink or len({device.uuid for device in topology.devices}) == 1


def _directory(context: CommunicatorContext) -> Path:
    chosen = cuda_settings(context.cuda).kernel_cache
    return default_cache_directory() if chosen is None else Path(chosen)


def _verify(
    context: CommunicatorContext, exchange: Exchange, driver: Driver, directory: Path
) -> tuple[str, Kind]:
    """Return why writes to peers do not arrive, or "" if they do; and how memory was shared. Collective."""
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
            speak(exchange, Remark(), context.ranks)

    try:
        verdict = verify_peer_access(
            driver, context.rank_in_group, context.ranks, region.addresses, exchange, directory
        )
    except BaseException:
        # The others may not come to a meeting any more.
        is_over = True
        raise
    finally:
        region.close(None if is_over else meet, context.health.lost)
    return "" if verdict.works else verdict.reason, region.kind


def _is_exportable(context: CommunicatorContext, exchange: Exchange, driver: Driver) -> bool:
    """Return whether on every rank torch's allocator gives memory that peers can map. Collective."""
    trouble = ""
    try:
        sample = torch.empty(_SAMPLE_BYTES, dtype=torch.uint8, device=context.device)
        if not driver.is_legacy_ipc_capable(sample.data_ptr()):
            trouble = "the allocator's memory cannot be exported (expandable segments?)"
    except (CommError, RuntimeError) as error:  # torch has no memory left
        trouble = str(error)[:_TEXT]
    return not _said(Remark(trouble), context, exchange)


def _compiled(driver: Driver, directory: Path, world_size: int) -> CubinSource:
    cache = KernelCache(directory / "kernels")
    major, minor = driver.compute_capability()

    def source(family: str, dtype: str) -> bytes:
        return cache.cubin(KernelVariant(10 * major + minor, world_size, dtype, family))

    return source
