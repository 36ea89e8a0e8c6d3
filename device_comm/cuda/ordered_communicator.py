"""Keep one order of all calls of a CUDA group, by NCCL or our kernels, whatever streams they come on."""

from __future__ import annotations

import logging
from abc import abstractmethod

from device_comm.cuda.custom.release import CAPTURE_ERRORS
from device_comm.cuda.custom.streams import StreamOrder
from device_comm.cuda.driver import Driver
from device_comm.nccl.communicator import NcclCommunicator
from shm_broadcast.errors import CapabilityError, CudaError

__all__ = ["OrderedCommunicator"]

logger: logging.Logger = logging.getLogger(__name__)


class OrderedCommunicator(NcclCommunicator):
    """The order of calls of `CudaCommunicator`; see *Streams* in DESIGN.md."""

    _stream_order: StreamOrder | None = None
    _cannot_order: bool = False

    @abstractmethod
    def _driver(self) -> Driver:
        """Return this rank's device, opened at first use."""

    def _orders(self) -> bool:
        """Return whether calls on any streams keep their order, which takes the driver."""
        if self._stream_order is None and not self._cannot_order:
            try:
                self._order = self._stream_order = StreamOrder(self._driver(), self._health.where)
            except CapabilityError as error:
                # NCCL carries everything then, and orders its own kernels.
                logger.warning("asynchronous calls stay on the current stream: %s", error)
                self._cannot_order = True
        return self._stream_order is not None

    def _shared_order(self) -> StreamOrder | None:
        return self._stream_order if self._orders() else None

    def _admit(self, stream: int, name: str) -> None:
        if not self._orders():
            return
        try:
            super()._admit(stream, name)
        except CudaError as error:
            # As where our kernels carry a call: a capture that other code has made invalid runs nothing.
            if not (error.code in CAPTURE_ERRORS and self._driver().stream_is_capturing(stream)):
                self._health.fail(error)
            raise
