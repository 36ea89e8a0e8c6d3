"""Rendezvous: how the processes of a world find each other. This is the only caller of `init_process_group`.

There are four methods: the environment of torchrun; an address given by the caller or by what `coordinator.launchers`
has read; on one host, a path; or a ticket of a driver (`coordinator.meeting`). This module never listens on a wildcard
address.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import torch.distributed as dist

from coordinator.bootstrap import fork_guard
from coordinator.bootstrap.agreement.agreeing import agree, declining
from coordinator.bootstrap.agreement.views import View
from coordinator.bootstrap.blocking_calls import connect_watched, pause_after, raise_if_lost, refuse_clones
from coordinator.bootstrap.connections import open_tcp_store
from coordinator.bootstrap.membership import loopback_hint, own_address
from coordinator.bootstrap.methods.address import (
    WORLD_KEYS,
    Rendezvous,
    check_place,
    leaving,
    meet_at_rank_0,
)
from coordinator.bootstrap.methods.directory import DirectoryRendezvous
from coordinator.bootstrap.secured import meet_by_hint, place_of, report_losses
from coordinator.bootstrap.timings import Stopwatch
from coordinator.host.process_groups import GLOO, LOOPBACK, GlooOptions, gloo_at, set_own_world
from coordinator.launchers.init_methods import FORMS
from coordinator.meeting.losses import forget_losses, listen_for_losses
from coordinator.meeting.offers import take
from coordinator.meeting.tickets import Ticket
from coordinator.security import store as secured_store
from coordinator.security.requirement import check_plaintext, has_secret
from coordinator.settings import CoordinatorSettings, LaunchEnvironment
from shm_broadcast.descriptors import check_spare
from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommTimeoutError,
    SettingsError,
    UsageError,
)
from shm_broadcast.interruption import is_held
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, fork_count, name_host, this_process
from shm_broadcast.threads import caller, owner_forks
from shm_broadcast.timeouts import as_timedelta


@dataclasses.dataclass
class _World:
    """The world that this process initialised."""

    group: dist.ProcessGroup
    rendezvous: Rendezvous
    fork_count: int
    processes: Mapping[int, ProcessIdentity]
    is_elastic: bool


@dataclasses.dataclass
class _Attempt:
    """A call of `init_world`, until its world is there, or nothing is left of it.

    Attributes:
        fork_count: That of the process which makes it.
        rendezvous: Once the ranks have met.
        has_failed: Whether the call ends without a world.
        is_connecting: Whether its thread is in torch, which nobody else may touch meanwhile.
        has_connected: Whether its thread was ever in torch; a world of torch's then belongs to this attempt.
    """

    fork_count: int
    rendezvous: Rendezvous | None = None
    has_failed: bool = False
    is_connecting: bool = False
    has_connected: bool = False


_world: _World | None = None
_attempt: _Attempt | None = None
_worlds = itertools.count()
# The lock is not held while waiting for other ranks, except for ranks that leave. It is reentrant because a
# signal handler that interrupts the end of a world may destroy the world too.
_lock = threading.RLock()
# The thread of an interrupted start leaves torch within milliseconds if the store answers. How long the next
# start waits for that, and how long the interrupted call itself does: Ctrl-C must interrupt within 0.2 s.
_END_S: Final = 2.0
_SETTLE_S: Final = 0.1


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread that the child does not have may hold it."""
    global _lock  # noqa: PLW0603 - a lock that is held cannot be released by another thread
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def init_world(
    world_size: int,
    rank: int,
    init_method: str,
    backend: str,
    settings: CoordinatorSettings,
    is_elastic: bool = False,
    spans_hosts: bool = False,
    ticket: Ticket | None = None,
) -> dict[str, float]:
    """Initialise torch.distributed for this process. Collective over the world.

    Blocks until every rank has joined; each of its steps for at most `settings.create_timeout_s`.

    Args:
        world_size: Number of processes; -1 takes it from the launcher's environment.
        rank: Global rank of this process; -1 takes it from the launcher's environment.
        init_method: `env://`, `tcp://HOST:PORT` where HOST is rank 0's address, or `file:///PATH` of a directory, a
            file, or nothing yet.
        backend: torch backend of the world's process group; for "gloo" this module chooses the address to listen on.
        settings: Deadlines and the network interface.
        is_elastic: Whether ranks may end and others join, rank 0 too: the store must be outside of the ranks.
        spans_hosts: Whether a launcher says that the processes are on several hosts. The master's address must then not
            be a loopback address.
        ticket: The place of this process in a meeting; it replaces the first three arguments.

    Returns:
        Seconds by phase of `CreationReport`.

    Raises:
        UsageError: The arguments contradict each other, torch.distributed is already initialised, or this process
            cannot listen at the address.
        SettingsError: The launcher's environment is missing or malformed, or the network interface cannot be used.
        CommTimeoutError: Ranks did not join in time; `.missing` names them.
        PeerLostError: A rank died meanwhile; `.peers` names it.
        DisagreementError: Ranks were started with different settings.
        CapabilityError: Ranks are on several hosts and one announced a loopback address.
        NativeError: torch could not connect, or the store is gone.
    """
    global _world, _attempt  # noqa: PLW0603 - torch has one world per process
    attempt, before = _Attempt(owner_forks()), caller.forks
    try:
        caller.forks = attempt.fork_count
        _begin(attempt)
        name_host(settings.host_id)
        clock = Stopwatch()
        with clock.phase("rendezvous"):
            attempt.rendezvous = rendezvous = (
                join_rendezvous(world_size, rank, init_method, settings, is_elastic, spans_hosts)
                if ticket is None
                else _meet_by_ticket(ticket, settings)
            )
        processes = _connect(attempt, rendezvous, backend, settings, clock, is_elastic)
        group = dist.group.WORLD
        assert group is not None
        fork_guard.protect(group)
        fork_guard.protect(rendezvous.store)
        _world = _World(group, rendezvous, attempt.fork_count, processes, is_elastic)
        _attempt = None
    except BaseException:
        attempt.has_failed = True
        end_interrupted(_SETTLE_S)
        raise
    finally:
        caller.forks = before
    return clock.seconds


