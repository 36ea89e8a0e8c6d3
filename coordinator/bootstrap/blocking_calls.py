"""Run calls that block in C++ on a thread, so that the caller notices Ctrl-C and dead peers while it waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final, TypeVar

import msgspec
import torch

from device_comm.health import EXPLAIN_S, SLICE_S
from shm_broadcast.errors import CommTimeoutError, NativeError, PeerLostError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.liveness import PeerWatch, fork_count
from shm_broadcast.threads import DaemonThread, owner_forks, start_thread

Result = TypeVar("Result")

# Asking a store takes 5 to 40 us.
_FIRST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.02
_PART_OF_WAIT: Final = 0.125

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises if a store holds what no rank has written."""

# Threads that run a call, also those for which an interrupted caller no longer waits.
_running: Final[set[threading.Thread]] = set()


def run_interruptibly(
    action: Callable[[], Result],
    name: str,
    check: Callable[[], None],
    release: Callable[[Result], None] | None = None,
) -> Result:
    """Run `action` on a thread, and wait for it while watching for Ctrl-C and dead peers.

    Args:
        action: The blocking call.
        name: Name of the thread.
        check: Called about ten times a second. An exception from it ends the wait; the thread then runs on
            until the action's own deadline, and its result is dropped.
        release: Called with a result that is dropped, on either thread.

    Returns:
        What `action` returned.

    Raises:
        CapabilityError: This process can have no further thread.
        UsageError: This process is a forked child, which a signal handler has made while this waited, or in the
            creation of which this is a part. `action` does not run in it.
        Exception: What `action` or `check` raises.
    """
    outcome: Future[Result] = Future()
    is_dropped, forks = False, owner_forks()

    def body(outcome: Future[Result]) -> None:
        # If the caller was interrupted before this thread began, this sees it; else `finish_calls` sees this thread.
        _running.add(threading.current_thread())
        try:
            if not is_dropped:
                refuse_inherited(name, forks)
                outcome.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
            outcome.set_exception(error)
        finally:
            del outcome
            _running.discard(threading.current_thread())

    def drop(dropped: Future[Result]) -> None:
        if release is not None and dropped.exception() is None:
            release(dropped.result())

    try:
        thread = DaemonThread(body, f"group-coordinator-{name}", (outcome,))
        start_thread(thread, f"for {name!r}")
        while True:
            # In a child that a handler has forked meanwhile the thread has not begun.
            refuse_inherited(name, forks)
            thread.join(0.1)
            # Before the next look: in such a child the thread does not run, and has not ended either.
            has_ended = not thread.is_alive()
            refuse_inherited(name, forks)
            if has_ended:
                return outcome.result()
            check()
    except BaseException:
        is_dropped = True
        # In a forked child the thread of the parent may hold the lock of `outcome`.
        if forks == fork_count():
            outcome.add_done_callback(drop)  # now, or once there is a result
        raise
    finally:
        # An error in `outcome` refers to both frames, and so keeps the caller's store alive until the garbage
        # collector runs. A rank that tries again would find its own port in use.
        del outcome


def refuse_inherited(name: str, forks: int) -> None:
    """Raise `UsageError` if a handler has forked this process in the call `name`, which began at count `forks`."""
    if forks != fork_count():
        raise UsageError(
            f"{name!r} belongs to the process that forked this one; a forked child must create its own groups, "
            "or be started with spawn"
        )


