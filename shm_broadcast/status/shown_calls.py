"""Show in the status page what those calls of a group do that are not made wholly in native code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from shm_broadcast._core import StatusLane, StatusWaits
from shm_broadcast.errors import CommError
from shm_broadcast.status.failure_dump import Broken
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import GroupState
from shm_broadcast.status.page import GroupStatus, own_page

__all__ = ["WAITS", "ShownCalls", "StatusLane"]

WAITS: Final = " waits"
"""The end of the name of a lane that shows waits only. A numbered call that waits there is shown in the lane of its
plane too; a call between two ranks is shown nowhere else."""

_WAITING: Final = "waiting"


class _Call(Protocol):
    @property
    def plane(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def lane(self) -> StatusLane | None: ...


class _Work(Protocol):
    def pending(self) -> Sequence[int] | None: ...


Call = TypeVar("Call", bound=_Call)
Work = TypeVar("Work", bound=_Work)


def _epoch_of(name: str) -> int:
    """Return the epoch of a group such as `tp:0@3`; the first one has none in its name."""
    epoch = name.rpartition(":")[2].partition("@")[2]
    return int(epoch) if epoch.isdecimal() else 0


class _Lanes(dict[str, StatusLane]):
    """The lanes of the collectives of a group's planes, each made when it is first asked for."""

    def __init__(self, status: GroupStatus) -> None:
        """Make lanes of the group that has this record."""
        self._status = status
        # Those of the planes that are no process group.
        self.algorithms: dict[str, str] = {}

    def __missing__(self, plane: str) -> StatusLane:
        lane = self[plane] = self._status.lane(plane, self.algorithms.get(plane, "process group"))
        return lane


class _Waits(dict[str, StatusWaits]):
    """Where each plane shows the waits of calls between two ranks, of which threads may make several at once."""

    def __init__(self, status: GroupStatus, places: dict[int, int]) -> None:
        """Make lanes of the group that has this record; `places` has the place of each global rank in it."""
        self._status = status
        self._places = places

    def __missing__(self, plane: str) -> StatusWaits:
        made = StatusWaits(partial(self._status.lane, f"{plane}{WAITS}", _WAITING), self._places)
        return self.setdefault(plane, made)  # another thread may have made one meanwhile


class ShownCalls:
    """What the status page shows of one group in this process.

    Attributes:
        status: The group's record, and its lanes in native code.
        lanes: Where the collectives of each plane are shown, one at a time. Looking a plane up makes its lane.
    """

    def __init__(self, name: str, place: int, ranks: Sequence[int]) -> None:
        """Show the group `name`, in which this process has place `place` of the global `ranks`."""
        self.status: GroupStatus = own_page().group(name, place, ranks, _epoch_of(name))
        self._ranks, self._place = tuple(ranks), place
        self.lanes: _Lanes = _Lanes(self.status)
        # Planes whose native code shows its waits itself.
        self._native: set[str] = set()
        self._waits: _Waits = _Waits(self.status, {rank: at for at, rank in enumerate(self._ranks)})

    def carry(self, plane: str, algorithm: str) -> None:
        """Show `algorithm` for the collectives of `plane`, not "process group"; for use before the first."""
        self.lanes.algorithms[plane] = algorithm

    def native_lane(self, plane: str, algorithm: str) -> StatusLane:
        """Return where native code shows the collectives of `plane`, and its waits in them."""
        self._native.add(plane)
        return self.status.lane(plane, algorithm)

    def queued_lane(self, plane: str, algorithm: str) -> StatusLane:
        """Return where calls of `plane` are shown that end when they are queued on a device.

        Waits for the device are shown beside them, as they may go on while the next call is queued.
        """
        return self.status.lane(plane, algorithm)

    def wait(
        self,
        call: Call,
        work: Work,
        timeout_s: float | None,
        wait: Callable[[Call, Work, float | None], None],
    ) -> None:
        """Call `wait(call, work, timeout_s)`, and show meanwhile that this rank waits for the ranks `work.pending()`.

        A collective that Python code makes has the lane of its plane. A call between two ranks is shown only while it
        waits, and so is a wait for calls that are queued on a device. If a signal handler raises after the wait, what
        has come is not lost: the waiting caller keeps it.
        """
        plane, number = call.plane, call.number
        if number:
            lane = call.lane
            if lane is not None:
                lane.asleep(wait, call, work, timeout_s)
                return
            if plane in self._native:
                wait(call, work, timeout_s)
                return
        self._waits[plane].show(kind_of(call.name), number, work.pending(), wait, call, work, timeout_s)

    def broken(
        self,
        cause: BaseException,
        failure: Broken | None = None,
        state: Callable[[int], str] | None = None,
    ) -> None:
        """Show that the group is broken, and write a dump if the page is in a file.

        The text of an error that is not ours may hold data, and is not shown.

        Args:
            cause: The error.
            failure: What the ranks have agreed on.
            state: Returns the state of the process of a global rank.
        """
        self.status.set_state(
            GroupState.BROKEN, str(cause) if isinstance(cause, CommError) else type(cause).__name__
        )
        if self.status.is_dumped and state is not None:
            others = {rank: state(rank) for rank in self._ranks if rank != self._ranks[self._place]}
            self.status.dump(cause, failure, others)