def _begin(attempt: _Attempt) -> None:
    """Make `attempt` the one of this process.

    Raises:
        UsageError: There is a world, or another attempt that has not ended.
    """
    global _attempt  # noqa: PLW0603 - torch has one world per process
    end_interrupted()
    is_inside = is_held(_lock)  # true in a signal handler that interrupts the end of a world
    with _lock:
        if _is_joining() and _attempt is not None and _attempt.has_failed:
            raise UsageError(
                "the last initialisation of torch.distributed was interrupted, and its thread has not left torch yet: "
                "try again later"
            )
        if is_inside or _is_joining():
            raise UsageError(
                "a signal handler cannot initialise torch.distributed while that is begun or destroyed, nor can "
                "another thread"
            )
        if not _is_ours():
            leave_world()  # the end of the last world was interrupted, or others destroyed torch's
        if dist.is_initialized():
            raise UsageError("torch.distributed is already initialised; do not initialise it a second time")
        _attempt = attempt


def _is_joining() -> bool:
    """Return whether a call of `init_world` in this process has not ended, or left something in torch."""
    return _attempt is not None and _attempt.fork_count == fork_count()


def _finish(attempt: _Attempt) -> None:
    """Undo what an attempt that has failed has done. If this is interrupted, another call does the rest.

    Does nothing while the attempt's thread is in torch and uses the store; the thread calls this afterwards.
    """
    global _world, _attempt  # noqa: PLW0603 - torch has one world per process
    with _lock:
        if _attempt is not attempt or attempt.fork_count != fork_count() or attempt.is_connecting:
            return
        _world = None
        try:
            if attempt.has_connected and dist.is_initialized():
                fork_guard.release(dist.group.WORLD)
                dist.destroy_process_group()
        finally:
            _leave(attempt.rendezvous)
        _attempt = None


def _leave(rendezvous: Rendezvous | None) -> None:
    """Let go of everything but torch's world."""
    set_own_world(None)
    try:
        if rendezvous is not None:
            fork_guard.release(rendezvous.store)
            rendezvous.leave()
    finally:
        forget_losses()  # behind the end of a secured store, which tells of them


