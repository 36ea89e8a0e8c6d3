"""Device memory of every rank, mapped by every other rank: allocation, agreement, teardown.

See *Peer memory* in DESIGN.md. All ranks agree on the kind of memory. An exchange follows every step that can fail on
one rank, so either all ranks get the memory or all raise with the same reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Final

from device_comm.cuda.custom.peer_messages import (
    MAX_TEXT_CHARS,
    BufferRecord,
    Kind,
    OfferMessage,
    PeerExchange,
    RegionMessage,
)
from device_comm.cuda.custom.release import release_together, release_when_idle
from device_comm.cuda.driver import Driver
from shm_broadcast.errors import CapabilityError, CommError, CudaError
from shm_broadcast.liveness import this_process
from shm_broadcast.segment import Handover, take_descriptor

__all__ = ["KINDS", "Descriptor", "PeerMemory", "attempt"]

logger: logging.Logger = logging.getLogger(__name__)

KINDS: Final[tuple[Kind, ...]] = ("ipc", "vmm")
"""Ways to share memory between processes, the preferred first: legacy IPC needs no thread and no descriptors."""


_WHERE: Final = "peer memory"


class Descriptor:
    """A descriptor of device memory, in the form that `Handover` sends."""

    def __init__(self, descriptor: int) -> None:
        """Name `descriptor`, which the caller still owns."""
        self.descriptor = descriptor


class PeerMemory:
    """One region of device memory on each rank, mapped on all ranks of the group, and parts of other memory.

    Use it from one thread at a time. Create it with `create`, and `close` it when nothing in flight uses it.

    Attributes:
        kind: "local", "ipc" or "vmm"; equal on all ranks.
        reason: Why this kind was chosen.
        nbytes: Size of this rank's region: as requested, or rounded up.
        addresses: The address of each rank's region in this process, by rank in the group, including its own.
    """

    def __init__(self, driver: Driver, peers: PeerExchange, gone: Callable[[], Collection[int]]) -> None:
        """Use `create`."""
        self.kind: Kind = "ipc"
        self.reason: str = ""
        self.nbytes: int = 0
        self.addresses: tuple[int, ...] = ()
        self._driver = driver
        self._peers = peers
        self._gone = gone
        # This rank's region, and whether a peer may have mapped it.
        self._own = 0
        self._is_exposed = False
        # Mapped allocations of peers, by (rank in the group, handle): each is mapped once.
        self._opened: dict[tuple[int, bytes], int] = {}
        # Peers' regions that were mapped from descriptors: address -> bytes.
        self._mapped: dict[int, int] = {}
        self._shares_buffers = False
        self._is_closed = False
        # Global ranks that have let go of this rank's region.
        self._met: frozenset[int] = frozenset()

    @classmethod
    def create(
        cls,
        driver: Driver,
        peers: PeerExchange,
        nbytes: int,
        gone: Callable[[], Collection[int]],
        *,
        kinds: Sequence[Kind] = KINDS,
        timeout_s: float = 30.0,
    ) -> PeerMemory:
        """Allocate a region on every rank, and map all regions on all ranks.

        *Collective* over the group, with the same `nbytes` and `kinds`. *Blocks* as long as the exchanges do, plus up
        to `timeout_s` for each peer whose descriptor is fetched. The memory is not zeroed.

        Args:
            driver: This rank's device.
            peers: The ranks of the group.
            nbytes: Smallest size of each region.
            gone: Returns the global ranks whose processes have ended; see `close`.
            kinds: The kinds to try between processes, the preferred first.
            timeout_s: Deadline for one peer's descriptor, in seconds.

        Raises:
            CapabilityError: No kind works between all ranks; raised on every rank with the same reason. Everything
                is freed, the group is intact.
            DisagreementError: The ranks request different sizes; raised on every rank. Everything is freed, the
                group is intact.
            DecodeError: A rank sent a malformed message; raised on every rank.
            Others: As the exchange: a rank was lost during the call. This rank's memory is released as by `close`.
        """
        memory = cls(driver, peers, gone)
        try:
            memory._agree(nbytes, kinds, timeout_s)
        except BaseException:
            # Without a barrier: either no peer has mapped our memory any more, or a rank is lost.
            release_when_idle(driver, _WHERE, peers.fields, lambda _is_awaited: memory.close(None))
            raise
        return memory

    # --- agreement --------------------------------------------------------------------------------------------

    def _agree(self, nbytes: int, kinds: Sequence[Kind], timeout_s: float) -> None:
        offers = self._peers.gather(self._offer(nbytes, kinds))
        if len({offer.nbytes for offer in offers}) > 1:
            raise self._peers.disagreement(
                "the ranks ask for regions of different sizes", [f"{offer.nbytes} bytes" for offer in offers]
            )
        reasons: list[str] = []
        for kind in self._candidates(offers, kinds, reasons):
            failure = self._attempt(kind, nbytes, timeout_s)
            if not failure:
                self.reason = "; ".join([*reasons, f"{kind}: every rank mapped every region"])
                return
            reasons.append(f"{kind}: {failure}")
        raise CapabilityError(
            f"the ranks {list(self._peers.ranks)} cannot map each other's device memory: {'; '.join(reasons)}",
            requirement="device memory that peers can map",
        )

    def _offer(self, nbytes: int, kinds: Sequence[Kind]) -> OfferMessage:
        """Return the kinds that this rank supports according to its driver. A driver's error only excludes a kind."""
        questions: dict[Kind, Callable[[], bool]] = {
            "ipc": self._driver.ipc_supported,
            "vmm": self._driver.vmm_supported,
        }
        refused: dict[Kind, str] = {}
        for kind, is_supported in questions.items():
            try:
                if kind not in kinds:
                    refused[kind] = "the settings leave it out"
                elif not is_supported():
                    refused[kind] = "the device or its driver does not support it"
            except CommError as error:
                refused[kind] = str(error)[:MAX_TEXT_CHARS]
        supported = (kind for kind in questions if kind not in refused)
        return OfferMessage(nbytes, ("local", *supported), refused, this_process())

    def _candidates(
        self, offers: Sequence[OfferMessage], kinds: Sequence[Kind], reasons: list[str]
    ) -> list[Kind]:
        """Return the kinds that all ranks support, the preferred first. Depends only on the exchanged offers."""
        processes = {offer.process for offer in offers}
        self._shares_buffers = len(processes) == 1 or all("ipc" in offer.kinds for offer in offers)
        if len(processes) == 1:
            reasons.append("the ranks are in one process")
            return ["local"]
        if len(processes) < len(offers):
            reasons.append("some ranks, but not all, are in one process")
            return []
        if not all(offers[0].process.on_same_host(process) for process in processes):
            reasons.append(f"the ranks are on several hosts: {sorted({each.hostname for each in processes})}")
            return []
        found: list[Kind] = []
        for kind in kinds:
            why = self._peers.named([offer.refused.get(kind, "") for offer in offers])
            if why:
                reasons.append(f"{kind}: {why}")
            else:
                found.append(kind)
        return found

    def _attempt(self, kind: Kind, nbytes: int, timeout_s: float) -> str:
        """Try one kind. Return "" on every rank; or free everything and return the same reason on every rank."""
        self.kind = kind
        with ExitStack() as offered:
            region = self._allocate(kind, nbytes, offered)
            # From now on a peer may map it.
            self._is_exposed = not region.failure
            regions = self._peers.gather(region)
            failure = self._peers.named([each.failure for each in regions])
            if not failure:
                failure = self._peers.failures(self._open_all(kind, regions, timeout_s))
        if failure:
            made = self._separated()
            # A rank may free its memory only after all ranks have unmapped it.
            release_together(
                *(self._driver, _WHERE, self._peers.fields, self._peers),
                lambda is_together: made.close(self._peers.meet if is_together else None),
            )
        return failure

    def _separated(self) -> PeerMemory:
        """Move what was made so far to an object of its own, and return that."""
        made = PeerMemory(self._driver, self._peers, self._gone)
        made.kind, made.nbytes = self.kind, self.nbytes
        made._own, made._is_exposed = self._own, self._is_exposed
        made._opened, made._mapped = self._opened, self._mapped
        self._own, self._is_exposed, self.addresses = 0, False, ()
        self._opened, self._mapped = {}, {}
        return made

    def _allocate(self, kind: Kind, nbytes: int, offered: ExitStack) -> RegionMessage:
        """Allocate this rank's region; return the message by which the peers map it.

        What the peers need only while they map it, a descriptor and the thread that hands it over, is closed with
        `offered`.
        """
        driver, peers = self._driver, self._peers
        try:
            if kind != "vmm":
                self._own, self.nbytes = driver.mem_alloc(nbytes), nbytes
                if kind == "local":
                    return RegionMessage(nbytes=nbytes, address=self._own, device=driver.device_index())
                if not driver.is_legacy_ipc_capable(self._own):
                    return RegionMessage("its memory is not exportable by IPC")
                return RegionMessage(nbytes=nbytes, handle=driver.ipc_get_handle(self._own))
            granule = driver.vmm_granularity()
            self.nbytes = -(-nbytes // granule) * granule
            handle = driver.vmm_create(self.nbytes)
            try:
                self._own = driver.vmm_map(handle, self.nbytes)
                descriptor = driver.vmm_export(handle)
            finally:
                # The mapping and the descriptor keep the memory allocated.
                driver.vmm_release(handle)
            offered.callback(os.close, descriptor)
            key = os.urandom(32)
            others = {rank for rank in range(len(peers.ranks)) if rank != peers.rank}
            # The descriptor of the peer's process is not needed: the group already watches its ranks' processes.
            handover = Handover(Descriptor(descriptor), key, others, lambda _hello, watch: os.close(watch))
            offered.callback(handover.close)
            handover.start()
            return RegionMessage(nbytes=self.nbytes, socket=handover.address, key=key)
        except (CommError, OSError) as error:
            return RegionMessage(str(error)[:MAX_TEXT_CHARS])

    def _open_all(self, kind: Kind, regions: Sequence[RegionMessage], timeout_s: float) -> str:
        """Map the peers' regions; return why one cannot be mapped, or ""."""
        addresses: list[int] = []
        for rank, region in enumerate(regions):
            try:
                if rank == self._peers.rank:
                    address = self._own
                elif kind == "ipc":
                    address = self._open(rank, region.handle)
                elif kind == "vmm":
                    address = self._fetch(region, timeout_s)
                else:
                    self._driver.enable_peer_access(region.device)
                    address = region.address
            except (CommError, OSError) as error:
                return f"the memory of rank {self._peers.ranks[rank]} cannot be mapped: {error}"
            addresses.append(address)
        self.addresses = tuple(addresses)
        return ""

    def _open(self, rank: int, handle: bytes) -> int:
        """Return the address of a peer's allocation in this process; map it if necessary."""
        address = self._opened.get((rank, handle))
        if address is None:
            address = self._opened[rank, handle] = self._driver.ipc_open_handle(handle)
        return address

    def _fetch(self, region: RegionMessage, timeout_s: float) -> int:
        descriptor, _, watch = take_descriptor(region.socket, region.key, self._peers.rank, timeout_s)
        os.close(watch)
        try:
            handle = self._driver.vmm_import(descriptor)
        finally:
            os.close(descriptor)
        try:
            address = self._driver.vmm_map(handle, region.nbytes)
        finally:
            self._driver.vmm_release(handle)
        self._mapped[address] = region.nbytes
        return address

    # --- other memory -----------------------------------------------------------------------------------------

    def can_export(self, address: int) -> bool:
        """Return whether peers can map memory of this rank; CUDA IPC cannot export torch's expandable segments."""
        if not self._shares_buffers or self.kind == "local":
            return self._shares_buffers
        try:
            return self._driver.is_legacy_ipc_capable(address)
        except CudaError:
            return False

    def record_of(self, address: int, nbytes: int, handles: dict[int, bytes]) -> BufferRecord:
        """Return the record by which peers find memory of this rank; `handles` caches handles by base address.

        Raises:
            CudaError: The memory cannot be exported.
            ValueError: It exceeds its allocation.
        """
        base, size = self._driver.address_range(address)
        if base not in handles:
            is_local = self.kind == "local"
            handles[base] = base.to_bytes(8, "little") if is_local else self._driver.ipc_get_handle(base)
        return BufferRecord(handles[base], address - base, nbytes, size)

    def address_of(self, rank: int, record: BufferRecord) -> int:
        """Return the address in this process of a peer's memory; map its allocation until `close` if necessary."""
        if self.kind == "local":
            return int.from_bytes(record.handle, "little") + record.offset
        return self._open(rank, record.handle) + record.offset

    # --- teardown ---------------------------------------------------------------------------------------------

    def close(self, barrier: Callable[[], None] | None) -> None:
        """Unmap the peers' memory, call `barrier`, free our own memory. Idempotent; raises nothing.

        *Collective* if `barrier` is given. *Blocks* as long as `barrier` does. The driver may also wait for other work
        on the device, of other groups too: see `release.py`. The caller has made sure that nothing in flight uses
        the memory.

        With legacy IPC it is undefined behaviour to free memory that another process has mapped. The driver unmaps
        the memory of a dead peer, but a living peer may still have it mapped. Without a barrier, or if it fails,
        IPC memory is therefore freed only if every other rank is `gone`. Otherwise it stays allocated until the
        process ends, which is logged with its size; call `close` again to retry. Memory from descriptors is
        reference-counted by the driver and freed at once.

        Args:
            barrier: Returns when all ranks have unmapped their peers' memory; None if the group is broken.
        """
        trouble: list[str] = []
        if not self._is_closed:
            self._is_closed = True
            self._close_peers(trouble)
            if barrier is not None and attempt(trouble, barrier):
                self._is_exposed = False
        if self._own:
            if self.kind == "vmm" or self.is_left:
                self._is_exposed = False
            self._free_own(trouble)
        self._warn(trouble)

    def close_peers(self) -> None:
        """Unmap the peers' memory only; `close` does the rest. Not collective, idempotent, raises nothing.

        For ranks that meet only once for all of their memory: each then passes the others to `met`. Nothing in flight
        uses the memory.
        """
        trouble: list[str] = []
        self._is_closed = True
        self._close_peers(trouble)
        self._warn(trouble)

    def met(self, ranks: Collection[int]) -> None:
        """Take note that these global ranks have called `close_peers`."""
        self._met = frozenset(ranks)

    @property
    def is_left(self) -> bool:
        """Return whether every other rank has let go of our memory or has ended."""
        others = set(self._peers.ranks) - {self._peers.ranks[self._peers.rank]}
        return others <= self._met.union(self._gone())

    def _warn(self, trouble: Sequence[str]) -> None:
        if trouble:
            fields = self._peers.fields
            logger.warning("teardown of peer memory: %s", "; ".join(trouble), extra=fields)

    def _close_peers(self, trouble: list[str]) -> None:
        """Unmap all memory of the peers; add the errors to `trouble`."""
        self.addresses = ()
        while self._opened:
            _, address = self._opened.popitem()
            attempt(trouble, self._driver.ipc_close, address)
        while self._mapped:
            address, nbytes = self._mapped.popitem()
            attempt(trouble, self._driver.vmm_unmap, address, nbytes)

    def _free_own(self, trouble: list[str]) -> None:
        if not self._own:
            return
        if self._is_exposed:
            trouble.append(
                f"{self.nbytes} bytes stay allocated until this process ends: a peer may have them open"
            )
            return
        if self.kind == "vmm":
            attempt(trouble, self._driver.vmm_unmap, self._own, self.nbytes)
        else:
            attempt(trouble, self._driver.mem_free, self._own)
        self._own = 0


def attempt(trouble: list[str], step: Callable[..., object], *arguments: object) -> bool:
    """Run one step of a teardown and collect its error, so that later steps still run; return whether it succeeded."""
    try:
        step(*arguments)
    except (CommError, OSError) as error:
        trouble.append(str(error))
        return False
    return True