def pause_after(waited_s: float) -> float:
    """Return how many seconds to pause before a store is asked again, after a wait of `waited_s` seconds so far.

    It is an eighth of the wait, so an answer is noticed at most that much late; between 0.2 and 20 ms.
    """
    return min(max(waited_s * _PART_OF_WAIT, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)


def torch_error(text: str, function: str) -> NativeError:
    """Return the error for a failure of `function` of torch.distributed."""
    return NativeError(text, library=f"torch {torch.__version__}", function=function)


def unreadable(where: str, error: Exception) -> NativeError:
    """Return the error for a store's value that could not be decoded."""
    return torch_error(
        f"{where}: the world's store holds a value that no rank of this version has written: {error}", "Store"
    )


def no_check() -> None:
    """Raise nothing, where nothing is known that could end a wait."""


def ask_store(
    question: Callable[[], Result], where: str, timeout_s: float, check: Callable[[], None] = no_check
) -> Result:
    """Query a store whose serving process may be stopped or gone.

    Args:
        question: The query.
        where: Prefix of an error's text.
        timeout_s: How long to wait for the answer, in seconds.
        check: Called about ten times a second; what it raises ends the wait.

    Raises:
        CommTimeoutError: The store did not answer.
        NativeError: The store is gone, or holds what no rank has written.
        CapabilityError: This process can have no further thread.
    """
    end = time.monotonic() + timeout_s

    def check_all() -> None:
        check()
        if time.monotonic() >= end:
            raise CommTimeoutError(f"{where}: the world's store did not answer within {timeout_s:.1f} s")

    try:
        return run_interruptibly(question, "store", check_all)
    except UNREADABLE as error:
        if raised_by_handler(error):
            raise
        raise unreadable(where, error) from error
    except RuntimeError as error:
        if raised_by_handler(error):
            raise
        raise torch_error(f"{where}: lost the connection to the world's store: {error}", "Store") from error


def finish_calls(timeout_s: float) -> None:
    """Wait until no thread of `run_interruptibly` is left in this process, for at most `timeout_s` seconds.

    A thread whose caller was interrupted may still query a store, even one that is gone.
    """
    end = time.monotonic() + timeout_s
    for thread in list(_running):
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(end - time.monotonic(), 0.0))


def raise_if_lost(watch: PeerWatch, where: str) -> None:
    """Raise `PeerLostError` if a watched process has ended; `where` begins the error's text."""
    lost = watch.lost()
    if lost:
        named = ", ".join(f"{rank} ({watch.describe(rank)})" for rank in lost)
        raise PeerLostError(f"{where}: lost rank(s) {named}{clone_hint(watch, lost)}", peers=lost)


def refuse_clones(watch: PeerWatch, where: str) -> None:
    """Raise `PeerLostError` if a rank that has just agreed seems to have ended, and may be on a clone of this host.

    Otherwise the next call that waits for that rank, whichever it is, would report the rank as dead.
    """
    if clone_hint(watch, watch.lost()):
        raise_if_lost(watch, where)


def clone_hint(watch: PeerWatch, ranks: Iterable[int]) -> str:
    """Return the end of an error's text that says how hosts with one boot id can start; "" if there are none.

    A process on a clone of this host seems to have ended: here its number is free or another process's.
    """
    names = watch.twin_hosts(ranks)
    if not names:
        return ""
    return (
        f"; host {socket.gethostname()} and {', '.join(names)} report one boot id: if they are clones of one machine, "
        "set GROUP_COORDINATOR_HOST_ID to another value on each"
    )


def connect_watched(
    action: Callable[[], Result],
    name: str,
    where: str,
    watch: PeerWatch,
    check: Callable[[], None] | None = None,
) -> Result:
    """Run `action`, which connects to peers, on a thread; stop waiting when a peer dies.

    Args:
        action: The blocking call.
        name: Name of the thread.
        where: Prefix of an error's text.
        watch: The peers to watch.
        check: Called about ten times a second, also for a while once it has failed; an exception from it ends the wait.

    Raises:
        PeerLostError: A peer died meanwhile; `.peers` names it.
        NativeError: torch could not connect, though every peer is alive.
        CapabilityError: This process can have no further thread.
    """

    def check_both() -> None:
        raise_if_lost(watch, where)
        if check is not None:
            check()

    try:
        return run_interruptibly(action, name, check_both)
    except RuntimeError as error:
        if raised_by_handler(error):
            raise
        # torch raises this when a connection is refused or its own timeout passes. A dying peer's sockets close
        # some milliseconds before its process appears dead, so look for a while before blaming torch. A peer
        # that was interrupted lives on; it published that before it closed its sockets.
        until = time.monotonic() + EXPLAIN_S
        while time.monotonic() < until:
            time.sleep(SLICE_S)
            check_both()
        raise torch_error(f"{where}: {error}{clone_hint(watch, watch.peers)}", "new_group") from error