def end_interrupted(within_s: float = _END_S) -> None:
    """End what an `init_world` that was interrupted has left in torch, so that nobody takes it for a world of the user.

    Waits up to `within_s` seconds for the thread that is still in torch.
    """
    start = time.monotonic()
    while _is_joining() and (attempt := _attempt) is not None and attempt.has_failed:
        _finish(attempt)
        waited_s = time.monotonic() - start
        if attempt.is_connecting and waited_s >= within_s:
            return
        time.sleep(pause_after(waited_s))


def leave_world() -> None:
    """Destroy the world if this process initialised it through `init_world`; otherwise do nothing.

    An interrupt ends only the waits: all that can be released is released all the same, and another call or
    the next world does the rest. A signal handler may call this at any place, and a thread at any time;
    during `init_world` there is no world yet.
    """
    global _world  # noqa: PLW0603 - torch has one world per process
    end_interrupted()
    with _lock:
        world = _world
        if world is None or world.fork_count != fork_count():
            _world = None
            return
        if _is_joining():
            return  # the call of `init_world` has all but returned
        try:
            if _is_ours():
                dist.destroy_process_group()
        finally:
            fork_guard.release(world.group)
            _leave(world.rendezvous)
        _world = None


def world_processes() -> Mapping[int, ProcessIdentity]:
    """Return the ranks' processes by global rank; empty if `init_world` did not create the current world."""
    world = _world
    if world is None or not dist.is_initialized() or dist.group.WORLD is not world.group:
        return {}
    return world.processes


def world_fork_count() -> int | None:
    """Return the fork count of the process that created the current world; None if that was not `init_world`."""
    return _world.fork_count if _world is not None and _is_ours() else None


def is_started_elastic() -> bool:
    """Return whether `init_world` created the current world with `is_elastic`."""
    return _world is not None and _world.is_elastic and _is_ours()


def _is_ours() -> bool:
    return _world is not None and dist.is_initialized() and dist.group.WORLD is _world.group


atexit.register(leave_world)


def join_rendezvous(
    world_size: int,
    rank: int,
    init_method: str,
    settings: CoordinatorSettings,
    is_elastic: bool,
    spans_hosts: bool,
) -> Rendezvous:
    """Return the store in which the ranks meet. The arguments and errors are those of `init_world`."""
    parts = urlsplit(init_method)
    if is_elastic and has_secret(settings):
        raise UsageError(
            "elastic=True needs a store that outlives every rank, and with a secret rank 0 serves the store: "
            "use one of the two"
        )
    if parts.scheme == "env":
        return _meet_by_environment(world_size, rank, settings, is_elastic)
    path, endpoint = _path_of(parts), _endpoint_of(parts)
    if path is None and endpoint is None:
        raise UsageError(
            f"distributed_init_method is {init_method!r}, but must be env://, tcp://HOST:PORT, file:///DIRECTORY, "
            f"{FORMS}"
        )
    check_place(rank, world_size, init_method)
    if path is not None:
        rendezvous = DirectoryRendezvous(path, rank, world_size)
        try:
            store = rendezvous.join(settings.create_timeout_s)
            met = Rendezvous(store, rank, world_size, rendezvous.leave)
            return _behind_hint(met, rendezvous.generation, settings)
        except BaseException:
            rendezvous.leave()
            raise
    assert endpoint is not None
    if is_elastic:
        raise _ends_with_rank_0(init_method)
    return meet_at_rank_0(*endpoint, rank, world_size, settings, spans_hosts)


def join_later(init_method: str) -> tuple[dist.Store, Callable[[], None]]:
    """Return the store of the run that goes on at `file:///DIRECTORY`, and what leaves it.

    Raises:
        UsageError: It is no such URL, or no run goes on there.
    """
    path = _path_of(urlsplit(init_method))
    if path is None:
        raise UsageError(f"store is {init_method!r}, but must be a store or file:///DIRECTORY")
    rendezvous, forks = DirectoryRendezvous(path, -1, 0), fork_count()

    def leave() -> None:
        atexit.unregister(leave)
        if forks == fork_count():  # a forked child runs this at its end, too
            rendezvous.leave()

    try:
        store = rendezvous.join_later()
        atexit.register(leave)
    except BaseException:
        leave()
        raise
    return store, leave


