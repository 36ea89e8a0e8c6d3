"""Device memory of every rank behind one multimem address: set-up, agreement, teardown.

See *Multimem* in DESIGN.md. An exchange follows every step that can fail on one rank, so either all ranks get the
memory or none does, for the same reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack

from device_comm.cuda.custom.peer_memory import Descriptor, attempt
from device_comm.cuda.custom.peer_messages import MAX_TEXT_CHARS, PeerExchange, RegionMessage
from device_comm.cuda.driver import Driver
from shm_broadcast.errors import CommError
from shm_broadcast.segment import Handover, take_descriptor

__all__ = ["MulticastMemory"]

logger: logging.Logger = logging.getLogger(__name__)

# The rank in the group that makes the multicast object.
_MAKER = 0


class MulticastMemory:
    """One area of device memory on each rank, and the multimem address of all of them.

    Use it from one thread at a time. Create it with `create`, and `close` it when no kernel of this rank uses it.

    Attributes:
        own: The address of this rank's area, for all instructions but multimem.
        everywhere: The multimem address, for multimem instructions only.
        nbytes: Size of each area: as requested, rounded up.
    """

    def __init__(self, driver: Driver, peers: PeerExchange, gone: Callable[[], Collection[int]]) -> None:
        """Use `create`."""
        self.own: int = 0
        self.everywhere: int = 0
        self.nbytes: int = 0
        self._driver = driver
        self._peers = peers
        self._gone = gone
        self._object = 0
        self._memory = 0
        self._is_bound = False

    @classmethod
    def create(
        cls,
        driver: Driver,
        peers: PeerExchange,
        nbytes: int,
        gone: Callable[[], Collection[int]],
        *,
        timeout_s: float = 30.0,
    ) -> tuple[MulticastMemory | None, str]:
        """Make an area on every rank, and map all of them at one address on every rank.

        *Collective* over the group, whose ranks have different devices on one host. *Blocks* as long as the exchanges
        do, plus up to `timeout_s` to fetch a descriptor. The memory is not zeroed.

        Args:
            driver: This rank's device.
            peers: The ranks of the group.
            nbytes: Smallest size of each area; equal on all ranks.
            gone: Returns the global ranks whose processes have ended; see `close`.
            timeout_s: Deadline for the descriptor of the multicast object, in seconds.

        Returns:
            The memory and an empty text; or None and why some rank cannot have it, equal on all ranks, with
            everything freed.

        Raises:
            DecodeError: A rank sent a malformed message; raised on every rank.
            Others: As the exchange: a rank was lost during the call. This rank's memory is freed.
        """
        made = cls(driver, peers, gone)
        try:
            failure = made._agree(nbytes, timeout_s)
        except BaseException:
            made.close(is_quiet=True)
            raise
        if failure:
            # All ranks have ended the step that failed, and none has used the memory.
            made.close(is_quiet=True)
            return None, failure
        return made, ""

    # --- agreement --------------------------------------------------------------------------------------------

    def _agree(self, nbytes: int, timeout_s: float) -> str:
        """Do all steps on all ranks; return why one failed, equal on all ranks, or ""."""
        peers = self._peers
        with ExitStack() as offered:
            offers = peers.gather(self._offer(nbytes, offered))
            failure = peers.named([each.failure for each in offers])
            if not failure:
                failure = peers.failures(_tried(lambda: self._join(offers[_MAKER], timeout_s)))
        # Now every device was added. The driver would let a bind wait, without a deadline, for one that was not.
        failure = failure or peers.failures(_tried(self._bind))
        # Now all memory was bound.
        return failure or peers.failures(_tried(self._map))

    def _offer(self, nbytes: int, offered: ExitStack) -> RegionMessage:
        """Make the multicast object if that is this rank's part; return how the others find it.

        What they need only meanwhile, a descriptor and the thread that hands it over, is closed with `offered`.
        """
        driver, peers = self._driver, self._peers
        if peers.rank != _MAKER:
            return RegionMessage()
        try:
            devices = len(peers.ranks)
            granule = max(driver.multicast_granularity(devices, nbytes), driver.vmm_granularity())
            rounded = -(-nbytes // granule) * granule
            self._object = driver.multicast_create(devices, rounded)
            descriptor = driver.vmm_export(self._object)
            offered.callback(os.close, descriptor)
            key = os.urandom(32)
            others = {rank for rank in range(devices) if rank != peers.rank}
            handover = Handover(Descriptor(descriptor), key, others, lambda _hello, watch: os.close(watch))
            offered.callback(handover.close)
            handover.start()
            return RegionMessage(nbytes=rounded, socket=handover.address, key=key)
        except (CommError, OSError) as error:
            return RegionMessage(f"no multicast object: {error}"[:MAX_TEXT_CHARS])

    def _join(self, offer: RegionMessage, timeout_s: float) -> None:
        """Import the object unless it was made here, and add this device to its team."""
        self.nbytes = offer.nbytes
        if self._peers.rank != _MAKER:
            descriptor, _, watch = take_descriptor(offer.socket, offer.key, self._peers.rank, timeout_s)
            os.close(watch)
            try:
                self._object = self._driver.vmm_import(descriptor)
            finally:
                os.close(descriptor)
        self._driver.multicast_add_device(self._object)

    def _bind(self) -> None:
        driver = self._driver
        self._memory = driver.vmm_create(self.nbytes)
        self.own = driver.vmm_map(self._memory, self.nbytes)
        driver.multicast_bind(self._object, self._memory, self.nbytes)
        self._is_bound = True

    def _map(self) -> None:
        self.everywhere = self._driver.vmm_map(self._object, self.nbytes)

    # --- teardown ---------------------------------------------------------------------------------------------

    def close(self, *, is_quiet: bool) -> None:
        """Unmap the multimem address, unbind and free this rank's area. Not collective, idempotent, raises nothing.

        Args:
            is_quiet: Whether every kernel of this rank that used the memory has ended, and none has given up. Then no
                peer's kernel accesses the area any more, nor will (see *Multimem* in DESIGN.md). Otherwise one may, so
                the area stays allocated until this process ends, which is logged, unless every other rank is `gone`.
        """
        trouble: list[str] = []
        if self.everywhere:
            attempt(trouble, self._driver.vmm_unmap, self.everywhere, self.nbytes)
            self.everywhere = 0
        others = set(self._peers.ranks) - {self._peers.ranks[self._peers.rank]}
        if is_quiet or others <= set(self._gone()):
            self._free(trouble)
        elif self._is_bound:
            trouble.append(
                f"{self.nbytes} bytes stay allocated until this process ends: a peer may store into them"
            )
        if trouble:
            fields = self._peers.fields
            logger.warning("teardown of multicast memory: %s", "; ".join(trouble), extra=fields)

    def _free(self, trouble: list[str]) -> None:
        driver = self._driver
        if self._is_bound:
            attempt(trouble, driver.multicast_unbind, self._object, self.nbytes)
            self._is_bound = False
        if self.own:
            attempt(trouble, driver.vmm_unmap, self.own, self.nbytes)
        if self._memory:
            attempt(trouble, driver.vmm_release, self._memory)
        if self._object:
            attempt(trouble, driver.vmm_release, self._object)
        self.own = self._memory = self._object = 0


def _tried(step: Callable[[], None]) -> str:
    """Run a step of the set-up; return why it failed, or ""."""
    try:
        step()
    except (CommError, OSError) as error:
        return str(error)
    return ""
