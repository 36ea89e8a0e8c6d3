"""Account for the parts sent and received over the remote transport. Pure bookkeeping, without a socket.

A message is sent in parts, numbered from 1. The writer's ledger keeps a part until every reader has given it back,
which means that the application has read its message. A reader's inbox joins the parts again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import zmq

from shm_broadcast import codec
from shm_broadcast.errors import DecodeError
from shm_broadcast.liveness import ProcessIdentity
from shm_broadcast.remote.wire import Record, parts_of
from shm_broadcast.reports.statistics import ReaderStatistics

# Bytes that a part counts beyond its frame, for the objects that hold it here and in zmq.
PART_OVERHEAD: Final = 512

# Most greetings answered in 0.2 s: a connection that breaks again and again is made anew every 20 ms.
_GREETINGS_S: Final = 0.2
_MOST_GREETINGS: Final = 16
# Replaced connections that are remembered: what was sent over one has arrived before 64 have followed it.
_FORMER: Final = 64


class Part(NamedTuple):
    """A part of a message.

    Attributes:
        number: Running number, from 1.
        frame: The record, shared by all connections.
        messages: Messages completed up to and including this part.
        nbytes: Bytes of those messages' frames.
    """

    number: int
    frame: zmq.Frame
    messages: int
    nbytes: int


class Link:
    """What the writer knows about one reader. Times are `time.monotonic()` seconds.

    Attributes:
        rank: The reader's rank.
        route: zmq's name of its connection; None while there is none.
        incarnation: Random number of the reader object that connected; None before the first.
        process: Its process; None until it has connected.
        heard_at: When its latest record came.
        broken_at: When its connection was found broken.
        is_lost: Whether the writer gave it up.
        has_left: Whether it closed its end.
        ask: Number that a demand to send parts again (AGAIN) must repeat. The beats after resent parts carry
            a new number, so a reader that repeats the new one has read all of those parts.
        received: The last part that has reached its process.
        given_back: The last part whose message it has read.
        messages: Messages up to and including `given_back`.
        nbytes: Bytes of those messages.
        progress_at: When it last read a message; None before the first.
    """

    def __init__(self, rank: int) -> None:
        """Begin without a connection."""
        self.rank = rank
        self.route: bytes | None = None
        self.incarnation: int | None = None
        self.process: ProcessIdentity | None = None
        self.heard_at: float = 0.0
        self.broken_at: float = 0.0
        self.is_lost = False
        self.has_left = False
        self.ask = 0
        self._former: deque[bytes] = deque(maxlen=_FORMER)
        self._greetings_at, self._greetings = 0.0, 0
        self.received = 0
        self.given_back = self.messages = self.nbytes = 0
        self.progress_at: float | None = None

    @property
    def has_come(self) -> bool:
        """Whether the reader ever opened its end."""
        return self.incarnation is not None

    @property
    def is_gone(self) -> bool:
        """Whether the reader was lost or has left; both are final."""
        return self.is_lost or self.has_left

    def may_greet(self, route: bytes) -> bool:
        """Return whether a greeting over `route`, which came at `heard_at`, is to be answered.

        A greeting over a replaced connection is not answered, nor are more than a reconnecting reader sends:
        each answer takes memory until it is read.
        """
        if self.heard_at - self._greetings_at >= _GREETINGS_S:
            self._greetings_at, self._greetings = self.heard_at, 0
        self._greetings += 1
        return route not in self._former and self._greetings <= _MOST_GREETINGS

    def connect(self, route: bytes) -> bool:
        """Use a connection from now on; return whether it is another one than before."""
        before, self.route = self.route, route
        if before not in (None, route):
            self._former.append(before)
        return before != route

    def state(self, now: float) -> str:
        """Return the state of the connection for an error's text; `now` is `time.monotonic()`."""
        if not self.has_come:
            return "has not connected"
        where = "" if self.process is None else f"pid {self.process.pid} on host {self.process.hostname}, "
        if self.has_left:
            return where + "closed the queue"
        if self.route is not None:
            return where + "connected"
        word = "lost" if self.is_lost else "no connection"
        return f"{where}{word}, last heard {now - self.heard_at:.1f} s ago"


