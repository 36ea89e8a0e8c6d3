"""One planned change on one rank: prepared by a thread, while the rank serves on."""

import threading
import time
from collections.abc import Sequence

from coordinator import CommError, ParallelGroups, UsageError
from coordinator.elastic import Plan

__all__ = ["PlannedChange"]


class PlannedChange:
    """Takes workers in that wait to join, or lets a replica leave. Every rank makes one at the same step.

    Attributes:
        error: Why it has failed; None otherwise. Set before `is_prepared`.
        seconds: How long the preparation has taken.
    """

    def __init__(self, groups: ParallelGroups, *, join: int = 0, leave: Sequence[int] = ()) -> None:
        """Begin to prepare.

        Args:
            groups: The groups that serve.
            join: How many workers join; equal on all ranks.
            leave: Ranks that leave; equal on all ranks.
        """
        self.error: CommError | None = None
        self.seconds = 0.0
        self._groups = groups
        self._join = join
        self._leave = tuple(leave)
        self._plan: Plan[ParallelGroups] | None = None
        self._thread = threading.Thread(target=self._prepare, name="planned-change", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        start_s = time.monotonic()
        try:
            self._plan = self._groups.prepare(join=self._join, leave=self._leave)
        except CommError as error:
            self.error = error
        self.seconds = time.monotonic() - start_s

    @property
    def is_prepared(self) -> bool:
        """Whether this rank has done its part, or has failed."""
        return not self._thread.is_alive()

    def commit(self) -> ParallelGroups | None:
        """Go over to the new groups, once all ranks have prepared; return None on a rank that leaves.

        Raises:
            DisagreementError: A rank has ended; the old groups serve on.
        """
        assert self._plan is not None
        return self._plan.commit()

    def give_up(self) -> None:
        """Wait until the preparation has ended, which it does soon if a rank has, and undo it."""
        self._thread.join()
        if self._plan is not None and self._plan.status().phase == "prepared":
            try:
                self._plan.abort()
            except UsageError as error:  # all had committed before: the next step meets who is gone
                self.error = self.error or error
