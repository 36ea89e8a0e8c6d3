"""Asynchronous collectives: one thread per group makes the calls in order while the caller computes.

An asynchronous call is the blocking call made by another thread, which releases the GIL while it copies, reduces and
waits. It is the same code, so bits, deadlines and errors are those of the blocking form.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch

from device_comm.health import SLICE_S, GroupHealth
from device_comm.stages import BUSY, until, without_place
from shm_broadcast.errors import ClosedError, CommError, CommTimeoutError, GroupBrokenError, UsageError
from shm_broadcast.interruption import raised_by_handler, tolerating
from shm_broadcast.threads import DaemonThread, start_thread
from shm_broadcast.timeouts import AnyTimeout, seconds

logger: logging.Logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Mark(Protocol):
    """A place in the order of an accelerator's stream, behind the work that a call has queued."""

    def wait(self) -> None:
        """Make later work on the caller's current stream wait for it; does not block.

        While that stream is being captured, this is allowed only for a mark of the same capture.
        """

    def is_reached(self) -> bool:
        """Return whether the work is complete. Not allowed while a stream is being captured."""

    def behind(self) -> AbstractContextManager[object]:
        """Within the context the current stream is one that is ordered behind the work."""


class Aside(Protocol):
    """Where an accelerator carries out asynchronous calls."""

    def entered(self, call: object) -> AbstractContextManager[object]:
        """Within the context, work that is queued on the current stream is the call's.

        `call` is the function that makes it, a `partial` of which the arguments hold all tensors that it uses.
        """

    def mark(self, result: object) -> Mark:
        """Return a mark behind the call, from within the context; `result` is what the call returns."""


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that have the memory of a value, of a list, tuple or dataclass of values, or of a `partial`."""
    if isinstance(value, torch.Tensor):
        # The accessors without an underscore are for coalesced tensors only.
        parts = (value._indices(), value._values()) if value.is_sparse else (value,)  # noqa: SLF001 - torch's names
        yield from parts
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
    elif isinstance(value, partial):
        yield from tensors_of([value.func, *value.args, *value.keywords.values()])
    elif dataclasses.is_dataclass(value):
        # A reduction may hold a factor.
        yield from tensors_of([getattr(value, field.name) for field in dataclasses.fields(value)])


class OnCurrentStream:
    """An accelerator's current stream, on which calls are queued at once; see `Aside`."""

    def __init__(self, device: torch.device) -> None:
        """Serve `device`."""
        self._device = device

    def entered(self, call: object) -> AbstractContextManager[None]:
        """Change nothing."""
        del call
        return nullcontext()

    def mark(self, result: object) -> Mark:
        """Record an event on the current stream."""
        del result
        return StreamMark(self._device)


def check_capture(*, is_captured: bool, was_captured: bool) -> None:
    """Raise `UsageError` if only one of the current stream and the call that it waits for is captured."""
    if is_captured and not was_captured:
        raise UsageError(
            "a captured stream cannot wait for a call that was made before the capture; wait for its handle before"
        )
    if was_captured and not is_captured:
        raise UsageError(
            "a stream outside of the capture cannot wait for a call that was captured; wait for its handle within "
            "the capture, and replay the graph"
        )


def refuse_question(is_captured: bool) -> None:
    """Raise `UsageError` if the call whose progress is asked for, or the current stream, is captured."""
    if is_captured:
        raise UsageError(
            "is_completed: a captured call runs in each replay, and a capture allows no such question"
        )


class StreamMark:
    """A mark on the current stream of a device; see `Mark`."""

    def __init__(self, device: torch.device) -> None:
        """Record an event."""
        self._device = device
        self._streams = torch.get_device_module(device)
        # Devices other than CUDA need not have captures.
        self._is_capturing: Callable[[], bool] = getattr(
            self._streams, "is_current_stream_capturing", lambda: False
        )
        self._is_captured = self._is_capturing()
        self._event = self._streams.Event()
        self._event.record(self._streams.current_stream(device))

    def wait(self) -> None:
        """Make the current stream wait for the event.

        Raises:
            UsageError: The current stream is being captured and the call was not, or the other way round. Nothing was
                queued, and no capture is spoilt.
        """
        check_capture(is_captured=self._is_capturing(), was_captured=self._is_captured)
        self._event.wait(self._streams.current_stream(self._device))

    def is_reached(self) -> bool:
        """Query the event.

        Raises:
            UsageError: The call was captured, or the current stream is being captured.
        """
        refuse_question(self._is_captured or self._is_capturing())
        return bool(self._event.query())

    def behind(self) -> AbstractContextManager[None]:
        """Make the caller's current stream wait."""
        self.wait()
        return nullcontext()


