"""Keep one order of all calls of a CUDA group, by NCCL or our kernels, whatever streams they come on."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from device_comm.cuda.custom.release import CAPTURE_ERRORS
from device_comm.cuda.custom.streams import StreamOrder
from device_comm.cuda.driver import Driver
from device_comm.nccl.communicator import NcclCommunicator
from device_comm.nccl.window import Copy
from shm_broadcast.errors import CapabilityError, CommError, CudaError, UsageError

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
                logger.warning(
                    "asynchronous calls stay on the current stream: %s",
                    error,
                    extra=self._health.log_fields(algorithm="nccl"),
                )
                self._cannot_order = True
        return self._stream_order is not None

    def _shared_order(self) -> StreamOrder | None:
        return self._stream_order if self._orders() else None

    def _admit(self, stream: int, name: str) -> None:
        if not self._orders():
            return
        with self._queueing(stream):
            super()._admit(stream, name)

    @contextmanager
    def _queueing(self, stream: int) -> Iterator[None]:
        """Break the group if the device refuses what is queued within the context, and this rank would go on alone."""
        try:
            yield
        except CudaError as error:
            self._give_up(error, stream)
            raise

    def _capture_of(self, stream: int) -> int:
        """Return the id of the capture that a stream takes part in; 0 without one, and on a rank without the driver."""
        return self._driver().capture_id(stream) if self._orders() else 0

    @contextmanager
    def _ordering(self, stream: int) -> Iterator[None]:
        """Break the group if an asynchronous call that was made on `stream` cannot be ordered with other work."""
        try:
            yield
        except UsageError:
            # As where a call comes on the caller's stream: the program is wrong on all ranks alike.
            raise
        except Exception as error:
            failure = CudaError(
                f"{self._health.where('an asynchronous call')}: it cannot be ordered with stream {stream:#x}: {error}",
                library="torch",
                function="the order of streams",
                # Errors of the run-time have the numbers of those of the driver.
                code=getattr(error, "error_code", None),
            )
            self._give_up(failure, stream)
            raise failure from error

    def _give_up(self, error: CudaError, stream: int) -> None:
        """Break the group: this rank has not queued a call, and the others would take its next one for this.

        If other code has made the capture of `stream` invalid, none of it will run, and the group is intact.
        """
        if not (error.code in CAPTURE_ERRORS and self._was_captured(stream)):
            self._health.fail(error)

    def _was_captured(self, stream: int) -> bool:
        try:
            return self._driver().stream_is_capturing(stream)
        except CommError:
            return False

    # ------------------------------------------------------------------ NCCL's window

    def _copier(self) -> tuple[Copy | None, str]:
        if self._orders():
            return self._copy, ""
        return None, "the driver's bindings are missing, so calls could not be ordered"

    def _copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        with self._queueing(stream):
            self._driver().memcpy_dtod(destination, source, nbytes, stream)