def _ends_with_rank_0(init_method: str) -> UsageError:
    return UsageError(
        f"elastic=True needs a store that outlives every rank, and with {init_method} rank 0 serves it: use "
        "file:///DIRECTORY on one host, or initialise torch.distributed before with a store that another process serves"
    )


def _path_of(parts: SplitResult) -> Path | None:
    """Return the path of `file:///PATH`; None for other URLs, and for those with a host or a query."""
    path = Path(parts.path)
    if parts.scheme != "file" or parts.netloc or parts.query or parts.fragment or not path.is_absolute():
        return None
    return path


def _endpoint_of(parts: SplitResult) -> tuple[str, int] | None:
    """Return host and port of `tcp://HOST:PORT`, or None."""
    try:
        port = parts.port
    except ValueError:
        return None
    return (parts.hostname, port) if parts.scheme == "tcp" and parts.hostname and port else None


def _meet_by_environment(
    world_size: int, rank: int, settings: CoordinatorSettings, is_elastic: bool
) -> Rendezvous:
    launch = LaunchEnvironment.from_env(
        rank=None if rank == -1 else rank, world_size=None if world_size == -1 else world_size
    )
    if launch is None:
        raise SettingsError(
            "env:// reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, and no launcher has set "
            "them: start the processes with torchrun, or pass world_size, rank and "
            "distributed_init_method='file:///DIRECTORY'"
        )
    rank, world_size = launch.rank, launch.world_size
    check_place(rank, world_size, "env://")
    if is_elastic and not launch.use_agent_store:
        raise _ends_with_rank_0("env:// without an agent's store")
    host, port = launch.master_addr, launch.master_port
    run = f"{launch.run_id or 'run'}/{launch.restart_count}"
    if not launch.use_agent_store:
        # Rank 0's store is new for each world, so the prefix of its keys needs no number. With one, a rank
        # that once gave up before rank 0 joined would count differently from the others ever after.
        return meet_at_rank_0(host, port, rank, world_size, settings, run=run)
    # The agent's store is no secured one: with a secret it only holds the hint that leads to that.
    store = open_tcp_store(host, port, rank, world_size, serve=False, settings=settings, place=None)
    # It outlives worker restarts and is the same for every world of this process, so each world gets its own prefix.
    run = f"{run}/{next(_worlds)}"
    met = Rendezvous(dist.PrefixStore(run, store), rank, world_size, _nothing)
    return _behind_hint(met, run, settings, launch.agents > 1)


def _behind_hint(
    met: Rendezvous, run: str, settings: CoordinatorSettings, spans_hosts: bool = False
) -> Rendezvous:
    """Return the rendezvous in a job's secured store, to which that of `met` leads; without a secret, `met`.

    A loopback address of rank 0 is refused if `spans_hosts`.
    """
    rank, world_size = met.rank, met.world_size
    store: dist.Store | None = None
    try:
        place = place_of(settings, run, rank, world_size)
        if place is None:
            return met
        address = "" if rank else own_address(settings.interface, met.store, spans_hosts)
        store = meet_by_hint(place, met.store, address, settings, _nothing)
        leave_store = leaving(store, rank, world_size)

        def leave() -> None:
            try:
                leave_store()
            finally:
                met.leave()

        return Rendezvous(store, rank, world_size, leave)
    except BaseException:
        secured_store.close(store)
        met.leave()
        raise


def _meet_by_ticket(ticket: Ticket, settings: CoordinatorSettings) -> Rendezvous:
    """Use the ticket up, and return the store of its meeting, whose keys no rank of another meeting sees."""
    listener, rank, world_size = take(ticket), ticket.rank, ticket.world_size
    where = f"rendezvous (rank {rank} of {world_size})"
    store: dist.Store | None = None
    try:
        place = place_of(settings, f"meeting {ticket.meeting}", rank, world_size)
        with closing(PeerWatch(this_process(), {})) as watch:
            listen_for_losses(watch, range(world_size))
            check, host, port = partial(raise_if_lost, watch, where), ticket.host, ticket.port
            store = open_tcp_store(
                host, port, rank, world_size, rank == 0, settings, place, listener=listener, check=check
            )
        met = dist.PrefixStore(f"meeting/{ticket.meeting}", store)
        return Rendezvous(met, rank, world_size, leaving(met, rank, world_size))
    except BaseException:
        if listener is not None:
            listener.close()  # does nothing once the store has taken over the descriptor
        secured_store.close(store)
        raise


