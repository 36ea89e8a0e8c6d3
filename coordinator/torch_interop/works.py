"""The works that torch's functions return for calls of a group: how torch waits, and what it gets."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from device_comm.handles import Handle, PointToPointHandle
from device_comm.health import SLICE_S
from device_comm.outputs import fill
from device_comm.stages import until
from device_comm.works import WaiterThreads
from shm_broadcast.errors import ClosedError, CommError, CommTimeoutError, DisagreementError, UsageError
from shm_broadcast.interruption import is_held, raised_by_handler
from shm_broadcast.turn import TakenError, Turn

if TYPE_CHECKING:
    from device_comm.async_calls import CallHandle

# Returns the error that torch's callers get for an error of ours.
Translate: TypeAlias = Callable[[CommError], Exception]


def seconds(timeout: timedelta | None) -> float | None:
    """Return torch's timeout in seconds; None if it is absent, zero or negative, which means unset."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()


def unchanged(error: CommError) -> Exception:
    """Return the error itself."""
    return error


class CallWork(dist.Work):
    """A running or completed collective."""

    def __init__(
        self,
        handle: CallHandle[Any] | None,
        outputs: Sequence[Any],
        threads: WaiterThreads | None,
        translate: Translate = unchanged,
    ) -> None:
        """Wait for `handle`, or for nothing.

        Args:
            handle: The call; None if it is complete.
            outputs: What `result` and the future return: the tensors that the call fills.
            threads: Where callbacks of the future run; None: on the group's own thread, where they must not wait.
            translate: Turns errors of ours into those that torch's callers expect.
        """
        super().__init__()
        self._handle = handle
        self._outputs = list(outputs)
        self._threads = threads
        self._translate = translate

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is complete; raise the error that it raised."""
        if self._handle is not None:
            try:
                self._handle.wait(seconds(timeout))
            except CommError as error:
                raise self._translate(error) from error
        return True

    def synchronize(self) -> None:
        """Wait for the call."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with success or an error."""
        if self._handle is None:
            return True
        try:
            return self._handle.is_completed()
        except CommError:
            return True

    def is_success(self) -> bool:
        """Return whether the call has ended without an error.

        Of a call that has not failed this asks the device, which is not allowed while a stream is being captured.
        """
        return self.exception() is None and self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a call that has failed; None while it runs and if it succeeded. Asks no device."""
        error = None if self._handle is None else self._handle.failure()
        return self._translate(error) if isinstance(error, CommError) else error

    def result(self) -> list[Any]:
        """Return the tensors that the call fills."""
        return self._outputs

    def get_future(self) -> Any:
        """Return torch's future of the tensors that the call fills.

        With `threads` a callback may start a further collective and wait for it, as communication hooks of DDP do.
        """
        if self._handle is None:
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result(self._outputs)
            return done
        # The callback below orders the streams of these devices behind the call.
        future: torch.futures.Future[Any] = torch.futures.Future(devices=self._handle.devices)
        threads, pending = self._threads, [future]

        def complete() -> None:
            try:
                completed = pending.pop()
            except IndexError:  # a thread has done it, though its start has failed here
                return
            completed.set_result(None)

        def done_on_a_thread(_: object) -> None:
            try:
                if threads is not None:
                    threads.submit(complete)
                    return
            except ClosedError:
                pass  # the group was destroyed: no callback can start a call any more, and it may run here
            except BaseException as refused:
                complete()
                if isinstance(refused, RuntimeError) and not raised_by_handler(refused):
                    return  # there is no thread to be had: a callback that waits here raises
                raise
            complete()

        self._handle.get_future().add_done_callback(done_on_a_thread)
        # An error in a callback becomes the error of the future that `then` returns, for callers in C++ too. An
        # exception that is set as a result would be taken for the tensors there.
        return future.then(self._outcome)

    def _outcome(self, _: object) -> list[Any]:
        self.wait()
        return self._outputs


class Landing:
    """A receive into a tensor that is not contiguous, by way of one that is."""

    def __init__(self, handle: Handle, into: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy `flat`, which `handle` fills, into `into`."""
        self._handle = handle
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (into, flat)
        # The thread that completes a future and the caller may both find the receive complete; so may a signal handler
        # while either copies, which then copies the same once more.
        self._lock = threading.RLock()

    def is_completed(self) -> bool:
        """Return whether the tensor is filled."""
        if self._handle.is_completed():
            self._finish()
        return self._tensors is None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait with the deadline of the receive, or with another one."""
        _wait(self._handle, timeout_s)
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            tensors = self._tensors
            if tensors is not None:
                into, flat = tensors
                fill(into, flat)
            self._tensors = None


def _wait(handle: Handle, timeout_s: float | None) -> None:
    """Wait for a transfer; `timeout_s`, if it is given, takes the place of its deadline, where it has one."""
    if timeout_s is not None and isinstance(handle, (PointToPointHandle, Landing)):
        handle.wait(timeout_s)
    else:
        handle.wait()


class TransferWork(dist.Work):
    """A send or a receive."""

    def __init__(
        self, handle: Handle, tensors: Sequence[torch.Tensor], peer: int, translate: Translate = unchanged
    ) -> None:
        """Wait for `handle`; `peer` is the other rank in the group."""
        super().__init__()
        self._handle = handle
        self._tensors = list(tensors)
        self._peer = peer
        self._translate = translate
        self._error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the memory may be used again; `timeout` takes the place of the group's deadline."""
        try:
            _wait(self._handle, seconds(timeout))
        except CommError as error:
            self._error = self._translate(error)
            raise self._error from error
        return True

    def synchronize(self) -> None:
        """Wait for the transfer."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the transfer has ended, with success or an error."""
        try:
            return self._handle.is_completed()
        except CommError as error:
            self._error = self._translate(error)
            return True

    def is_success(self) -> bool:
        """Return whether the transfer has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of a transfer that has failed."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that are sent or received."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the other rank in the group."""
        return self._peer

    def _source_rank(self) -> int:
        return self._peer