class CallHandle(Generic[Result]):
    """A collective in progress; owns the memory that it reads and writes.

    Any thread may wait for it, more than once. A handle that is dropped does not end the call: the group keeps it.
    On an accelerator the call queues its work behind the stream that is current when the call is made. On
    CUDA the work is on a stream of the group, beside what is queued on the current stream afterwards. Waiting
    for the handle orders the stream that is current then behind the work, without blocking. A
    captured call is waited for within its capture.
    """

    def __init__(
        self, health: GroupHealth, name: str, call: Callable[[], Result], device: torch.device
    ) -> None:
        """Create the handle; do not start the call."""
        self._health = health
        self._name = name
        self._call: Callable[[], Result] | None = call
        self._device = device
        self._inference = torch.is_inference_mode_enabled()
        # `_done` is held until the call has ended, and orders the result before any thread that reads it.
        self._done = threading.Lock()
        self._done.acquire()
        self._is_done = False
        self._value: Any = None
        self._error: Exception | None = None
        # Behind the call's work on an accelerator; None elsewhere.
        self._mark: Mark | None = None
        self._future: torch.futures.Future[Result] | None = None
        # Empty once the future is complete, or while a thread completes it.
        self._unresolved: deque[None] = deque([None], maxlen=1)

    def wait(self, timeout_s: AnyTimeout = None) -> Result:
        """Wait for the result and return it; raise what the blocking call would have raised.

        On an accelerator the caller's current stream waits, and later work on it finds the result. While that stream is
        being captured, only a call of the same capture can be waited for: order the stream behind earlier calls before
        the capture begins.

        Args:
            timeout_s: How long this wait may take, in seconds. The call has its own deadline, given when it was made.

        Raises:
            CommTimeoutError: Either `timeout_s` has passed: the call continues, the group is intact, and the handle
                can be waited for again. Or the call's own deadline has passed: `.missing` names the ranks that did
                not arrive, and the group is broken.
            PeerLostError: A peer is gone; the group is broken.
            ClosedError: The group was destroyed before the call ended.
            UsageError: The call was refused and nothing was sent; or this process is a forked child of the group's
                owner; or this is a callback on the group's own thread, which would wait for itself. The group is
                intact.
            CudaError: The call could not be ordered with the stream on which it was made; the group is broken.
            RuntimeError: The device's runtime refused to order the stream, as in a capture of which the call is no
                part, which is invalid then. The group is intact.
        """
        timeout_s = seconds(timeout_s)
        if not self.join(timeout_s):
            raise CommTimeoutError(
                f"{self._health.where(self._name)}: not complete within {timeout_s:.1f} s of waiting; it goes on",
                missing=(),
            )
        result = self._outcome()
        if self._mark is not None:
            self._mark.wait()
        return result

    def join(self, timeout_s: AnyTimeout = None) -> bool:
        """Wait until the call has succeeded or failed; return whether it did within `timeout_s` seconds."""
        self._health.check_owner(self._name)
        if not self._is_done:
            timeout_s = seconds(timeout_s)
            if getattr(_serving, "health", None) is self._health:
                raise UsageError(
                    f"{self._health.where(self._name)}: a callback of the group's own thread cannot wait for it"
                )
            # Ctrl-C interrupts a plain lock's acquire. It ends this wait, not the call. A signal that comes just before
            # the acquire sleeps interrupts nothing, so that its handler runs when the slice is over.
            end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
            while not self._done.acquire(timeout=max(0.0, min(SLICE_S, end_s - time.monotonic()))):
                if self._is_done:
                    # A signal handler has raised in another wait, behind its acquire: that one releases nothing.
                    return True
                if time.monotonic() >= end_s:
                    return False
            self._done.release()
        return True

    def is_completed(self) -> bool:
        """Return, without waiting, whether the call has succeeded. Raises as `wait` if it has failed.

        On an accelerator this is whether the device is done, and is not allowed while a stream is being captured.
        """
        self._health.check_owner(self._name)
        if not self._is_done:
            return False
        self._outcome()
        return self._mark is None or self._mark.is_reached()

    def failure(self) -> Exception | None:
        """Return the error of a call that has failed; None while it is in progress, and if it has succeeded.

        The device is not asked: this is allowed while a stream is being captured.
        """
        self._health.check_owner(self._name)
        return self._error if self._is_done else None

    @property
    def devices(self) -> list[int | str | torch.device]:
        """The devices whose streams a torch future for this call must order."""
        return [] if self._device.type == "cpu" else [self._device]

    def get_future(self) -> torch.futures.Future[Result]:
        """Return a torch future for the result. Its callbacks run on the group's own thread and must not wait.

        On an accelerator the caller's current stream is ordered behind the call, as by `wait`, and so is a stream that
        waits for the future. Where `wait` would raise, the future holds that error, also if it is asked for again.
        """
        self._health.check_owner(self._name)
        if self._future is None:
            future: torch.futures.Future[Result] = torch.futures.Future(devices=self.devices)
            # Nothing is called here, so that neither a signal handler nor another thread comes between.
            if self._future is None:
                self._future = future
        # This stores the future before it reads `_is_done`, and `finish` sets that before it reads the future: one
        # of them sees both.
        if self._is_done:
            self._resolve(self._future)
        return self._future

    def perform(self, aside: Aside | None = None) -> BaseException | None:
        """Make the call; return the exception that interrupted it, if any. Waiters see the end after `finish`.

        `aside` is where an accelerator carries it out.
        """
        call, self._call = self._call, None
        try:
            self._health.check_usable(self._name)
            if call is not None:
                with torch.inference_mode(self._inference):
                    if aside is None:
                        self._value = call()
                    else:
                        with aside.entered(call):
                            self._value = call()
                            self._mark = aside.mark(self._value)
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
            if self._health.is_closed and not isinstance(error, CommError):
                where = self._health.where(self._name)
                self._error = ClosedError(f"{where}: the group was destroyed while the call was in progress")
                self._error.__cause__ = error
        except BaseException as interruption:  # noqa: BLE001 - likewise
            where = self._health.where(self._name)
            self._error = GroupBrokenError(f"{where}: interrupted by {type(interruption).__name__}")
            self._error.__cause__ = interruption
            return interruption
        return None

    def finish(self) -> None:
        """Mark the call as ended and wake all waiters."""
        self._is_done = True
        future = self._future
        self._done.release()
        if future is not None:
            self._resolve(future)

    def _resolve(self, future: torch.futures.Future[Result]) -> None:
        """Complete the future, unless that is done, or another thread does so now."""
        try:
            try:
                self._unresolved.popleft()
            except IndexError as error:
                if raised_by_handler(error):
                    raise
                return
            self._complete(future)
        except BaseException:
            # A signal handler has raised: whoever asks for the future next completes it.
            if not future.done():
                self._unresolved.append(None)
            raise

    def _complete(self, future: torch.futures.Future[Result]) -> None:
        error: Exception | None = self._error
        with ExitStack() as streams:
            if error is None and self._mark is not None:
                try:
                    # The future records the streams that are current here.
                    streams.enter_context(self._mark.behind())
                except Exception as refusal:
                    if raised_by_handler(refusal):
                        raise
                    # The future raises it.
                    error = refusal
            try:
                if error is not None:
                    future.set_exception(error)  # type: ignore[arg-type] # its stub says the type of a result
                else:
                    future.set_result(self._value)
            except RuntimeError as completed:
                if raised_by_handler(completed):
                    raise
                # The application has completed the future itself. The other calls of the group must continue.
                logger.warning(
                    "%s: the application had completed its future already: %s",
                    *(self._name, completed),
                    extra=self._health.log_fields(self._name),
                )

    def _outcome(self) -> Result:
        if self._error is not None:
            raise self._error
        result: Result = self._value
        return result