def _nothing() -> None:
    """Do nothing, where no cleanup or check is needed."""


def _connect(
    attempt: _Attempt,
    rendezvous: Rendezvous,
    backend: str,
    settings: CoordinatorSettings,
    clock: Stopwatch,
    is_elastic: bool,
) -> dict[int, ProcessIdentity]:
    """Agree on the facts of the world and create its process group; return the ranks' processes."""
    rank, ranks = rendezvous.rank, range(rendezvous.world_size)
    own = this_process()
    facts = {
        "world_size": str(rendezvous.world_size),
        "backend": backend,
        "elastic": str(is_elastic),
        **secured_store.generation_facts(rendezvous.store),
        **{f"setting {field}": str(value) for field, value in settings.agreed().items()},
    }
    world_store = dist.PrefixStore(WORLD_KEYS, rendezvous.store)
    near = report_losses(rendezvous.store)
    with declining(world_store, "the world", rank):
        # What is opened behind the agreement, when nobody could be told: torch's device, a watch, and the store's file.
        check_spare(7, "connects the world")
        address = own_address(settings.interface, rendezvous.store, rendezvous.spans_hosts)
    with closing(PeerWatch(own, {})) as reported, clock.phase("rendezvous"):
        listen_for_losses(reported, ranks)
        view = View(facts, own, address)
        try:
            views = agree(
                world_store, "the world", rank, ranks, view, settings.create_timeout_s, reported=reported
            )
        except CommTimeoutError as error:
            hint = loopback_hint(rendezvous.store, address)
            if not hint:
                raise
            raise CommTimeoutError(f"{error}{hint}", missing=error.missing) from error
    near.update(views.neighbours)
    check_plaintext(settings, rendezvous.store, views.spans_hosts, "the world")
    try:
        listening = views.listening_address(LOOPBACK)
    except CapabilityError as error:
        hint = loopback_hint(rendezvous.store, address)
        if not hint:
            raise
        raise UsageError(f"{error}{hint}") from error

    where = f"connecting the world (rank {rank} of {len(ranks)})"
    with closing(views.watch()) as watch, clock.phase("gloo"):
        refuse_clones(watch, where)
        listen_for_losses(watch, ranks)
        init = partial(_initialise, attempt, rendezvous, backend, settings, listening)
        connect_watched(init, "world", where, watch)
    return views.processes


def _initialise(
    attempt: _Attempt, rendezvous: Rendezvous, backend: str, settings: CoordinatorSettings, listening: str
) -> None:
    """Initialise torch.distributed, which listens at the address `listening`. Runs on a thread of its own."""
    # Either this sees that the call has failed, or `_finish` sees that this has begun.
    attempt.is_connecting = attempt.has_connected = True
    try:
        if attempt.has_failed:
            raise ClosedError("connecting the world: cancelled, the caller no longer waits")
        # The keys of the world are named by this number, which a start that has failed in torch has raised. No world is
        # there now that could use it.
        torch_world: Any = dist.distributed_c10d
        torch_world._world.group_count = 0
        # Lazy, because our groups do not use the world's process group: a connected mesh costs 5 to 15 ms at start
        # and a polling thread.
        with gloo_at(GlooOptions(listening, is_lazy=True)) if GLOO in backend else nullcontext():
            dist.init_process_group(
                backend,
                store=rendezvous.store,
                rank=rendezvous.rank,
                world_size=rendezvous.world_size,
                timeout=as_timedelta(settings.create_timeout_s),
            )
        set_own_world(dist.group.WORLD, listening)
    finally:
        attempt.is_connecting = False
        if attempt.has_failed:
            _finish(attempt)