class AnyWork(dist.Work):
    """A receive from any rank, carried out inside `wait`."""

    def __init__(self, receive: Callable[[float | None], int], translate: Translate = unchanged) -> None:
        """Call `receive` with the deadline in seconds, or None for the group's; it returns the sender."""
        super().__init__()
        self._receive: Callable[[float | None], int] | None = receive
        self._translate = translate
        self._source = -1
        self._lock = threading.RLock()
        # Why the message that came does not fit: it is gone, and every wait says so.
        self._unfit: DisagreementError | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Receive, unless an earlier wait has done so. That of another thread is waited for within the deadline."""
        try:
            self._receive_once(seconds(timeout))
        except CommError as error:
            raise self._translate(error) from error
        return True

    def _receive_once(self, timeout_s: float | None) -> None:
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if is_held(self._lock):
            raise UsageError("wait: a signal handler cannot wait for the receive that it has interrupted")
        while self._receive is not None:
            try:
                with Turn(self._lock, min(SLICE_S, until(end))):
                    if self._unfit is not None:
                        raise self._unfit
                    receive = self._receive
                    if receive is not None:
                        self._source = receive(None if timeout_s is None else until(end))
                        # Nothing is called between the receive and this.
                        self._receive = None
            except DisagreementError as error:
                if not raised_by_handler(error):
                    self._unfit = error
                raise
            except TakenError:
                if time.monotonic() >= end:
                    raise CommTimeoutError(
                        f"wait: another thread was in this receive for {timeout_s:.1f} s; it goes on",
                        missing=(),
                    ) from None

    def synchronize(self) -> None:
        """Receive."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` has received the tensor: until then nothing is received."""
        return self._receive is None

    def source_rank(self) -> int:
        """Return the rank in the group that sent; -1 before `wait` has received."""
        return self._source

    def _source_rank(self) -> int:
        return self._source


__all__ = ["AnyWork", "CallWork", "Landing", "TransferWork", "Translate", "seconds", "unchanged"]
