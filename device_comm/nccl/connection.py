"""One NCCL communicator from its creation to its end, and the thread that watches it.

NCCL's calls only queue work. When a peer dies, the kernel spins for ever and the host blocks in some call of torch,
which does not watch processes. Each connected communicator therefore has a *keeper*: a thread that checks, every
`KEEP_EVERY_S`, the peers' processes, the communicator's asynchronous error, and calls that make no progress. A failure
breaks the group; the keeper then aborts the communicator, which ends the kernels. On an orderly close the keeper
finalizes it. Whatever interrupts the caller of `close`, the keeper goes on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from device_comm.base import CommunicatorContext
from device_comm.health import ANNOUNCE_AFTER_S, Operation
from device_comm.nccl.agreement import agree, first_trouble
from device_comm.nccl.background import Background, Joining
from device_comm.nccl.library import IN_PROGRESS, SUCCESS, NcclLibrary, init_function, new_config
from device_comm.nccl.streams import Progress, Streams
from device_comm.nccl.window import Window, Wish
from shm_broadcast.errors import (
    ClosedError,
    CommError,
    InternalError,
    NcclError,
)
from shm_broadcast.reports.log_fields import LogFields
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import DONE, FAILED, NOBODY
from shm_broadcast.status.shown_calls import StatusLane
from shm_broadcast.threads import DaemonThread

logger: logging.Logger = logging.getLogger(__name__)

# Interval of the keeper's checks. A dead peer is noticed in under a second, and an idle group costs four checks of
# about 10 us per second.
KEEP_EVERY_S: Final = 0.25
# If NCCL_COMM_BLOCKING=0 makes communicators non-blocking, NCCL works in the background, and the caller polls it with a
# pause that doubles from the first to the last value. `settle` waits in slices of 0.1 s, and in each of them the pause
# begins with the first value again: 15 polls a slice.
FIRST_POLL_S: Final = 0.0002
LAST_POLL_S: Final = 0.01
# How often such a communicator is asked whether it is finalized.
FINALIZE_POLL_S: Final = 0.002
# The keeper gives queued calls FLUSH_S to complete and the library to finalize. `close` waits FLUSH_S for the
# keeper, and then ABORT_S for the abort of a communicator that was not flushed.
FLUSH_S: Final = 3.0
ABORT_S: Final = 3.0
# How long an abort waits for a call that has just been entered, which returns within microseconds. One that blocks in
# NCCL is ended by the abort, so waiting longer for it would be in vain.
CALL_S: Final = 0.2
# How long the end of an aborted communicator waits until nothing queued uses the window.
IDLE_S: Final = 1.0


class Call(NamedTuple):
    """A call in progress.

    Attributes:
        name: The operation, for texts.
        peers: Global ranks that it waits for; None for a collective, where the status store shows who is missing.
        within_s: Its deadline in seconds; None for no deadline.
    """

    name: str
    peers: tuple[int, ...] | None
    within_s: float | None


class NcclConnection:
    """One NCCL communicator: connect, watch, close.

    Attributes:
        hot: The handle as an argument for calls; None if a call must not take the fast path: not connected,
            broken, closed, in a forked child, or while calls are collected.
        entered: How many calls have been entered. A call writes `entered` before it reads `hot`, and an abort clears
            `hot` before it reads `entered`, so no call uses a handle that is being freed.
        returned: The value of `entered` of the last call that has left the library.
        transfers: How many of the entered calls were point to point.
        call: The last call entered.
        everyone: The `call` of a fast all-reduce.
        lane: Where the status page shows calls until they are queued; a replay of a graph is not shown.
        window: The window that sums are staged through, None if there is none; equal on all ranks.
        no_window: Why there is none, equal on all ranks.
    """

    def __init__(
        self,
        context: CommunicatorContext,
        library: NcclLibrary,
        streams: Streams,
        progress: Progress | None,
        wish: Callable[[], Wish | None] = lambda: None,
    ) -> None:
        """Prepare; send nothing. `wish` is asked for this rank's window before connecting; None is for none."""
        if context.exchange is None:
            raise InternalError(f"{context.name!r}: NCCL needs the host plane's exchange to agree on an id")
        self.library = library
        self.context = context
        self.progress = progress
        self.hot: ctypes.c_void_p | None = None
        self.entered: int = 0
        self.returned: int = 0
        self.transfers: int = 0
        self.call: Call = Call("connect", None, context.timeout_s)
        self.everyone: Call = Call("all_reduce", None, context.timeout_s)
        self.window: Window | None = None
        self.no_window: str = "the ranks are not connected yet"
        self._wish = wish
        # The window from its allocation to its end, and the thread that registers it.
        self._memory: Window | None = None
        self._registration: Background | None = None
        self._health = context.health
        self._streams = streams
        self._comm = 0
        self._handle: ctypes.c_void_p | None = None
        self._closed = False
        self._aborting = False
        # Whether the keeper is inside of a call of the library that only the library itself can end.
        self._is_inside = False
        self._settling = False
        self._asking = threading.Lock()
        self._wake = threading.Event()
        # The thread, and an event that it sets at its end: before Python 3.13 a thread counts as ended once a
        # `join` of it was interrupted.
        self._keeper: tuple[threading.Thread, threading.Event] | None = None
        self._seen, self._since = 0, 0.0
        self.lane: StatusLane = self._health.shown.queued_lane("nccl", "nccl")
        self._health.on_abort(self._on_abort)
        _connections.add(weakref.ref(self, _connections.discard))

    # ------------------------------------------------------------------ connecting

    @property
    def is_connected(self) -> bool:
        """Return whether the communicator exists and has not been aborted or closed."""
        return self._handle is not None and not self._aborting and not self._closed

    def connect(self) -> None:
        """Connect all ranks, unless connected. Collective; blocks until all have called, up to the group's deadline.

        Raises:
            DisagreementError: The ranks have different versions of NCCL; the group is intact.
            NcclError: NCCL failed; the text quotes it. The group is intact if a root could not create its id, else
                broken.
            CommTimeoutError: A rank did not call; the group is broken.
            GroupBrokenError: Another rank could not register its window.
            ClosedError: Another thread has closed this meanwhile; what was joined is aborted.
        """
        self._health.check_usable("connect")
        if self.is_connected:
            return
        wish = self._wish()
        unique_ids, obstacle = agree(self.context, self.library, wish)
        with self.calling(Call("connect", None, self.context.timeout_s)):
            status = self._join(unique_ids)
            # If `close` came before, it found no keeper; this one aborts what was joined.
            self._start_keeper()
            self._refuse_closed()
            self.settle(init_function(unique_ids), status)
            self._open_window(wish, obstacle)
        self._handle = ctypes.c_void_p(self._comm)
        self._refuse_closed()
        self.rearm()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._health.where('connect')}: the communicator was closed meanwhile")

    def _start_keeper(self) -> None:
        ended = threading.Event()
        name = f"group-coordinator-nccl {self.context.name}"
        keeper = DaemonThread(self._keep, name, (ended,))
        try:
            keeper.start()
        except BaseException:
            # Nobody else would free the communicator. If the thread runs nevertheless, one of the two does.
            self._aborting = True
            self._wake.set()
            self._end()
            raise
        self._keeper = keeper, ended

    def _join(self, unique_ids: tuple[bytes, ...]) -> int:
        """Join the communicator of `unique_ids` on a thread, and keep it; return the library's status."""
        size, rank = self.context.world_size, self.context.rank_in_group
        join = partial(self.library.init_rank, size, unique_ids, rank, new_config())
        operation = self._operation()
        look = partial(self._health.check_leavers, operation)
        joining = Joining(self.library, self._streams, join, look, self._fields("connect"))
        try:
            self._health.wait(operation, joining, self.context.timeout_s)
            joining.raise_error(lambda error: self._health.explain(operation, error, None))
            self._comm = joining.take()
        except BaseException:
            joining.give_up()
            raise
        return joining.status

    # ------------------------------------------------------------------ the window

    def _open_window(self, wish: Wish | None, obstacle: str) -> None:
        """Allocate and register the window, or note why all ranks go without. Collective unless there is an obstacle.

        A rank that cannot allocate, or gets no window, is an obstacle for all. A failure of NCCL in registering breaks
        the group, because it says nothing of the other ranks.
        """
        if wish is not None and wish.copy is not None and not obstacle:
            memory = self._memory = Window(self.library, wish.nbytes, wish.copy)
            with self._streams.on_device():
                trouble = memory.allocate()
            obstacle = first_trouble(self.context, trouble)
            if not obstacle:
                self._register(memory)
                trouble = (
                    "" if memory.is_registered else "NCCL declined the window; NCCL_DEBUG=INFO may say why"
                )
                obstacle = first_trouble(self.context, trouble)
            if not obstacle:
                self.window = memory
            else:
                self._warn("connect", f"no symmetric window: {obstacle}")
                self._leave_window(self._comm)
                self._free_window(is_used=False)
        self.no_window = obstacle

    def _register(self, memory: Window) -> None:
        self._refuse_closed()
        operation = self._operation()
        look = partial(self._health.check_leavers, operation)
        call = partial(memory.register, self._comm)
        registration = self._registration = Background(self._streams, "register", call, look)
        self._health.wait(operation, registration, self.context.timeout_s)
        registration.raise_error(lambda error: self._health.explain(operation, error, None))
        self.settle("ncclCommWindowRegister", registration.status)

    def _leave_window(self, comm: int) -> None:
        """Deregister the window. No queued call may use it: NCCL unmaps the peers' memory."""
        if self._memory is not None:
            try:
                self._memory.deregister(comm)
            except NcclError as error:
                self._warn("destroy", error)

    def _free_window(self, *, is_used: bool) -> None:
        """Free the window's memory. If it `is_used`, wait for `IDLE_S`, then leave it to the end of the process."""
        memory, self._memory, self.window = self._memory, None, None
        if memory is None:
            return
        deadline = time.monotonic() + IDLE_S
        while is_used and self._is_window_in_use():
            if time.monotonic() >= deadline:
                self._warn("destroy", "the window is in use and stays until the process ends")
                return
            time.sleep(LAST_POLL_S)
        try:
            memory.free()
        except NcclError as error:
            self._warn("destroy", error)

    def _is_window_in_use(self) -> bool:
        return not self._is_quiet() or (self._registration is not None and not self._registration.is_over)

    def handle(self) -> ctypes.c_void_p:
        """Return the handle of a connected communicator. Raises as `check_usable`."""
        handle = self._handle
        if handle is None or self._aborting or self._closed:
            self._health.check_usable("a call")
            raise InternalError(f"{self._health.where('a call')}: the communicator is not connected")
        return handle

    def rearm(self) -> None:
        """Allow the fast path again."""
        self.hot = self._handle
        if self._aborting or self._closed:
            self.hot = None

    # ------------------------------------------------------------------ calling

    @contextmanager
    def calling(self, call: Call, nbytes: int = 0, root: int = NOBODY) -> Iterator[None]:
        """Count a call, so that the keeper can see it and give it a deadline.

        `nbytes` is what this rank brings, and `root` a place in the group; the status page shows both.
        """
        self.call = call
        if call.peers is not None:
            self.transfers += 1
        # Nothing is called from here to the `try`: a handler that strikes would leave the call entered for ever.
        self.entered += 1
        outcome = FAILED
        try:
            self.lane.begin(kind_of(call.name), self.number, nbytes, root)
            yield
            outcome = DONE
        finally:
            self.returned = self.entered
            self.lane.end(outcome)

    @property
    def number(self) -> int:
        """Return the number of the last call entered among those that all ranks make; 0 for one between two ranks."""
        return self.entered - self.transfers if self.call.peers is None else 0

    def _operation(self) -> Operation:
        return Operation("nccl", self.call.name, self.number)

    def _fields(self, call: str) -> LogFields:
        return self._health.log_fields(call, "nccl")

    def _warn(self, call: str, what: object) -> None:
        logger.warning("%s: %s", self._health.where(call), what, extra=self._fields(call))

    def settle(self, function: str, status: int) -> None:
        """Finish a call that returned a nonzero `status`: wait while NCCL works in the background, or raise."""
        if status == IN_PROGRESS:
            within_s = self.call.within_s or self.context.timeout_s
            self._settling = True
            try:
                self._health.wait(
                    self._operation(), _Polled(self, partial(self._poll_state, function)), within_s
                )
            finally:
                self._settling = False
        elif status:
            raise self.failed(function, status)

    def failed(self, function: str, status: int) -> CommError:
        """Break the group; return the error to raise for a status."""
        error = self.library.error(function, status, 0 if self._aborting else self._comm)
        return self._health.explain(self._operation(), error, self.call.peers)

    def state(self, function: str) -> int:
        """Return 0 or `IN_PROGRESS`; after a failure in the background, break the group and raise."""
        with self._asking:
            if self._aborting or not self._comm:
                raise self.failed(function, 6)
            state = self.library.async_error(self._comm)
        if state not in (0, IN_PROGRESS):
            raise self.failed(f"{function}, asynchronously", state)
        return state

    # ------------------------------------------------------------------ watching

    def _keep(self, ended: threading.Event) -> None:
        try:
            while not self._wake.wait(KEEP_EVERY_S):
                try:
                    self._look()
                except CommError as error:
                    # The failure breaks the group, so the next call raises it.
                    logger.warning("%s", error, extra=self._fields(self.call.name))
                    # A group that is closing reports no failure: a failure record would end the peers' calls in flight.
                    if not self._health.is_broken and not self._health.is_closed:
                        self._health.fail(error)
            self._end()
        finally:
            ended.set()

    def _look(self) -> None:
        number = self.entered
        is_busy = self.returned != number or (self.progress is not None and not self.progress.is_done())
        if self._settling:
            return
        operation = self._operation()
        self._health.check_peers(operation)
        if is_busy:
            self._health.check_leavers(operation)
        if self._handle is None:
            return
        self.state("ncclCommGetAsyncError")
        now = time.monotonic()
        if not is_busy or number != self._seen:
            self._seen, self._since = number, now
            return
        within_s = self.call.within_s
        if now - self._since < ANNOUNCE_AFTER_S:
            return
        left_s = None if within_s is None else max(within_s - (now - self._since), 0.001)
        self._health.wait(operation, _Polled(self, partial(self._poll_progress, number)), left_s)

    def _poll_state(self, function: str, slice_s: float) -> bool:
        """Wait up to `slice_s` while NCCL works in the background; return whether it is done."""
        end = time.monotonic() + slice_s
        pause = FIRST_POLL_S
        while self.state(function) == IN_PROGRESS:
            left = end - time.monotonic()
            if left <= 0:
                self._health.check_leavers(self._operation())
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 2, LAST_POLL_S)
        return True

    def _poll_progress(self, number: int, slice_s: float) -> bool:
        """Wait up to `slice_s`; return whether call `number` is past. Called by the keeper."""
        if not self._is_past(number):
            self._wake.wait(slice_s)
        if self._is_past(number):
            return True
        self._health.check_leavers(self._operation())
        self.state("ncclCommGetAsyncError")
        return False

    def _is_past(self, number: int) -> bool:
        """Return whether call `number` is complete or followed by another, or the keeper is to stop."""
        if self._wake.is_set() or self.entered != number:
            return True
        return self.returned == number and (self.progress is None or self.progress.is_done())

    def _on_abort(self) -> None:
        # On an orderly close, the keeper flushes the queued calls; they must not be aborted here.
        if self._health.is_broken:
            self.hot = None
            self._aborting = True
            self._wake.set()

    # ------------------------------------------------------------------ leaving

    def close(self) -> None:
        """Wait for queued calls and free the communicator, or abort it. Idempotent; waits for at most 6 s.

        If a signal handler raises meanwhile, all is done nevertheless, and the next call waits for it.
        """
        if self._health.is_inherited:
            return
        self._closed = True
        self.hot = None
        if self._health.is_broken:
            self._aborting = True
        self._wake.set()
        if self._comm and (self._keeper is None or self._keeper[1].is_set()):
            # `connect` was interrupted before it started a keeper or is about to, or the keeper failed.
            self._start_keeper()
        if self._keeper is None:
            return
        keeper, ended = self._keeper
        if not self._aborting:
            ended.wait(FLUSH_S)
        if not self._is_inside:
            ended.wait(ABORT_S)
        if ended.is_set():
            keeper.join(ABORT_S)
        else:
            self._warn("destroy", "NCCL has not freed its communicator yet")
        self._keeper = None

    def await_abort(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until the keeper of a broken group has aborted the communicator; it does so by itself.

        The keepers of several groups abort at the same time, as they must: an abort waits for the device, and
        so for kernels of the other groups, which only the aborts of those groups end (NVIDIA/nccl#564).
        """
        if self._aborting and self._keeper is not None and not self._health.is_inherited:
            self._keeper[1].wait(timeout_s)

    def _end(self) -> None:
        """Free the communicator behind its queued calls, or abort it. Blocks as long as NCCL does.

        The thread that takes the communicator is the only one that queries or frees it from then on. So it is
        never aborted while another thread finalizes it, nor queried once it was freed.
        """
        with self._asking:
            comm, self._comm = self._comm, 0
        if not comm:
            return
        deadline = time.monotonic() + FLUSH_S
        try:
            with self._streams.on_device():
                if self._drain(deadline) and self._finalize(comm, deadline):
                    self._is_inside = True
                    self._free("ncclCommDestroy", comm)
                    self._free_window(is_used=False)
                    return
            if not self._aborting:
                self._warn("destroy", f"not flushed within {FLUSH_S:.0f} s")
        except CommError as error:
            self._warn("destroy", error)
        finally:
            self._is_inside = False
        self._aborting = True
        self._await_call()
        if self._is_quiet():
            self._leave_window(comm)
        self._free("ncclCommAbort", comm)
        self._free_window(is_used=True)

    def _drain(self, deadline: float) -> bool:
        """Wait until the queued calls are complete; return whether they are, so that finalizing waits for none."""
        while not self._aborting and self._handle is not None and self.returned == self.entered:
            self._health.check_peers(Operation("nccl", "destroy", 0))
            if self.progress is None or self.progress.is_done():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(LAST_POLL_S)
        return False

    def _finalize(self, comm: int, deadline: float) -> bool:
        """Finalize the communicator; return False if that is too late, or the group breaks."""
        self._is_inside = True
        self._leave_window(comm)
        status = self.library.call("ncclCommFinalize", comm, comm=comm)
        self._is_inside = False
        while status == IN_PROGRESS and not self._aborting and time.monotonic() < deadline:
            self._health.check_peers(Operation("nccl", "destroy", 0))
            time.sleep(FINALIZE_POLL_S)
            status = self.library.async_error(comm)
        if status not in (SUCCESS, IN_PROGRESS):
            raise self.library.error("ncclCommFinalize, asynchronously", status, comm)
        # Freeing the communicator may wait for other ranks. An abort does not.
        return status == SUCCESS and not self._aborting and time.monotonic() < deadline

    def _is_quiet(self) -> bool:
        """Return whether no call is in the library and all marked work is complete."""
        return self.returned == self.entered and (self.progress is None or self.progress.is_done())

    def _await_call(self) -> None:
        """Wait for a call that has just been entered, so that its handle is not freed while it is in use."""
        deadline = time.monotonic() + CALL_S
        while self.returned != self.entered and not self._settling and time.monotonic() < deadline:
            time.sleep(0.001)

    def _free(self, function: str, comm: int) -> None:
        """Call `function`, which frees the communicator. Nobody touches it from then on, even if it fails."""
        try:
            self.library.call(function, comm)
        except NcclError as error:
            self._warn("destroy", error)


class _Polled:
    """A call of the library that `poll` waits for; see `Pollable`."""

    def __init__(self, connection: NcclConnection, poll: Callable[[float], bool]) -> None:
        self.poll = poll
        self._connection = connection

    def pending(self) -> Sequence[int] | None:
        return self._connection.call.peers


# A connection that is collected is taken out by a callback that runs no Python code: Python would drop what a signal
# handler raises in one that does.
_connections: set[weakref.ref[NcclConnection]] = set()


def _disarm() -> None:
    """Disable the fast path in a forked child: the handles belong to the parent."""
    for reference in list(_connections):
        if (connection := reference()) is not None:
            connection.hot = None


os.register_at_fork(after_in_child=_disarm)

__all__ = ["Call", "NcclConnection"]