# The health of the group whose calls the current thread makes.
_serving = threading.local()


class CallLine:
    """The asynchronous calls of one group, in the order in which they were submitted.

    Attributes:
        open: Calls that are not complete, oldest first. A blocking call only checks whether it is empty.
    """

    def __init__(
        self,
        health: GroupHealth,
        device: torch.device,
        *,
        is_alone: bool = False,
        aside: Aside | None = None,
    ) -> None:
        """Start no thread yet.

        Args:
            health: The group's shared state.
            device: The device of the group's tensors.
            is_alone: Whether this is a group of one: `submit` then makes every call itself.
            aside: Where an accelerator carries out calls; by default on its current stream.
        """
        self._health = health
        self._device = device
        current = None if device.type == "cpu" else OnCurrentStream(device)
        # A group of one has no work that could run beside the caller's.
        self._aside: Aside | None = current if is_alone else aside or current
        self._is_alone = is_alone
        self.open: deque[CallHandle[Any]] = deque()
        self._inbox: SimpleQueue[CallHandle[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        # A signal handler may make a call, or destroy the group, while this thread holds it.
        self._lock = threading.RLock()

    def submit(self, name: str, call: Callable[[], Result], *, at_once: bool = False) -> CallHandle[Result]:
        """Submit `call` behind all earlier ones; return its handle.

        Args:
            name: Name of the call, for errors.
            call: The function that makes the blocking call.
            at_once: Make the call here, because an accelerator carries it out and the host does not block.

        Raises:
            CapabilityError: This process can have no further thread. The call is not submitted, the group is intact.
            Others: As `GroupHealth.check_usable`.
        """
        handle = CallHandle(self._health, name, call, self._device)
        if at_once or self._is_alone:
            self.settle(name)
            self._health.check_usable(name)
            interruption = handle.perform(self._aside if at_once else None)
            handle.finish()
            if interruption is not None:
                raise interruption
            return handle
        with self._lock:
            self._health.check_usable(name)
            if self._thread is None:
                self._start()
            # Nothing is called from here to the end of `put`. So calls are open in the order in which the thread gets
            # them, each of them gets there, and none is queued behind the None that ends the thread.
            if not self._is_ending:
                self.open += (handle,)
                self._inbox.put(handle)
                return handle
        raise ClosedError(f"{self._health.where(name)}: the group was destroyed")

    def _start(self) -> None:
        """Start the thread, unless a signal handler that runs meanwhile starts one or ends them.

        Raises:
            CapabilityError: This process can have no further thread.
        """
        inbox: SimpleQueue[CallHandle[Any] | None] = SimpleQueue()
        thread = DaemonThread(self._serve, f"group-coordinator-{self._health.name}-calls", (inbox,))
        try:
            start_thread(thread, f"for the asynchronous calls of {self._health.name!r}")
        except BaseException:
            # If the thread runs nevertheless, this ends it. The next call tries again.
            inbox.put(None)
            raise
        # No function is called between this check and the assignment.
        if self._thread is None and not self._is_ending:
            self._thread, self._inbox = thread, inbox
        else:
            inbox.put(None)

    def follow(self, name: str, action: Callable[[], None]) -> None:
        """Run `action` behind all open calls: here if there are none, else without waiting.

        It takes at most about two seconds.
        """
        if not self.open or getattr(_serving, "health", None) is self._health:
            action()
            return
        # If the group has ended meanwhile, there is nothing left to keep in order.
        with tolerating(ClosedError, GroupBrokenError):
            self.submit(name, action)

    def settle(self, name: str, timeout_s: float | None = None) -> float | None:
        """Wait until no call is open, so that a blocking call keeps the order of calls on all ranks.

        Errors of those calls are raised by their handles.

        Returns:
            What is left of `timeout_s` for the blocking call.

        Raises:
            UsageError: This process is a forked child of the group's owner, or this is a callback of this thread. Or
                a call was still open after `timeout_s` seconds.
        """
        self._health.check_owner(name)
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                last = self.open[-1]
            except IndexError:
                return None if timeout_s is None else until(end)
            if not last.join(until(end)):
                raise without_place(self._health, name, BUSY)

    def close(self, timeout_s: float) -> None:
        """End the thread, within about `timeout_s` seconds; calls that are open end with `ClosedError`. Idempotent."""
        with self._lock:
            self._is_ending = True
            thread = self._thread
            if thread is not None:
                self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _serve(self, inbox: SimpleQueue[CallHandle[Any] | None]) -> None:
        _serving.health = self._health
        while (handle := inbox.get()) is not None:
            handle.perform()
            # Before `finish`, so that a woken waiter no longer finds this call open.
            self.open.popleft()
            handle.finish()
            # Do not keep the handle and its tensors alive while waiting for the next call.
            del handle
