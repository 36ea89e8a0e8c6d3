"""One rank's calls on memory that it shares with other ranks: how a call is waited for, and why it cannot be done."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from device_comm import _core
from device_comm.health import GroupHealth, Operation
from device_comm.stages import BUSY, NESTED, without_place
from shm_broadcast.errors import ClosedError, CommError, DisagreementError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.reports.arrivals import Arrival
from shm_broadcast.status.shown_calls import StatusLane

# How long a thread pauses between tries while another one is in a call. Engines call from one thread.
_TURN_S: Final = 0.0005

_OPERATIONS: Final = ("SUM", "MEAN", "PRODUCT", "MIN", "MAX")
_KINDS: Final = (
    *("barrier", "all_reduce", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather"),
    *("scatter", "all_to_all", "reduce"),
)
_REDUCING: Final = frozenset({"all_reduce", "reduce_scatter", "reduce"})
# Calls that are refused before they have a place in the order of calls.
_WITHOUT_PLACE: Final = {_core.BUSY: BUSY, _core.NESTED: NESTED}
_ROOTED: Final = frozenset({"broadcast", "gather", "scatter", "reduce"})


class RegionCalls:
    """One rank's end of the shared memory of its group, or of those of its ranks that are on one host."""

    def __init__(
        self, plane: str, core: _core.SharedRegion, health: GroupHealth, ranks: Sequence[int] | None = None
    ) -> None:
        """Use `Preparation.map` or `connect_part`.

        Args:
            plane: Name of the plane in the status store, where ranks tell which of its calls they have come to.
            core: This rank's end.
            health: The group's shared state.
            ranks: Global ranks that share the memory, ascending in the group; None for all of the group.
        """
        self.core = core
        self._plane = plane
        self._health = health
        self._ranks = health.ranks if ranks is None else tuple(ranks)
        self._is_part = ranks is not None
        self.lane: StatusLane = health.shown.native_lane(plane, "shared memory")
        core.report_to(self.lane.capsule())
        health.on_abort(self.close)
        health.attach(plane, self)

    def last_calls(self) -> dict[int, Arrival]:
        """Return the last call that each rank has come to, by global rank; see `Plane`.

        Empty for the memory of one of several hosts, which knows only the steps of which calls consist.
        """
        if self._is_part:
            return {}
        calls = zip(self._ranks, self.core.last_calls(), strict=False)
        return {rank: Arrival(_name(call[1]), call[0]) for rank, call in calls if call is not None}

    def close(self) -> None:
        """Leave the region. Idempotent; calls that wait, here and elsewhere for this rank, end."""
        self.core.close(self._health.is_broken)

    def all_gather_bytes(self, name: str, own: bytes, timeout_s: float) -> memoryview:
        """Return every rank's bytes one after the other; all ranks bring the same number."""
        world_size = len(self._ranks)
        result = bytearray(len(own) * world_size)
        if own:
            # The source is copied, the target is not; both live until the call is done.
            source = (ctypes.c_char * len(own)).from_buffer_copy(own)
            target = (ctypes.c_char * len(result)).from_buffer(result)
            widths = (len(own),) * world_size
            addresses = ctypes.addressof(source), ctypes.addressof(target)
            begin = partial(self.core.move, _core.ALL_GATHER, *addresses, 1, widths, 0, 0, 0)
            self.make(name, begin, timeout_s)
            del target
        return memoryview(result)

    def make(self, name: str, begin: Callable[[], int], timeout_s: float) -> None:
        """Make a whole call.

        Args:
            name: The name of the call.
            begin: Begins it and returns a status; also again, if it has to wait for the call of another thread.
            timeout_s: Deadline of the call in seconds.

        Raises:
            What a signal handler raises: As it is; the group is broken if the call has begun and is not complete.
            Others: As `finish`.
        """
        try:
            status = begin()
            if status == _core.BUSY:
                end = time.monotonic() + timeout_s
                # In this function, where `unwind` recognises what `begin` raises.
                while (status := begin()) == _core.BUSY and time.monotonic() < end:
                    time.sleep(_TURN_S)
                timeout_s = max(end - time.monotonic(), 0.0)
            if status != _core.DONE:
                self.finish(name, status, timeout_s)
        except BaseException as error:
            self.unwind(name, error, self.core.leave())
            raise

    def unwind(self, name: str, error: BaseException, left: int) -> None:
        """Break the group if `error`, which ends a caller of `core`, leaves a call unfinished; refuse one not begun.

        An exception of a signal handler does so if it strikes after a call has begun and before the wait for
        it. All methods of the group and of the communicator deal with such an exception here.

        Args:
            name: The name of the call.
            error: The exception.
            left: What `core.leave()` returned. It must be called before anything else, so that nothing comes
                between the exception and the mark; if another exception strikes in here, the next call then
                breaks the group.
        """
        if not left:
            traceback = error.__traceback__
            if traceback is not None and traceback.tb_next is None:
                # Native code has raised it, which it does only where no call was begun.
                self.refuse_unmade(name, error)
            return
        self._health.left_halfway(Operation(self._plane, name, left), error)
        if not self._health.is_broken:
            # The error belongs to a call that a handler has made inside of this one. This one may go on.
            self.core.keep()

    def finish(self, name: str, status: int, timeout_s: float) -> None:
        """Wait for the call that `core` has begun and that is not done, or raise why it cannot be.

        An exception of a signal handler may strike before this waits, so the caller has to `unwind`.

        Args:
            name: The name of the call.
            status: What `core` returned.
            timeout_s: Deadline of the call in seconds.

        Raises:
            DisagreementError: The ranks made different calls. Nothing was moved and the group is intact.
            UsageError: Another thread was in a call until the deadline, or this thread is in one further out.
            Others: As `GroupHealth.wait`.
        """
        if status in (_core.PENDING, _core.LEFT):
            operation = Operation(self._plane, name, self.core.number)
            self._health.wait(operation, _PendingCall(self, name), timeout_s)
            return
        self.settle(name, status)

    def finish_part(self, operation: Operation, status: int, timeout_s: float) -> None:
        """Finish a call that is one part of `operation`, in which ranks that are not here take part too.

        A late rank of this host may itself wait for one elsewhere, so only the status store can name the missing rank.
        Raises as `finish`.
        """
        if status in (_core.PENDING, _core.LEFT):
            self._health.wait(operation, _PartOfCall(self, operation.name), timeout_s)
            return
        self.settle(operation.name, status)

    def settle(self, name: str, status: int) -> None:
        """Raise unless `status` says that the call is done."""
        if status == _core.DONE:
            return
        if status == _core.DISAGREE:
            raise self._disagreement(name)
        if status == _core.ABANDONED:
            # Another exception has struck while the first was handled, so that the group is not broken yet.
            left = InterruptedError(f"call #{self.core.number} was left by an exception of a signal handler")
            self._health.left_halfway(Operation(self._plane, "a call", self.core.number), left)
        self._health.check_usable(name)
        if (reason := _WITHOUT_PLACE.get(status)) is not None:
            raise without_place(self._health, name, reason)
        raise ClosedError(f"{self._health.where(name)}: the group was destroyed while the call waited")

    def refuse(self, reason: str) -> None:
        """Take the number of a call that this rank refuses, and tell the others why; see `Plane`.

        If another thread is in a call, that is the number after its call.
        """
        self.core.refuse(reason.encode()[: _core.REASON_BYTES])

    def refuse_unmade(self, name: str, error: BaseException) -> None:
        """Refuse the call `name` if `error`, which has ended it before it was begun, says that it cannot be made.

        Otherwise the others would combine that call with the next one of this rank. The errors of this package have
        been dealt with, and a call that a signal handler has ended is not one that this rank could not make.
        """
        if isinstance(error, Exception) and not isinstance(error, CommError) and not raised_by_handler(error):
            self.refuse(f"{name}: {type(error).__name__}: {error}")

    def catch_up(self) -> None:
        """Tell the others of refusals whose turn has come; see `Plane`."""
        self.core.catch_up()

    def _disagreement(self, name: str) -> DisagreementError:
        """Return the error for ranks that made different calls, or of which some refused theirs."""
        posts = dict(zip(self._ranks, self.core.disagreement(), strict=False))
        label = "digest" if self._is_part else "layout"
        views = {rank: _describe(*view, widths, label) for rank, (view, widths, _) in posts.items()}
        what = "the ranks made different calls: " + _listed(views)
        refusals = {
            rank: f"refused {reason.decode(errors='replace')}"
            for rank, (_, _, reason) in posts.items()
            if reason
        }
        if refusals:
            what = "; ".join(f"rank {rank} {text}" for rank, text in refusals.items())
            if not self._is_part:
                what += "; nothing was moved, and the next call works"
        return DisagreementError(f"{self._health.where(name)}: {what}", views=views | refusals)

    def missing(self) -> list[int]:
        """Return the global ranks that have not come to the present step."""
        return [self._ranks[rank] for rank in self.core.missing()]


