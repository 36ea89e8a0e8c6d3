"""Collectives that go on while their caller computes: the calls of a group in line, carried out by one thread.

A call is a blocking one that another thread makes: it lets go of the interpreter while it copies, combines and waits.
All that holds for the blocking form holds here, as it is the same code: bits, deadlines, blame.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from device_comm import checks
from device_comm.health import GroupHealth
from shm_broadcast.errors import ClosedError, CommError, CommTimeoutError, GroupBrokenError, UsageError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class CallHandle(Generic[Result]):
    """A collective in progress; owns the memory that it reads and writes.

    May be waited for by any thread and more than once, or dropped: the call goes on, and is kept by its group.
    """

    def __init__(
        self, health: GroupHealth, name: str, call: Callable[[], Result], device: torch.device
    ) -> None:
        """Begin nothing yet."""
        self._health = health
        self._name = name
        self._call: Callable[[], Result] | None = call
        self._device = device
        self._inference = torch.is_inference_mode_enabled()
        # Results are read by threads that did not make them; `_done` is held until there is one.
        self._done = threading.Lock()
        self._done.acquire()
        self._guard = threading.Lock()
        self._is_done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._future: torch.futures.Future[Result] | None = None

    def wait(self, timeout_s: float | None = None) -> Result:
        """Return the result as soon as it is there; raise what the blocking call would have raised.

        Args:
            timeout_s: How long this wait may take, in seconds; the call has its own deadline, stated when it began.

        Raises:
            CommTimeoutError: `timeout_s` has passed. The call goes on, the group is intact, and the handle can be
                waited for again. Or the call's own deadline has passed: then `.missing` names who did not come, and
                the group is broken.
            PeerLostError: A peer is gone; the group is broken.
            ClosedError: The group was destroyed meanwhile.
            UsageError: The call was refused, and nothing was sent; or this process is a forked child of the group's
                owner; or this is a callback of the group's own thread, which would wait for itself.
        """
        if not self.join(timeout_s):
            raise CommTimeoutError(
                f"{self._health.where(self._name)}: not complete within {timeout_s:.1f} s of waiting; it goes on",
                missing=(),
            )
        return self._outcome()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the call, however it ends; return whether it came within `timeout_s` seconds."""
        self._health.check_owner(self._name)
        if not self._is_done:
            checks.check_timeout(timeout_s)
            if getattr(_serving, "health", None) is self._health:
                raise UsageError(
                    f"{self._health.where(self._name)}: a callback of the group's own thread cannot wait for it"
                )
            # In an ordinary lock, which Ctrl-C interrupts: that ends this wait, not the call.
            if not self._done.acquire(
                timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
            ):
                return False
            self._done.release()
        return True

    def is_completed(self) -> bool:
        """Return whether the result is there, without waiting. Raises as `wait`."""
        self._health.check_owner(self._name)
        if self._is_done:
            self._outcome()
        return self._is_done

    def get_future(self) -> torch.futures.Future[Result]:
        """Return a future of torch for the result; its callbacks run on the group's own thread, and may not wait."""
        self._health.check_owner(self._name)
        with self._guard:
            future = self._future
            if future is None:
                devices: list[int | str | torch.device] = [] if self._device.type == "cpu" else [self._device]
                future = self._future = torch.futures.Future(devices=devices)
                if not self._is_done:
                    return future
            else:
                return future
        self._resolve(future)
        return future

    def perform(self) -> BaseException | None:
        """Carry the call out; return what interrupted it, if anything did. Nobody sees the end before `finish`."""
        call, self._call = self._call, None
        try:
            self._health.check_usable(self._name)
            if call is not None:
                with torch.inference_mode(self._inference):
                    self._value = call()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
            if self._health.is_closed and not isinstance(error, CommError):
                where = self._health.where(self._name)
                self._error = ClosedError(f"{where}: the group was destroyed while the call was under way")
                self._error.__cause__ = error
        except BaseException as interruption:  # noqa: BLE001 - the same
            where = self._health.where(self._name)
            self._error = GroupBrokenError(f"{where}: interrupted by {type(interruption).__name__}")
            self._error.__cause__ = interruption
            return interruption
        return None

    def finish(self) -> None:
        """Wake who waits."""
        with self._guard:
            self._is_done = True
            future = self._future
        self._done.release()
        if future is not None:
            self._resolve(future)

    def _resolve(self, future: torch.futures.Future[Result]) -> None:
        try:
            if self._error is not None:
                future.set_exception(self._error)  # type: ignore[arg-type] # its stub says the type of a result
            else:
                future.set_result(self._value)
        except RuntimeError as error:
            # Whoever holds it has completed it already; the other calls of the group must go on.
            logger.warning("%s: its future was completed by somebody else: %s", self._name, error)

    def _outcome(self) -> Result:
        if self._error is not None:
            raise self._error
        result: Result = self._value
        return result


# Whose calls the present thread carries out.
_serving = threading.local()


class CallLine:
    """The asynchronous calls of one group, in the order in which they were made.

    Attributes:
        open: Calls that are not complete, oldest first; empty is false, which is all that a blocking call asks.
    """

    def __init__(self, health: GroupHealth, device: torch.device, *, is_alone: bool = False) -> None:
        """Start no thread yet.

        Args:
            health: The group's shared state.
            device: Where the group's tensors live.
            is_alone: There is nobody to wait for, so every call is made at once.
        """
        self._health = health
        self._device = device
        self._is_alone = is_alone
        self.open: deque[CallHandle[Any]] = deque()
        self._inbox: SimpleQueue[CallHandle[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, name: str, call: Callable[[], Result], *, at_once: bool = False) -> CallHandle[Result]:
        """Let `call` be made behind all earlier ones; return its handle.

        Args:
            name: Of the call, for errors.
            call: Makes it, and blocks.
            at_once: It blocks nobody, as an accelerator carries it out: make it here.
        """
        handle = CallHandle(self._health, name, call, self._device)
        if at_once or self._is_alone:
            self.settle(name)
            self._health.check_usable(name)
            interruption = handle.perform()
            handle.finish()
            if interruption is not None:
                raise interruption
            return handle
        with self._lock:
            # In here, as nothing may stand in line behind the end of the thread.
            self._health.check_usable(name)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._serve, name=f"group-coordinator-{self._health.name}-calls", daemon=True
                )
                thread.start()
                # Not before: where no thread can be started, the next call tries again.
                self._thread = thread
            self.open.append(handle)
            self._inbox.put(handle)
        return handle

    def settle(self, name: str) -> None:
        """Wait until no call is open, so that one which does not stand in line keeps the order on all ranks.

        What is wrong with those calls is raised by their handles.

        Raises:
            UsageError: This process is a forked child of the group's owner, or this is a callback of this thread.
        """
        self._health.check_owner(name)
        while True:
            try:
                last = self.open[-1]
            except IndexError:
                return
            last.join()

    def close(self, timeout_s: float) -> None:
        """End the thread, within about `timeout_s` seconds; calls that are open end with `ClosedError`. Idempotent."""
        with self._lock:
            thread = self._thread
            if thread is not None:
                self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _serve(self) -> None:
        _serving.health = self._health
        while (handle := self._inbox.get()) is not None:
            handle.perform()
            # First, so that who was woken finds the line as it is.
            self.open.popleft()
            handle.finish()
            # A thread that waits for more keeps nothing alive.
            del handle
