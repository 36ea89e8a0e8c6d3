"""One planned change on one rank: prepared by a thread, while the rank serves on."""

import threading
import time

from coordinator import CommError, ParallelGroups, UsageError
from coordinator.elastic import Plan

__all__ = ["Growth"]


class Growth:
    """Takes workers in that wait to join. Every rank makes one at the same step.

    Attributes:
        error: Why it has failed; None otherwise. Set before `is_prepared`.
        seconds: How long the preparation has taken.
    """

    def __init__(self, groups: ParallelGroups, joining: int) -> None:
        """Begin to prepare.

        Args:
            groups: The groups that serve.
            joining: How many workers join; equal on all ranks.
        """
        self.error: CommError | None = None
        self.seconds = 0.0
        self._groups = groups
        self._joining = joining
        self._plan: Plan[ParallelGroups] | None = None
        self._thread = threading.Thread(target=self._prepare, name="growth", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        start_s = time.monotonic()
        try:
            self._plan = self._groups.prepare(join=self._joining)
        except CommError as error:
            self.error = error
        self.seconds = time.monotonic() - start_s

    @property
    def is_prepared(self) -> bool:
        """Whether this rank has done its part, or has failed."""
        return not self._thread.is_alive()

    def commit(self) -> ParallelGroups:
        """Go over to the new groups, once all ranks have prepared.

        Raises:
            DisagreementError: A rank has ended; the old groups serve on.
        """
        assert self._plan is not None
        groups = self._plan.commit()
        assert groups is not None  # nobody leaves
        return groups

    def give_up(self) -> None:
        """Wait until the preparation has ended, which it does soon if a rank has, and undo it."""
        self._thread.join()
        if self._plan is not None and self._plan.status().phase == "prepared":
            try:
                self._plan.abort()
            except UsageError as error:
                self.error = self.error or error
