"""Run the agreement on members on a store: this rank's part in it, with clocks, processes and groups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import (
    UNREADABLE,
    ask_store,
    pause_after,
    refuse_inherited,
    unreadable,
)
from coordinator.elastic import protocol
from coordinator.elastic.ending import TELL_S
from coordinator.elastic.protocol import (
    Build,
    Choose,
    Chosen,
    Dead,
    Discard,
    Get,
    Judge,
    Pause,
    Put,
    Steps,
    Swap,
    TearDown,
    Tell,
)
from shm_broadcast.errors import (
    CapabilityError,
    CommError,
    CommTimeoutError,
    GroupBrokenError,
    InternalError,
    NativeError,
    PeerLostError,
    UsageError,
)
from shm_broadcast.interruption import raised_by_handler, tolerating
from shm_broadcast.liveness import fork_count
from shm_broadcast.threads import caller
from shm_broadcast.timeouts import AnyTimeout, seconds

__all__ = ["Actions", "Deadlines", "Driver", "ask", "finite_seconds"]

# Errors of a creation that follow, or may follow, from members that are gone or silent: another attempt goes
# on without these. Connections of libraries (`NativeError`) break before a process is known to have ended.
_OTHERS: Final = (PeerLostError, CommTimeoutError, GroupBrokenError, NativeError)


class Actions(Protocol):
    """What the agreement has this rank do besides asking the store."""

    def dead(self) -> frozenset[int]:
        """Return the members whose processes have provably ended."""

    def choose(self, alive: tuple[int, ...]) -> Chosen | None:
        """Return the next members and their layout; None if too few wait to join."""

    def judge(self, chosen: Chosen, notes: Mapping[int, str]) -> str:
        """Return why this rank cannot go on with what was chosen, or an empty text."""

    def tear_down(self) -> None:
        """Let nothing of the last epoch run any more; `build` frees it. Idempotent."""

    def build(self, number: int, members: tuple[int, ...]) -> None:
        """Create the groups of these members. Raises `CommError` if that fails."""

    def discard(self) -> None:
        """Destroy what `build` has made. Idempotent."""


def finite_seconds(timeout_s: AnyTimeout, default_s: float) -> float:
    """Return the time-out of a change of members in seconds; None is `default_s`.

    Raises:
        UsageError: It is not positive, or not finite: the others read it, and a change ends for all by its deadline.
    """
    found = seconds(timeout_s)
    if found is None:
        return default_s
    if math.isinf(found):
        raise UsageError("timeout_s must be finite in a change of members")
    return found


class Deadlines:
    """How long an agreement may wait.

    Attributes:
        silent_s: For members that are neither there nor known to have ended, before the others go on without them.
        step_s: For a member to do its part of a step.
        all_s: For enough members to come.
    """

    def __init__(self, timeout_s: float) -> None:
        """Divide `timeout_s`, which must be equal on all ranks."""
        self.all_s: float = timeout_s
        self.silent_s: float = min(timeout_s / 3, 5.0)
        self.step_s: float = timeout_s / 3


class Driver:
    """This rank's part in one agreement."""

    def __init__(
        self, store: dist.Store, me: int, actions: Actions, deadlines: Deadlines, where: str
    ) -> None:
        """Ask nothing yet.

        Args:
            store: A store whose keys only the agreements of one line of epochs use.
            me: This member.
            actions: What else is to be done.
            deadlines: Equal on all ranks.
            where: Begins the texts of errors.
        """
        self._store = store
        self._me = me
        self._actions = actions
        self._deadlines = deadlines
        self._where = where
        self._began = time.monotonic()
        # When this rank first paused in each step of each attempt.
        self._since: dict[tuple[int, str], float] = {}
        # Whether this rank was interrupted, and only tells the others.
        self._is_leaving = False
        self._forks = fork_count()

    def run(self, steps: Steps) -> Any:
        """Go through one of the programs of `protocol`; return what it returns.

        An exception that interrupts this is thrown into the program, which then tells the other members.

        Raises:
            UsageError: This process is a forked child, which a signal handler has made while this waited.
            CommTimeoutError: The store does not answer.
            NativeError: The store is gone, or holds what no member has written.
        """
        before = caller.forks
        try:
            caller.forks = self._forks
            try:
                return self._follow(steps, partial(steps.send, None))
            except BaseException as error:
                # A program that has already ended raises the error again at once. In a child that a signal handler has
                # forked there is nothing to tell: the agreement is its parent's.
                if self._forks == fork_count():
                    self._follow(steps, partial(steps.throw, error))
                raise
        except UNREADABLE as error:
            if raised_by_handler(error):
                raise
            raise unreadable(self._where, error) from error
        finally:
            caller.forks = before

    def _follow(self, steps: Steps, begin: Callable[[], protocol.Operation]) -> Any:
        try:
            wants = begin()
            while True:
                wants = steps.send(self._do(wants))
        except StopIteration as stop:
            return stop.value

    def _do(self, wants: protocol.Operation) -> Any:
        refuse_inherited(self._where, self._forks)
        if isinstance(wants, Tell):
            self._is_leaving = True
        if isinstance(wants, (Put, Get, Swap, Tell)):
            return self._ask(wants)
        if isinstance(wants, Dead):
            return self._actions.dead()
        if isinstance(wants, Pause):
            return self._pause(wants)
        if isinstance(wants, Choose):
            return self._actions.choose(wants.alive)
        if isinstance(wants, Judge):
            return self._actions.judge(wants.chosen, wants.presences)
        if isinstance(wants, TearDown):
            return self._actions.tear_down()
        if isinstance(wants, Build):
            return self._build(wants)
        if isinstance(wants, Discard):
            return self._actions.discard()
        raise InternalError(f"{self._where}: there is no operation {wants!r}")

    def _build(self, wants: Build) -> str:
        try:
            self._actions.build(wants.number, wants.members)
        except CommError as error:
            if raised_by_handler(error):
                raise
            reason = str(error) or type(error).__name__
            return protocol.LOST + reason if isinstance(error, _OTHERS) else reason
        return ""

    def _ask(self, wants: Put | Get | Swap | Tell) -> Any:
        question = partial(_answer, self._store, wants)
        if not self._is_leaving:
            return ask_store(question, self._where, self._deadlines.all_s)
        with tolerating(CapabilityError, CommTimeoutError, NativeError):  # what has interrupted it is raised
            return ask_store(question, self._where, TELL_S)
        return None

    def _pause(self, wants: Pause) -> int:
        now = time.monotonic()
        since = self._since.setdefault((wants.number, wants.step), now)
        waited = now - since
        time.sleep(pause_after(waited))
        limits = self._deadlines
        if wants.step in ("members", "invited"):
            if now - self._began >= limits.all_s:
                return 2
            return 1 if waited >= limits.silent_s else 0
        return 2 if waited >= limits.step_s else 0


def ask(store: dist.Store, steps: Steps, where: str, timeout_s: float) -> Any:
    """Go through a program that does nothing but ask the store; return what it returns.

    Raises:
        CommTimeoutError: The store does not answer a question within `timeout_s`.
        NativeError: The store is gone, or holds what no member has written.
    """
    answer: Any = None
    while True:
        try:
            wants = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        except UNREADABLE as error:
            if raised_by_handler(error):
                raise
            raise unreadable(where, error) from error
        answer = ask_store(partial(_answer, store, wants), where, timeout_s)


def _answer(store: dist.Store, wants: protocol.Operation) -> Any:
    if isinstance(wants, Put):
        return store.set(wants.key, wants.value)
    if isinstance(wants, (Swap, Tell)):
        return store.compare_set(wants.key, "", wants.value).decode()
    if not isinstance(wants, Get):
        raise InternalError(f"{wants!r} is no question to the store")
    there = [key for key in wants.keys if store.check([key])]
    return {key: store.get(key).decode() for key in there}
