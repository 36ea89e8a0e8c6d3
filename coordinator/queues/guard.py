"""The guard of a group's queues: a death that one end finds breaks the group, so that every end learns of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from device_comm.health import EXPLAIN_S, FAILURE_IDLE_EVERY_S, GroupHealth, Operation
from shm_broadcast.errors import PeerLostError
from shm_broadcast.reports.log_fields import LogFields

# Calls that never wait here: they are made from event loops, which would stand still meanwhile.
_NEVER_WAIT: Final = ("adequeue", "try_dequeue")


class GroupQueueGuard:
    """A `QueueGuard` for the ends of one queue on this rank."""

    def __init__(self, health: GroupHealth, *, has_own_writer: bool) -> None:
        """Guard a queue of the group.

        Args:
            health: The group's shared state.
            has_own_writer: Whether the writer is a rank of the group. The death of a writer outside of the
                group leaves the group usable.
        """
        self._health = health
        self._has_own_writer = has_own_writer
        self._next_look_s = 0.0

    def log_fields(self) -> LogFields:
        """Return the group and this rank."""
        return self._health.log_fields()

    def look(self, call: str) -> None:
        """Break the group and raise if a rank is gone, or has published what broke the group."""
        operation = Operation("queue", call, 0)
        self._health.check_peers(operation)
        now = time.monotonic()
        if now >= self._next_look_s:
            self._next_look_s = now + FAILURE_IDLE_EVERY_S
            self._health.check_record(operation)

    def ended(self, call: str, *, by_writer: bool = False) -> None:
        """Raise the reason for which the queue was closed, if the group knows one.

        Either the writer's group broke before the writer closed its queue, or the writer's rank goes on in
        another epoch, without this rank.
        """
        if self._health.is_closed or self._health.is_inherited:
            return
        self._health.check_usable(call)
        operation = Operation("queue", call, 0)
        self._health.check_record(operation)
        self._raise_if_excluded(call)
        # The writer's rank may be the first to have found that a host has vanished, and the failure record
        # may be unreadable because its store was on that host.
        if by_writer and self._has_own_writer:
            self._check_others(operation, ())

    def failed(self, call: str, error: PeerLostError) -> None:
        """Break the group; raise if more ranks are lost than `error` names, or if this one is excluded."""
        if self._has_own_writer and not self._health.is_closed:
            self._raise_if_excluded(call)
            self._check_others(Operation("queue", call, 0), error.peers)
            self._health.fail(error, call)

    def _check_others(self, operation: Operation, named: Sequence[int]) -> None:
        """Break the group and raise if more ranks are gone than those that the queue has named.

        When a host vanishes, the queue's connection to one of its ranks may fail before the links find all of
        its ranks lost: they count only the time for which calls have looked at them. So this asks the hosts of
        the ranks in `named`, and waits while a link is in doubt, but for at most `EXPLAIN_S`, since a link to a
        third host may be in doubt for longer. The calls in `_NEVER_WAIT` do not wait here either.
        """
        watch, end = self._health.watch, time.monotonic()
        if operation.name not in _NEVER_WAIT:
            end += EXPLAIN_S
            for rank in named:
                watch.suspect(rank, "no answer from the host, to which the connection of a queue has failed")
        while True:
            # `is_in_doubt` comes first: it looks for lost ranks itself, and `lost` must see what it finds.
            is_over = not watch.is_in_doubt() or time.monotonic() >= end
            if not set(watch.lost()) <= set(named):
                self._health.check_peers(operation)
            if is_over:
                return
            time.sleep(0.02)

    def _raise_if_excluded(self, call: str) -> None:
        if (
            self._has_own_writer
            and (excluded := self._health.exclusion(self._health.where(call))) is not None
        ):
            self._health.fail(excluded, call)
            raise excluded


__all__ = ["GroupQueueGuard"]
