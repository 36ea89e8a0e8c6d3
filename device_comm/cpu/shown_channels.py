"""Show in the status page which channels a rank has opened."""

from __future__ import annotations

from device_comm.health import GroupHealth
from shm_broadcast.segment import Segment
from shm_broadcast.status.page import own_page


class ShownChannels:
    """What the status page shows of one rank's channels; others read from there how far their readers are."""

    def __init__(self, segment: Segment, health: GroupHealth, rank_in_group: int) -> None:
        """Show nothing yet.

        Args:
            segment: Holds the channels; owned by somebody else.
            health: The group's shared state.
            rank_in_group: This process's position.
        """
        self._segment = segment
        self._health = health
        self._rank = rank_in_group
        self._page = own_page()
        self._places: list[int | None] = []

    def show(self, src: int, dst: int, offset: int) -> None:
        """Show this rank's end of the channel from `src` to `dst`, ranks in the group, at `offset` in the segment."""
        ranks = self._health.ranks
        name = f"{self._health.name} {ranks[src]} to {ranks[dst]}"
        reader = -1 if src == self._rank else 0
        self._places.append(self._page.add_queue(name, self._segment, offset, reader))

    def hide(self) -> None:
        """Show nothing any more. Idempotent."""
        while self._places:
            self._page.remove_queue(self._places.pop())
