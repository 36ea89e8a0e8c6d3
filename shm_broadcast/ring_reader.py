"""The reading end of one ring: records out, and waiting that always ends. See `ring.py`."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from shm_broadcast import _core, codec
from shm_broadcast.errors import ClosedError, CommError, CommTimeoutError, PeerLostError, UsageError
from shm_broadcast.liveness import PeerWatch, fork_count
from shm_broadcast.ring import RingEnd
from shm_broadcast.segment import Segment
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.wait import SLICE_NS, Pacer, Stage

# What `ring_wait` returns.
_DATA, _ENDED = 1, 2

# How often a thread looks whether another one has left the port.
_BUSY_S: Final = 0.001


class RingReader(RingEnd):
    """One reading end of a ring."""

    _port: _core.ReadPort

    def __init__(
        self,
        name: str,
        segment: Segment,
        ranks: tuple[int, ...],
        watch: PeerWatch,
        settings: BroadcastSettings,
        index: int,
        writer: int = -1,
    ) -> None:
        """Take place `index` of the ring, whose writer has rank `writer`; see `RingEnd`."""
        super().__init__(name, segment, ranks, watch, settings)
        self.rank: int = ranks[index]
        self.role: str = f"reader, rank {self.rank}"
        self._index = index
        self._writer = writer
        self._pacer = Pacer(settings.wait)
        self._noted_ns = 0
        self._is_leasing = False
        self._looked_ns = 0
        self._began_ns = 0  # of the present wait
        self._warns_s = 0.0  # after so long it warns next
        self._port = _core.ReadPort(self._memory, index, codec.build_owned)
        _core.ring_attach(self._memory, index)

    def read(self, timeout_s: float | None = None, type_: Any = None) -> Any:
        """Wait for the next message, copy it out and return its object."""
        try:
            with self._calls:
                value = self._port.receive(0, 0)
                if value is _core.NOTHING:
                    value = self._await("dequeue", timeout_s, self._port.receive)
        except Exception as error:  # noqa: BLE001 - raises
            self._refuse("dequeue", error)
        return value if type_ is None else codec.convert(value, type_)

    def direct_call(
        self,
        source: int,
        general: Callable[..., Any],
        check: Callable[[str], None],
        blame: Callable[[CommError], NoReturn],
    ) -> Callable[..., Any]:
        """Return `broadcast_object` of a group as one native call, that reads as `read` does without a deadline.

        Args:
            source: The writer's rank in the group.
            general: What makes calls that are not ordinary ones.
            check: Raises if the group cannot be used; called before each wait.
            blame: Raises what an error of the queue is to the group.
        """

        def refuse(error: Exception) -> NoReturn:
            try:
                self._refuse("dequeue", error)
            except CommError as known:
                blame(known)

        def next_stage(has_waited: bool) -> Stage:
            check("broadcast_object")
            return self._next_stage(has_waited)

        self._port.direct(source, general, next_stage, refuse)
        return self._port.broadcast_object

    def try_read(self) -> tuple[bool, Any]:
        """Return (True, the next object), or (False, None) if it is not there, or not whole yet."""
        try:
            with self._calls:
                value = self._port.receive(0, 0)
                if value is not _core.NOTHING:
                    return True, value
                self._check_lease("try_dequeue")
                self._check_end("try_dequeue", self._status("try_dequeue"))
                self._look_rarely("try_dequeue")
                return False, None
        except Exception as error:  # noqa: BLE001 - raises
            self._refuse("try_dequeue", error)

    def _refuse(self, call: str, error: Exception) -> NoReturn:
        """Raise what `error`, of the core or of a check, is to the caller."""
        if isinstance(error, CommError):
            raise error
        if isinstance(error, _core.RingCorrupt):
            self._raise_corrupt(call, error)
        codec.raise_decode_error(error)

    @contextmanager
    def lease(self, timeout_s: float | None) -> Iterator[Any]:
        """Yield the next object without copying its arrays and tensors, which alias the ring until the end."""
        with self._calls:
            memory, index = self._memory, self._index
            self._check_lease("lease")
            window = None
            try:
                self._await_alone(timeout_s)
                window = self._take_whole("lease")
                if window is not None:
                    self._is_leasing = True
                    yield codec.decode(memoryview(window), copy=False)
            finally:
                self._is_leasing = False
                self._port.hold(self._cause is not None)
                if window is not None:
                    _core.ring_release(memory, index)
            if window is None:
                # It comes in parts, so there will be one copy, which nothing else uses.
                yield self.read(timeout_s)

    def _await_alone(self, timeout_s: float | None) -> None:
        """Wait for a message to lease, and hold the port: from then on the group's own call takes nothing."""
        while True:
            if self._status("lease") != _DATA:
                self._await("lease", timeout_s, self._wait)
            self._port.hold(True)
            if self._port.is_busy:
                self._port.hold(False)
                raise UsageError(f"{self._where('lease')}: another thread waits for the next message")
            if self.poll():
                return
            self._port.hold(False)

    def _take_whole(self, call: str) -> _core.Window | None:
        """Return a window on the next message, which is there; None if it comes in parts."""
        if self._port.is_assembling:
            return None
        try:
            window, flags, _, total = _core.ring_take(self._memory, self._index)
        except ValueError as error:
            self._raise_corrupt(call, error)
        if flags not in (0, _core.RING_STREAMED):
            return None
        self._port.messages += 1
        self._port.nbytes += total
        return window

    def _wait(self, spin_ns: int, park_ns: int) -> object:
        """Wait as `receive` does, but take nothing."""
        park_ns = min(park_ns, SLICE_NS)
        status = _core.ring_wait(self._memory, self._index, spin_ns, park_ns)
        return None if status == _DATA else _core.NOTHING

    def _status(self, call: str) -> int:
        """Return _DATA, _ENDED or 0; raise if this end cannot be used."""
        self.check(call)
        try:
            return _core.ring_wait(self._memory, self._index, 0, 0)
        except ValueError as error:
            self._raise_corrupt(call, error)

    def _check_lease(self, call: str) -> None:
        if self._is_leasing:
            raise UsageError(f"{self._where(call)}: a lease is open; what it lent is still the next message")

    def _check_end(self, call: str, status: int) -> None:
        if status == _ENDED:
            raise ClosedError(f"{self._where(call)}: the writer closed the queue")

    def _look_rarely(self, call: str) -> None:
        """Raise if the writer is lost; looks once in a slice, as a caller may ask a million times a second."""
        now = time.monotonic_ns()
        if now - self._looked_ns >= SLICE_NS:
            self._looked_ns = now
            self.raise_if_lost(call)

    @property
    def messages(self) -> int:
        """How many messages this end has read."""
        return self._port.messages

    def place(self) -> tuple[mmap.mmap, int]:
        """Return the mapping and this reader's place in it, for waiting on several rings at once."""
        return self._memory, self._index

    def poll(self) -> bool:
        """Return whether a message is there. Does not wait."""
        return _core.ring_wait(self._memory, self._index, 0, 0) == _DATA

    def _await(self, call: str, timeout_s: float | None, take: Callable[[int, int], Any]) -> Any:
        """Return what `take` returns, called until that is something; it waits for as long as it is told.

        What happens behind a message's arrival counts, so what can be is done before the next wait.
        """
        now = self._begin_wait(call)
        limit = None if timeout_s is None else now + int(timeout_s * 1e9)
        while True:
            spin_ns, park_ns = self._pacer.next_stage(now)
            if limit is not None:
                left = max(limit - now, 0)
                spin_ns, park_ns = min(spin_ns, left), min(park_ns, left)
            value = take(spin_ns, park_ns)
            if value is not _core.NOTHING:
                return value
            now = self._look_around(call)
            if self._port.is_busy:
                # Another thread waits in the group's own call.
                time.sleep(_BUSY_S)
            if limit is not None and now >= limit:
                what = "end of the message" if self._port.is_assembling else "message"
                raise CommTimeoutError(
                    f"{self._where(call)}: no {what} from {self._describe_writer()} within {timeout_s:.1f} s",
                    missing=() if self._writer < 0 else (self._writer,),
                )

    def _next_stage(self, has_waited: bool) -> Stage:
        """Return how the group's own call waits now; raise what ends it. Not under the lock while it waits."""
        with self._calls:
            now = self._look_around("dequeue") if has_waited else self._begin_wait("dequeue")
            return self._pacer.next_stage(now)

    def _begin_wait(self, call: str) -> int:
        """Note what is known of the last message, and return the time; raise if there is nothing to wait for."""
        self._check_lease(call)
        self._check_end(call, self._status(call))
        if self._noted_ns != self._port.arrived_ns:
            self._noted_ns = self._port.arrived_ns
            self._pacer.arrived(self._noted_ns)
        self._waits += 1
        self._began_ns = time.monotonic_ns()
        self._warns_s = self._settings.warn_after_s
        return self._began_ns

    def _look_around(self, call: str) -> int:
        """Return the time, or raise why no message comes; say so in the log now and then."""
        if self._closing:
            raise ClosedError(f"{self._where(call)}: the queue was closed while the call waited")
        self._check_end(call, self._status(call))
        self.raise_if_lost(call)
        now = time.monotonic_ns()
        waited_s = (now - self._began_ns) / 1e9
        if waited_s >= self._warns_s:
            self._warn(call, waited_s, f"no message from {self._describe_writer()}")
            self._warns_s += self._settings.warn_after_s
        return now

    def _describe_writer(self) -> str:
        rank = "" if self._writer < 0 else f"rank {self._writer}, "
        return f"the writer ({rank}{self._watch.describe(self._writer)})"

    def raise_if_lost(self, call: str) -> None:
        """Raise `PeerLostError` if the writer died and nothing is left of what it wrote."""
        if not self._watch.lost() or self.poll():
            # What a writer published before it died is still read.
            return
        error = PeerLostError(
            f"{self._where(call)}: lost {self._describe_writer()}; close the queue",
            peers=() if self._writer < 0 else (self._writer,),
        )
        self._fail(error)
        raise error

    def close(self) -> None:
        """Leave, so that the writer does not wait for this reader, and unmap. Idempotent; wakes a waiting call."""
        if self._closing or self._forks != fork_count():
            return
        self._closing = True
        self._end(self._index)
        with self._calls:
            self._release_memory()