class Ledger:
    """The writer's record of sent parts and of each reader's progress.

    Its first part is the last one that every reader has given back, so the ledger is never empty. Everything else is
    derived from the parts, so an exception from a signal handler cannot leave it inconsistent.
    """

    def __init__(self, ranks: Iterable[int], high_water_bytes: int) -> None:
        """Begin without a message."""
        self.links: dict[int, Link] = {rank: Link(rank) for rank in ranks}
        self._high_water_bytes = high_water_bytes
        self._parts: deque[Part] = deque([Part(0, zmq.Frame(b""), 0, 0)])

    @property
    def last(self) -> Part:
        """The part written last."""
        return self._parts[-1]

    def cut(self, message: codec.Message) -> list[Part]:
        """Return the parts of the next message; `add` records them."""
        last = self.last
        first = last.number + 1
        frames = enumerate(parts_of(message, first), first)
        parts = [Part(number, frame, last.messages, last.nbytes) for number, frame in frames]
        end, frame, messages, nbytes = parts[-1]
        parts[-1] = Part(end, frame, messages + 1, nbytes + message.nbytes)
        return parts

    def add(self, parts: list[Part]) -> None:
        """Record the parts of a message."""
        self._parts.extend(parts)

    def after(self, received: int) -> list[Part]:
        """Return the parts after number `received`."""
        return list(self._parts)[max(0, received - self._parts[0].number) + 1 :]

    def in_the_way(self, nbytes: int) -> list[Link]:
        """Return the readers that are too far behind for a message of `nbytes`."""
        limit, last = self._high_water_bytes - nbytes - PART_OVERHEAD, self.last
        return [
            link
            for link in self.links.values()
            if (kept := last.number - link.given_back)
            and last.nbytes - link.nbytes + PART_OVERHEAD * kept > limit
        ]

    def acknowledge(self, link: Link, given_back: int, received: int) -> None:
        """Record a reader's progress, and drop the parts that all readers have given back.

        Raises:
            DecodeError: The reader claims parts that were never sent, or more read than received.
        """
        first, last = self._parts[0].number, self.last.number
        if not given_back <= min(received, last) or received > last + 1:
            raise DecodeError(f"rank {link.rank} acknowledges parts {given_back} and {received} of {last}")
        link.received = max(link.received, received)
        if given_back > link.given_back:
            part = self._parts[given_back - first]
            link.given_back, link.messages, link.nbytes = given_back, part.messages, part.nbytes
            link.progress_at = link.heard_at
            everybody = min(each.given_back for each in self.links.values())
            for _ in range(everybody - first):
                self._parts.popleft()

    def has_everybody_everything(self) -> bool:
        """Return whether every reader that has come and is not gone has received all parts and the END record."""
        last = self.last.number
        late = [link for link in self.links.values() if link.received <= last and link.has_come]
        return not [link for link in late if not link.is_gone]

    def describe(self, links: Iterable[Link]) -> str:
        """Return the state and progress of some readers for an error's text."""
        now, last = time.monotonic(), self.last
        texts = []
        for link in links:
            progress = "never read"
            if link.progress_at is not None:
                progress = f"last progress {now - link.progress_at:.1f} s ago"
            behind = f"{last.messages - link.messages} messages ({last.nbytes - link.nbytes} bytes) behind"
            texts.append(f"rank {link.rank} ({link.state(now)}, {behind}, {progress})")
        return ", ".join(texts)

    def readers(self) -> tuple[ReaderStatistics, ...]:
        """Return each reader's progress."""
        now, last = time.monotonic(), self.last
        return tuple(
            ReaderStatistics(
                link.rank,
                last.messages - link.messages,
                last.nbytes - link.nbytes,
                None if link.progress_at is None else now - link.progress_at,
                link.has_come and not link.is_gone,
            )
            for link in self.links.values()
        )

    def clear(self) -> None:
        """Release the memory of the parts."""
        self._parts = deque([self.last])


class Progress(NamedTuple):
    """What a reader has read.

    Attributes:
        given_back: Number of the last part whose message was read.
        messages: How many messages were read.
        nbytes: Bytes of their frames.
    """

    given_back: int
    messages: int
    nbytes: int


class Arrived(NamedTuple):
    """A complete message.

    Attributes:
        number: Number of its last part.
        frame: Its bytes.
    """

    number: int
    frame: memoryview | bytearray


class Inbox:
    """A reader's record of received parts, joined to messages.

    A signal handler may raise between any two steps. A part that was only half taken in then comes again,
    because `received` changes last, and what is already here of it is recognised. A message that was taken
    out but reached nobody is put back.

    Attributes:
        received: Number of the last part that was taken.
        progress: What was read.
    """

    def __init__(self) -> None:
        """Begin without a part."""
        self.received: int = 0
        self.progress: Progress = Progress(0, 0, 0)
        self._messages: deque[Arrived] = deque()
        self._assembly = bytearray()  # the parts of an incomplete message

    def __len__(self) -> int:
        """Return the number of complete messages."""
        return len(self._messages)

    def take(self, part: Record) -> None:
        """Add the next part; ignore parts that came before and parts that follow a gap.

        Raises:
            DecodeError: The part's offset or length does not continue the message.
        """
        number, total, offset = part.first, part.second, part.third
        if number != self.received + 1:
            return
        have, length = len(self._assembly), len(part.body)
        is_added = 0 < length < total and offset + length == have
        if not is_added and (offset != have or offset + length > total or length == 0):
            raise DecodeError(
                f"part {number} has bytes {offset} to {offset + length} of {total}, after {have} bytes"
            )
        if length == total:
            self._complete(Arrived(number, part.body))
        else:
            # Grow with what arrives: a forged total must not allocate memory.
            if not is_added:
                self._assembly += part.body
            if len(self._assembly) == total:
                self._complete(Arrived(number, self._assembly))
                self._assembly = bytearray()
        self.received = number

    def _complete(self, message: Arrived) -> None:
        is_there = bool(self._messages) and self._messages[-1].number == message.number
        if not is_there and message.number > self.progress.given_back:
            self._messages.append(message)

    def first(self) -> Arrived:
        """Return the next message, which stays."""
        return self._messages[0]

    def take_out(self) -> None:
        """Remove the next message; it counts as read."""
        message = self._messages.popleft()
        before = self.progress
        self.progress = Progress(message.number, before.messages + 1, before.nbytes + len(message.frame))

    def put_back(self, message: Arrived, before: Progress) -> None:
        """Make a message the next one again, if it was removed. `before` is the progress before it was read."""
        if not self._messages or self._messages[0].number != message.number:
            self._messages.appendleft(message)
        self.progress = before

    def nbytes(self) -> int:
        """Return the bytes of all complete messages."""
        return sum(len(message.frame) for message in self._messages)

    def clear(self) -> None:
        """Release the memory of all messages."""
        self._messages.clear()
        self._assembly = bytearray()