class _PendingCall:
    """A call under way; see `Pollable`."""

    def __init__(self, region: RegionCalls, name: str) -> None:
        self._region = region
        self._name = name

    def poll(self, slice_s: float) -> bool:
        status = self._region.core.resume(max(int(slice_s * 1e9), 0))
        if status == _core.PENDING:
            return False
        if status == _core.LEFT:
            # The status store knows why; see `GroupHealth.explain`.
            raise RuntimeError("a rank has left the group")
        self._region.settle(self._name, status)
        return True

    def pending(self) -> list[int] | None:
        return self._region.missing()


class _PartOfCall(_PendingCall):
    """One part of a call in which ranks elsewhere take part; see `Pollable`."""

    def pending(self) -> None:
        return None


def _listed(views: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {view}" for rank, view in views.items())


def _name(kind: int) -> str:
    if kind == _core.REFUSED:
        return "a refused call"
    return _KINDS[kind] if kind < len(_KINDS) else f"call {kind}"


def _describe(
    number: int,
    code: int,
    count: int,
    detail: int,
    widths: tuple[tuple[int, ...], tuple[int, ...]] | None,
    label: str,
) -> str:
    """Return the text in which an error describes the call of one rank; `label` says what the detail is."""
    name = _name(code & 0xFF)
    parts = [f"{name} #{number}"]
    dtype = code >> 8 & 0xFF
    if widths is not None:
        sent, expected = (" + ".join(str(count * width) for width in each) for each in widths)
        parts.append(
            f"sends {sent} bytes and expects {expected} bytes, {_core.TYPE_NAMES.get(dtype, f'dtype {dtype}')}"
        )
        if count != 1:
            parts.append(f"in {count} rows")
    elif name != "barrier":
        parts.append(f"{count} {'elements' if name in _REDUCING else 'bytes'}")
        parts.append(_core.TYPE_NAMES.get(dtype, f"dtype {dtype}"))
    if name in _REDUCING:
        operation = code >> 16 & 0xFF
        parts.append(_OPERATIONS[operation] if operation < len(_OPERATIONS) else f"reduction {operation}")
    if name in _ROOTED:
        parts.append(f"root {code >> 24}")
    if detail:
        parts.append(f"{label} {detail & 0xFFFF:04x}")
    return ", ".join(parts)
