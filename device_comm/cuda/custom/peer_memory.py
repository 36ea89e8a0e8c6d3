"""Device memory of every rank, mapped by every other rank: allocation, agreement, teardown.

See *Peer memory* in DESIGN.md. All ranks agree on the kind of memory. An exchange follows every step that can fail on
one rank, so either all ranks get the memory or all raise with the same reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

import msgspec

from device_comm.cuda.custom.peer_messages import (
    MAX_TEXT_CHARS,
    BufferRecord,
    BuffersMessage,
    Exchange,
    Kind,
    OfferMessage,
    RegionMessage,
    exchange_failure,
    said,
    speak,
)
from device_comm.cuda.driver import Driver
from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    CudaError,
    DisagreementError,
)
from shm_broadcast.liveness import this_process
from shm_broadcast.segment import Handover, Hello, take_descriptor

__all__ = ["KINDS", "PeerMemory", "attempt"]

logger: logging.Logger = logging.getLogger(__name__)

_Message = TypeVar("_Message", bound=msgspec.Struct)

KINDS: Final[tuple[Kind, ...]] = ("ipc", "vmm")
"""Ways to share memory between processes, the preferred first: legacy IPC needs no thread and no descriptors."""


class _Descriptor:
    """A descriptor of device memory, in the form that `Handover` sends."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor


class PeerMemory:
    """One region of device memory on each rank, mapped on all ranks of the group, and registered buffers.

    Use it from one thread at a time. Create it with `create`, and `close` it when nothing in flight uses it.

    Attributes:
        kind: "local", "ipc" or "vmm"; equal on all ranks.
        reason: Why this kind was chosen.
        nbytes: Size of this rank's region: as requested, or rounded up.
        addresses: The address of each rank's region in this process, by rank in the group, including its own.
    """

    def __init__(self, driver: Driver, rank_in_group: int, ranks: Sequence[int], exchange: Exchange) -> None:
        """Use `create`."""
        self.kind: Kind = "ipc"
        self.reason: str = ""
        self.nbytes: int = 0
        self.addresses: tuple[int, ...] = ()
        self._driver = driver
        self._rank = rank_in_group
        self._ranks = tuple(ranks)
        self._exchange = exchange
        # This rank's region, and whether a peer may have mapped it.
        self._own = 0
        self._is_exposed = False
        # Mapped allocations of peers, by (rank in the group, handle): each is mapped once.
        self._opened: dict[tuple[int, bytes], int] = {}
        # Peers' regions that were mapped from descriptors: address -> bytes.
        self._mapped: dict[int, int] = {}
        self._shares_buffers = False
        self._state = "new"

    @classmethod
    def create(
        cls,
        driver: Driver,
        rank_in_group: int,
        ranks: Sequence[int],
        nbytes: int,
        exchange: Exchange,
        *,
        kinds: Sequence[Kind] = KINDS,
        timeout_s: float = 30.0,
        gone: Callable[[], Collection[int]] | None = None,
    ) -> PeerMemory:
        """Allocate a region on every rank, and map all regions on all ranks.

        *Collective* over the group, with the same `nbytes` and `kinds`. *Blocks* as long as `exchange` does, plus up
        to `timeout_s` for each peer whose descriptor is fetched. The memory is not zeroed.

        Args:
            driver: This rank's device.
            rank_in_group: This rank.
            ranks: Global ranks of the group.
            nbytes: Smallest size of each region.
            exchange: See `Exchange`.
            kinds: The kinds to try between processes, the preferred first.
            timeout_s: Deadline for one peer's descriptor, in seconds.
            gone: As for `close`, in case a rank is lost during the call.

        Raises:
            CapabilityError: No kind works between all ranks; raised on every rank with the same reason. Everything
                is freed, the group is intact.
            DisagreementError: The ranks request different sizes; raised on every rank. Everything is freed, the
                group is intact.
            DecodeError: A rank sent a malformed message; raised on every rank.
            Others: As `exchange`: a rank was lost during the call. This rank's memory is released as by `close`.
        """
        memory = cls(driver, rank_in_group, ranks, exchange)
        try:
            memory._agree(nbytes, kinds, timeout_s)
        except BaseException:
            # Without a barrier: either no peer has mapped our memory any more, or a rank is lost.
            memory.close(None, gone)
            raise
        return memory

    # --- agreement --------------------------------------------------------------------------------------------

    def _agree(self, nbytes: int, kinds: Sequence[Kind], timeout_s: float) -> None:
        offers = self._speak(self._offer(nbytes, kinds))
        sizes = {offer.nbytes for offer in offers}
        if len(sizes) > 1:
            raise DisagreementError(
                f"the ranks ask for regions of different sizes: {sorted(sizes)}",
                views={
                    rank: f"{offer.nbytes} bytes" for rank, offer in zip(self._ranks, offers, strict=True)
                },
            )
        reasons: list[str] = []
        for kind in self._candidates(offers, kinds, reasons):
            failure = self._attempt(kind, nbytes, timeout_s)
            if not failure:
                self.kind = kind
                self.reason = "; ".join([*reasons, f"{kind}: every rank mapped every region"])
                self._state = "open"
                return
            reasons.append(f"{kind}: {failure}")
        raise CapabilityError(
            f"the ranks {list(self._ranks)} cannot map each other's device memory: {'; '.join(reasons)}",
            requirement="device memory that peers can map",
        )

    def _offer(self, nbytes: int, kinds: Sequence[Kind]) -> OfferMessage:
        """Return the kinds that this rank supports according to its driver. A driver's error only excludes a kind."""
        can: list[Kind] = ["local"]
        refused: dict[Kind, str] = {}
        for kind, ask in (("ipc", self._driver.ipc_supported), ("vmm", self._driver.vmm_supported)):
            name: Kind = "ipc" if kind == "ipc" else "vmm"
            if name not in kinds:
                refused[name] = "the settings leave it out"
                continue
            try:
                if ask():
                    can.append(name)
                else:
                    refused[name] = "the device or its driver does not support it"
            except CommError as error:
                refused[name] = str(error)[:MAX_TEXT_CHARS]
        return OfferMessage(nbytes, tuple(can), refused, this_process())

    def _candidates(
        self, offers: Sequence[OfferMessage], kinds: Sequence[Kind], reasons: list[str]
    ) -> list[Kind]:
        """Return the kinds that all ranks support, the preferred first. Depends only on the exchanged offers."""
        processes = [offer.process for offer in offers]
        self._shares_buffers = all("ipc" in offer.kinds for offer in offers)
        if all(process == processes[0] for process in processes):
            self._shares_buffers = True
            reasons.append("the ranks are in one process")
            return ["local"]
        if len(set(processes)) < len(processes):
            reasons.append("some ranks, but not all, are in one process")
            return []
        if not all(processes[0].on_same_host(process) for process in processes):
            hosts = sorted({process.hostname for process in processes})
            reasons.append(f"the ranks are on several hosts: {hosts}")
            return []
        found: list[Kind] = []
        for kind in kinds:
            why = said([offer.refused.get(kind, "") for offer in offers], self._ranks)
            if why:
                reasons.append(f"{kind}: {why}")
            else:
                found.append(kind)
        return found

    def _attempt(self, kind: Kind, nbytes: int, timeout_s: float) -> str:
        """Try one kind. Return "" on every rank; or free everything and return the same reason on every rank."""
        self.kind = kind
        region, handover, descriptor = self._allocate(kind, nbytes)
        try:
            # From now on a peer may map it.
            self._is_exposed = not region.failure
            regions = self._speak(region)
            failure = said([each.failure for each in regions], self._ranks)
            if not failure:
                failure = self._exchange_failure(self._open_all(kind, regions, timeout_s))
        finally:
            if handover is not None:
                handover.close()
            if descriptor is not None:
                os.close(descriptor)
        if failure:
            trouble = self._close_peers()
            # A rank may free its memory only after all ranks have unmapped it.
            self._exchange_failure("")
            self._is_exposed = False
            self._free_own(trouble)
            _report(trouble)
        return failure

    def _allocate(self, kind: Kind, nbytes: int) -> tuple[RegionMessage, Handover | None, int | None]:
        """Allocate this rank's region; return the message for the peers, the descriptor's sender and the descriptor."""
        driver = self._driver
        descriptor = None
        try:
            if kind != "vmm":
                self._own, self.nbytes = driver.mem_alloc(nbytes), nbytes
                if kind == "local":
                    index = driver.device_index()
                    return RegionMessage(nbytes=nbytes, address=self._own, device=index), None, None
                if not driver.is_legacy_ipc_capable(self._own):
                    return RegionMessage("its memory is not exportable by IPC"), None, None
                return RegionMessage(nbytes=nbytes, handle=driver.ipc_get_handle(self._own)), None, None
            granule = driver.vmm_granularity()
            self.nbytes = -(-nbytes // granule) * granule
            handle = driver.vmm_create(self.nbytes)
            try:
                self._own = driver.vmm_map(handle, self.nbytes)
                descriptor = driver.vmm_export(handle)
            finally:
                # The mapping and the descriptor keep the memory allocated.
                driver.vmm_release(handle)
            key = os.urandom(32)
            others = {rank for rank in range(len(self._ranks)) if rank != self._rank}
            handover = Handover(_Descriptor(descriptor), key, others, _let_go)
            return RegionMessage(nbytes=self.nbytes, socket=handover.address, key=key), handover, descriptor
        except (CommError, OSError) as error:
            if descriptor is not None:
                os.close(descriptor)
            return RegionMessage(str(error)[:MAX_TEXT_CHARS]), None, None

    def _open_all(self, kind: Kind, regions: Sequence[RegionMessage], timeout_s: float) -> str:
        """Map the peers' regions; return why one cannot be mapped, or ""."""
        addresses: list[int] = []
        for rank, region in enumerate(regions):
            if rank == self._rank:
                addresses.append(self._own)
                continue
            try:
                if kind == "ipc":
                    address = self._open(rank, region.handle)
                elif kind == "vmm":
                    address = self._fetch(region, timeout_s)
                else:
                    self._driver.enable_peer_access(region.device)
                    address = region.address
            except (CommError, OSError) as error:
                return f"the memory of rank {self._ranks[rank]} cannot be mapped: {error}"
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
        descriptor, _, watch = take_descriptor(region.socket, region.key, self._rank, timeout_s)
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

    # --- registered buffers -----------------------------------------------------------------------------------

    def why_not_exportable(self, address: int) -> str:
        """Return why `register` would refuse memory of this rank, or "". Only queries the driver."""
        if not self._shares_buffers:
            return "not every rank can export memory by CUDA IPC"
        if self.kind == "local":
            return ""
        try:
            if self._driver.is_legacy_ipc_capable(address):
                return ""
        except CudaError as error:
            return str(error)[:MAX_TEXT_CHARS]
        return "its memory cannot be exported by CUDA IPC, as that of torch's expandable_segments"

    def register(self, buffers: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Map buffers of every rank on all ranks, such as the inputs of the all-reduces in a captured graph.

        *Collective*, with buffers of equal number and sizes on every rank. *Blocks* as long as the exchange does.
        *Capture*: not allowed. The owner keeps the buffers allocated until `close`.

        Args:
            buffers: (address, bytes) of each buffer, which may begin anywhere within an allocation.

        Returns:
            For each buffer the addresses of all ranks' buffers in this process, by rank in the group.

        Raises:
            CapabilityError: A buffer cannot be exported or mapped; raised on every rank, the group is intact.
            DisagreementError: The ranks registered different sizes; raised on every rank, the group is intact.
            ClosedError: The memory was closed.
        """
        if self._state != "open":
            raise ClosedError("the peer memory was closed")
        messages = self._speak(self._export(buffers))
        failure = said([message.failure for message in messages], self._ranks)
        if failure:
            raise CapabilityError(
                f"a buffer cannot be registered: {failure}", requirement="memory for CUDA IPC"
            )
        sizes = [tuple(buffer.nbytes for buffer in message.buffers) for message in messages]
        if len(set(sizes)) > 1:
            views = {
                rank: f"{len(each)} buffers of {sum(each)} bytes"
                for rank, each in zip(self._ranks, sizes, strict=True)
            }
            raise DisagreementError(f"the ranks registered different buffers: {views}", views=views)
        result: list[tuple[int, ...]] = []
        trouble: CommError | None = None
        try:
            result = self._open_buffers(buffers, [message.buffers for message in messages])
        except CommError as error:
            trouble = error
        failure = self._exchange_failure("" if trouble is None else str(trouble))
        if failure:
            raise CapabilityError(
                f"a registered buffer cannot be opened: {failure}", requirement="memory for CUDA IPC"
            ) from trouble
        return result

    def _export(self, buffers: Sequence[tuple[int, int]]) -> BuffersMessage:
        records: list[BufferRecord] = []
        handles: dict[int, bytes] = {}
        for address, nbytes in buffers:
            why = self.why_not_exportable(address)
            if why:
                return BuffersMessage(f"{address:#x}: {why}")
            try:
                records.append(self.record_of(address, nbytes, handles))
            except CudaError as error:
                return BuffersMessage(str(error)[:MAX_TEXT_CHARS])
            except ValueError as error:
                return BuffersMessage(f"{address:#x} with {nbytes} bytes: {error}")
        return BuffersMessage("", tuple(records))

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

    def _open_buffers(
        self, buffers: Sequence[tuple[int, int]], records: Sequence[Sequence[BufferRecord]]
    ) -> list[tuple[int, ...]]:
        result = []
        for index, (address, _) in enumerate(buffers):
            row = []
            for rank, of_rank in enumerate(records):
                row.append(address if rank == self._rank else self.address_of(rank, of_rank[index]))
            result.append(tuple(row))
        return result

    def _speak(self, message: _Message) -> list[_Message]:
        return speak(self._exchange, message, self._ranks)

    def _exchange_failure(self, failure: str) -> str:
        return exchange_failure(self._exchange, failure, self._ranks)

    # --- teardown ---------------------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's memory that `close` left allocated because a peer may still have mapped them."""
        return self.nbytes if self._own and self._state == "closed" else 0

    def close(
        self, barrier: Callable[[], None] | None, gone: Callable[[], Collection[int]] | None = None
    ) -> None:
        """Synchronize, unmap the peers' memory, call `barrier`, free our own memory. Idempotent; raises nothing.

        *Collective* if `barrier` is given. *Blocks* until work in flight is done (kernels have deadlines), and as long
        as `barrier` does.

        With legacy IPC it is undefined behaviour to free memory that another process has mapped. The driver unmaps
        the memory of a dead peer, but a living peer may still have it mapped. Without a barrier, or if it fails,
        IPC memory is therefore freed only if every other rank is among `gone`. Otherwise it stays allocated until the
        process ends, which is logged with its size; call `close` again to retry. Memory from descriptors is
        reference-counted by the driver and freed at once.

        Args:
            barrier: Returns when all ranks have unmapped their peers' memory; None if the group is broken.
            gone: Returns the global ranks whose processes have ended.
        """
        trouble: list[str] = []
        if self._state != "closed":
            self._state = "closed"
            attempt(trouble, self._driver.context_synchronize)
            trouble += self._close_peers()
            if barrier is not None and attempt(trouble, barrier):
                self._is_exposed = False
        if self._own:
            others = {rank for rank in self._ranks if rank != self._ranks[self._rank]}
            if self.kind == "vmm" or (gone is not None and others <= set(gone())):
                self._is_exposed = False
            self._free_own(trouble)
        _report(trouble)

    def _close_peers(self) -> list[str]:
        """Unmap all memory of the peers; return the errors."""
        trouble: list[str] = []
        self.addresses = ()
        while self._opened:
            _, address = self._opened.popitem()
            attempt(trouble, self._driver.ipc_close, address)
        while self._mapped:
            address, nbytes = self._mapped.popitem()
            attempt(trouble, self._driver.vmm_unmap, address, nbytes)
        return trouble

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


def _let_go(_hello: Hello, descriptor: int) -> None:
    # The descriptor of the peer's process is not needed: the group already watches its ranks' processes.
    os.close(descriptor)


def attempt(trouble: list[str], step: Callable[..., object], *arguments: object) -> bool:
    """Run one step of a teardown and collect its error, so that later steps still run; return whether it succeeded."""
    try:
        step(*arguments)
    except (CommError, OSError) as error:
        trouble.append(str(error))
        return False
    return True


def _report(trouble: Sequence[str]) -> None:
    if trouble:
        logger.warning("teardown of peer memory: %s", "; ".join(trouble))
