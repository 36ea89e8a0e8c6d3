"""A barrier over the store that names the ranks that do not come, and leaves the group usable.

It needs no transport, so it works while the group's other calls hang. Rank 0 of the group counts who has come, and
writes the outcome, which the others read.
"""

from __future__ import annotations

import functools
import threading
import time
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from coordinator.bootstrap.agreement.agreeing import ANSWER_S
from coordinator.bootstrap.blocking_calls import pause_after, run_interruptibly, torch_error
from device_comm.health import GroupHealth, Operation
from shm_broadcast.errors import ClosedError, CommTimeoutError
from shm_broadcast.interruption import raised_by_handler

_NAME: Final = "monitored_barrier"
_PASSED: Final = "passed"


def wait(store: dist.Store, health: GroupHealth, within_s: float, *, wait_all_ranks: bool) -> None:
    """Return once every rank of the group has called this. Collective.

    Args:
        store: A store whose keys are used by this barrier only.
        health: The group's shared state.
        within_s: Deadline in seconds.
        wait_all_ranks: Whether the error on rank 0 names all missing ranks, and not only the first.

    Raises:
        CommTimeoutError: On rank 0 of the group, ranks did not come in time; `.missing` names them. On the others, rank
            0 did not let them pass. The group stays usable.
        PeerLostError: A rank is gone; the group is broken.
        NativeError: The store is gone.
    """
    rank, size = health.ranks.index(health.rank), len(health.ranks)
    if size == 1:
        return
    barrier = _Barrier(store, health, rank, within_s, wait_all_ranks)
    try:
        run_interruptibly(barrier.count if rank == 0 else barrier.pass_through, _NAME, barrier.check)
    except RuntimeError as error:
        if raised_by_handler(error):
            raise
        raise torch_error(
            f"{health.where(_NAME)}: lost the connection to the store: {error}", "Store"
        ) from error
    finally:
        barrier.stop.set()


class _Barrier:
    """One rank's part in one barrier. The waits run on a thread of their own, because a store may hang."""

    def __init__(
        self, store: dist.Store, health: GroupHealth, rank: int, within_s: float, wait_all_ranks: bool
    ) -> None:
        self._store = store
        self._health = health
        self._rank = rank
        self._within_s = within_s
        self._wait_all_ranks = wait_all_ranks
        self._started = time.monotonic()
        self.stop = threading.Event()

    def check(self) -> None:
        """Raise if a rank died, or if the store hangs. Runs on the caller's thread."""
        self._health.check_usable(_NAME)
        self._health.check_peers(Operation("host", _NAME, 0))
        if time.monotonic() > self._started + self._within_s + ANSWER_S:
            raise CommTimeoutError(f"{self._health.where(_NAME)}: the store did not answer in time")

    def _waited_s(self) -> float:
        return time.monotonic() - self._started

    def _pause(self) -> None:
        if self.stop.wait(pause_after(self._waited_s())):
            raise ClosedError(f"{self._health.where(_NAME)}: cancelled, the caller no longer waits")

    def count(self) -> None:
        """Wait for the other ranks, and tell them the outcome."""
        missing = list(range(1, len(self._health.ranks)))
        ms = round(self._within_s * 1000)
        while True:
            missing = [other for other in missing if not self._store.check([f"arrived/{other}"])]
            if not missing:
                self._store.set("outcome", _PASSED)
                return
            if self._waited_s() >= self._within_s:
                break
            self._pause()
        self._store.set("outcome", "failed")
        where = self._health.where(_NAME)
        named = missing if self._wait_all_ranks else missing[:1]
        listed = ", ".join(str(other) for other in named)
        if self._within_s <= 0:
            text = f"Rank 0 timed out in monitoredBarrier after {ms} ms, before rank {listed} came"
        else:
            text = f"Rank{'s' if len(named) > 1 else ''} {listed} failed to pass monitoredBarrier in {ms} ms"
        raise CommTimeoutError(f"{where}: {text}", missing=[self._health.ranks[other] for other in missing])

    def pass_through(self) -> None:
        """Tell rank 0 that this rank has come, and wait for the outcome."""
        self._store.set(f"arrived/{self._rank}", "1")
        while not self._store.check(["outcome"]):
            if self._waited_s() >= self._within_s:
                break
            self._pause()
        else:
            if self._store.get("outcome").decode() == _PASSED:
                return
        raise CommTimeoutError(
            f"{self._health.where(_NAME)}: Rank {self._rank} successfully reached monitoredBarrier, "
            "but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )


def _timedelta(timeout: timedelta | float) -> timedelta:
    """Return the timeout; torch's function also takes seconds."""
    return timedelta(seconds=timeout) if isinstance(timeout, float) else timeout


def offer(backend: str) -> None:
    """Let `torch.distributed.monitored_barrier` take groups of `backend`; it refuses all but Gloo's. Idempotent."""
    torch_world: Any = dist.distributed_c10d
    original = torch_world.monitored_barrier
    torch_class: Any = dist.ProcessGroup
    if getattr(original, "group_coordinator", False):
        return

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        if torch_world._rank_not_in_group(group):  # noqa: SLF001 - torch has no public equivalent
            return original(group, timeout, wait_all_ranks)
        chosen = torch_world._get_default_group() if group is None else group  # noqa: SLF001 - likewise
        is_torchs = type(chosen) is torch_class
        # A group that is presented as a process group has our backend's name, and no monitored barrier.
        has_none = not is_torchs and type(chosen).monitored_barrier is torch_class.monitored_barrier
        if has_none or backend not in str(dist.get_backend(chosen)):
            return original(group, timeout, wait_all_ranks)
        within = torch_world.default_pg_timeout if timeout is None else timeout
        # Between hosts torch's class has Gloo inside, which it does not take for Gloo under our name.
        there: Any = chosen._get_backend(torch.device("cpu")) if is_torchs else chosen  # noqa: SLF001
        return there.monitored_barrier(_timedelta(within), wait_all_ranks=wait_all_ranks)

    vars(monitored_barrier)["group_coordinator"] = True
    torch_world.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


__all__ = ["offer", "wait"]
