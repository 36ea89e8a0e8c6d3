"""The end of a CUDA group: NCCL first, then our kernels, alone or together with the other ranks of its epoch."""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Final

from device_comm.cuda.custom.kernel_calls import KernelCalls
from device_comm.cuda.custom.release import await_idle
from device_comm.cuda.driver import Driver
from device_comm.cuda.event_progress import EventProgress
from device_comm.cuda.ordered_communicator import OrderedCommunicator

__all__ = ["EndingCommunicator"]

# How long `destroy` waits for queued calls, in seconds.
_FLUSH_S: Final = 5.0
# `quiesce` waits at least this long for the device, in seconds, even if NCCL has used up the time: the device
# may be at rest already.
_LEAST_REST_S: Final = 0.5


class EndingCommunicator(OrderedCommunicator):
    """The end of `CudaCommunicator`; see *The end* and *The end of an epoch* in DESIGN.md."""

    _opened: Driver | None
    _events: EventProgress

    @abstractmethod
    def _kernels(self) -> list[KernelCalls]:
        """Return what has been built of our kernels."""

    def end_calls(self, timeout_s: float) -> None:
        """Refuse later calls of our kernels, wait for queued ones, then make those that still wait leave.

        NCCL's calls of a broken group end with the abort of its communicator, which is waited for, too.
        """
        if not self._health.is_inherited:
            deadline = time.monotonic() + timeout_s
            self._stop(timeout_s)
            super().end_calls(max(deadline - time.monotonic(), 0.0))

    def _stop(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for each in self._kernels():
            each.stop(max(deadline - time.monotonic(), 0.0))

    def check_device(self) -> None:
        """Raise if the device has failed: the driver's calls return the errors of earlier launches."""
        if self._opened is not None and not self._health.is_inherited:
            self._opened.event_destroy(self._opened.event_create())

    def quiesce(self, timeout_s: float) -> None:
        """End NCCL, wait until nothing runs on the device any more, and unmap the memory of the peers.

        A group that is whole is finalized, a broken one aborted. Without the bindings of the driver nothing of ours is
        on the device, and no memory of peers is mapped.

        Raises:
            CudaError: The device has failed, or a capture hides what it does. The peers' memory stays mapped.
            CommTimeoutError: The device has not come to rest in time. As above.
        """
        if self._health.is_inherited:
            return
        deadline = time.monotonic() + timeout_s
        super().destroy()
        self._stop(max(deadline - time.monotonic(), 0.0))
        if self._opened is not None:
            left_s = max(deadline - time.monotonic(), _LEAST_REST_S)
            await_idle(self._opened, self._health.where("quiesce"), left_s)
            for each in self._kernels():
                each.close_peers()

    def met(self, ranks: Collection[int]) -> None:
        """Take note that these global ranks have unmapped this rank's memory."""
        for each in self._kernels():
            each.met(ranks)

    def destroy(self) -> None:
        """End NCCL, then our kernels, and free their memory.

        NCCL goes first: it is aborted if its work does not end within seconds, whereas our memory is freed only when
        nothing on the device runs any more, and so not before NCCL's work has ended. All our kernels have been made to
        leave before any memory is freed, and the driver is closed behind the last. If one part is freed by a thread,
        because other work takes longer, so is the rest.
        """
        super().destroy()
        self._events.close()
        self._stop(_FLUSH_S)
        if self._stream_order is not None:
            self._stream_order.close()
        end: Callable[[], None] | None = None if self._opened is None else self._opened.close
        for each in self._kernels():
            end = functools.partial(each.destroy, then=end)
        if end is not None:
            end()
