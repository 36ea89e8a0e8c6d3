"""The two ends of a channel between two ranks of one host, and the messages that are passing through it."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol

from shm_broadcast import _core as rings
from shm_broadcast import codec
from shm_broadcast.errors import CommError, DecodeError, NativeError, UsageError
from shm_broadcast.interruption import raised_by_handler

# A call polls and yields for this long before it sleeps, because the other rank often comes soon.
SPIN_NS: Final = 100_000
# A waiting call first looks for messages from other ranks after this time. Each later pause is twice as long.
_FIRST_LOOK_S: Final = 0.001
# The pause while such a message is arriving, or while the call serves several receivers.
_BUSY_LOOK_S: Final = 0.0002
# How often a thread that writes checks whether the channels were closed.
_BACKGROUND_SLICE_NS: Final = 20_000_000
# How many messages a waiting call takes in before it goes on with its own.
_MOST_AT_ONCE: Final = 64
# The shortest wait. Without any, `receive_within` would not go on with a message that comes in parts.
_BARELY_NS: Final = 1

# Takes the place of the memory of a closed channel; every native function refuses it.
NO_RING: Final = mmap.mmap(-1, mmap.PAGESIZE)

_LEFT: Final = 2  # ring::kLeft
_ENDED: Final = 2  # of ring_wait


class Crossing(Protocol):
    """What the ends ask of the channels that they belong to."""

    is_closed: bool

    def drain(self, busy: ChannelReceiver | None) -> bool:
        """Take in what others send, except through `busy`; return whether something came or is under way."""

    def fail_corrupt(self, peer: int, error: Exception) -> NoReturn:
        """Raise for a channel with rank `peer` that holds no ring: it was closed, or else the group breaks."""

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on a thread of ours. CapabilityError: There is none, and none can be started."""


class LeftError(RuntimeError):
    """The other end of a channel has left, or this one was closed; `GroupHealth.explain` finds out why."""


def look_around_of(crossing: Crossing, peer: int) -> Callable[[int, Any], object]:
    """Return what the endpoint of a channel with rank `peer` calls when it cannot go on."""

    def look_around(reason: int, detail: Any) -> object:
        if reason == rings.LOOK_CORRUPT:
            crossing.fail_corrupt(peer, detail)
        if reason == rings.LOOK_UNDECODABLE:
            fault = codec.decode_error(detail)
            # It takes the place of the message, and is raised where the message is asked for.
            return None if fault is None else Undecodable(peer, fault)
        if reason == rings.LOOK_UNENCODABLE:
            codec.raise_usage_error(detail)
        if reason == rings.LOOK_REENTRANT:
            raise UsageError(
                f"this thread is inside of a call on the channel with rank {peer} already, "
                "as in a signal handler or a finalizer"
            )
        raise_left()

    return look_around


def _refuse_closed(_reason: int, _detail: object) -> NoReturn:
    """Take the place of `look_around` behind `close`."""
    raise_left()


class Undecodable:
    """Takes the place of a message that cannot be decoded, until somebody asks for it."""

    def __init__(self, peer: int, error: DecodeError | MemoryError) -> None:
        """Keep the error that whoever asks for the message from rank `peer` gets."""
        self.error: CommError = error if isinstance(error, DecodeError) else _unplaced(peer, error)


def _unplaced(peer: int, error: Exception) -> NativeError:
    """Return what to raise for a message that has come but cannot be stored.

    This is a `CommError`, because a waiting call takes any other error for a failure of the transport. The group is
    intact.
    """
    unplaced = NativeError(
        f"a message from rank {peer} came, but could not be put in its place: {error}",
        library="torch",
        function="copy_",
    )
    unplaced.__cause__ = error
    return unplaced


class Receiving:
    """A message that is awaited; see `Pollable`."""

    def __init__(self, receiver: ChannelReceiver, tag: int, land: Callable[[Any], Any] | None) -> None:
        """Await a message of `tag`. `value` becomes what `land` returns for it; without `land`, the message itself."""
        self.receiver = receiver
        self.tag = tag
        self._land = land
        self._error: Exception | None = None
        # Whether the message was put in its place, or cannot be.
        self.has_landed: bool = False
        self.value: Any = None
        # The receiver sets these when the message comes.
        self.message: Any = None
        self.number: int = 0
        self.has_come: bool = False

    @property
    def has_place(self) -> bool:
        """Return whether the message has a place of its own, which it must reach also if nobody polls any more."""
        return self._land is not None

    def finish(self) -> None:
        """Put the message in its place. What a signal handler raises meanwhile leaves it to the next call."""
        # Nothing is called between these two: another thread may finish this at the same time.
        message, has_landed = self.message, self.has_landed
        if has_landed:
            return
        value = None
        try:
            value = self._placed(message)
        except CommError as error:
            self._error = error
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._error = _unplaced(self.receiver.peer, error)
        self.value, self.message, self.has_landed = value, None, True

    def _placed(self, message: Any) -> Any:
        if isinstance(message, Undecodable):
            raise message.error
        return message if self._land is None else self._land(message)

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds."""
        if not self.has_come:
            self.receiver.await_arrival(self, slice_s)
        if self.has_come and not self.has_landed:
            self.receiver.land()
            self.finish()
        if self._error is not None:
            raise self._error
        return self.has_come

    def is_complete(self) -> bool:
        """Return whether it is there, taking in what is. Raises what is wrong with it."""
        return self.poll(0.0)

    def pending(self) -> tuple[int, ...]:
        """Return the sender while it is awaited."""
        return () if self.has_come else (self.receiver.peer,)


class ChannelReceiver:
    """The reading end of the channel from one rank.

    Several threads may use it, and a signal handler may interrupt any call. A message is therefore always in one place:
    the ring, the endpoint, `_arrived`, or the `Receiving` that awaits it. It moves in statements that call nothing:
    between these the interpreter runs neither a handler nor another thread. A lock would not keep out a handler.
    """

    def __init__(
        self, crossing: Crossing, memory: mmap.mmap, peer: int, bell: memoryview | None = None
    ) -> None:
        """Attach to a ring, into which global rank `peer` writes. It sounds `bell`, that of this rank."""
        self.peer = peer
        self._crossing = crossing
        self._memory = memory
        self._look_around = look_around_of(crossing, peer)
        self.endpoint: rings.ReadEndpoint = rings.ReadEndpoint(
            memory, 0, codec.build_owned, "adaptive", self._judge, bell
        )
        rings.ring_attach(memory, 0)
        # By tag, the messages that came by their numbers, and those that are awaited; the oldest first.
        self._arrived: dict[int, dict[int, Any]] = {}
        self._awaited: dict[int, dict[int, Receiving]] = {}
        # Those that have come and may not be in their places yet, by the numbers of the messages.
        self._landing: dict[int, Receiving] = {}
        self._undecodable = 0

    def _judge(self, reason: int, detail: Any) -> object:
        instead = self._look_around(reason, detail)
        if instead is not None:
            self._undecodable = self.endpoint.messages + 1
        return instead

    def receive_now(self, tag: int) -> Any:
        """Return the next message of `tag` if it is there, else NOTHING."""
        endpoint = self.endpoint
        endpoint.fetch_within(0, 0)
        awaited, arrived = self._of_tag(tag)
        # Nothing is called from here to the end of the `if`.
        if endpoint.tag == tag and not awaited and not arrived and endpoint.messages != self._undecodable:
            return endpoint.message
        self._sort()
        return rings.NOTHING

    def expect(self, tag: int, land: Callable[[Any], Any] | None) -> Receiving:
        """Await the next message of `tag` that nobody awaits yet."""
        receiving = Receiving(self, tag, land)
        self.enlist(receiving)
        return receiving

    def enlist(self, receiving: Receiving) -> None:
        """Await the next message of its tag that nobody awaits yet."""
        key = id(receiving)
        awaited, arrived = self._of_tag(receiving.tag)
        landing = self._landing
        # Nothing is called from here on.
        for number in arrived:
            receiving.message, receiving.number, receiving.has_come = arrived[number], number, True
            landing[number] = receiving
            del arrived[number]
            break
        else:
            awaited[key] = receiving

    def abandon(self, receiving: Receiving) -> None:
        """Await it no more; if it has come, it is the next message of its tag again."""
        awaited, arrived = self._of_tag(receiving.tag)
        awaited.pop(id(receiving), None)
        if receiving.has_come and not receiving.has_landed:
            # Nothing is called here. Its place is before those that came later.
            self._arrived[receiving.tag] = {receiving.number: receiving.message, **arrived}

    def land(self) -> None:
        """Put what has come for handles in its place, also if the handles were dropped."""
        for number in list(self._landing):
            receiving = self._landing.get(number)
            # One without a place of its own can still be abandoned.
            if receiving is not None and receiving.has_place:
                receiving.finish()
            self._landing.pop(number, None)

    def await_arrival(self, receiving: Receiving, slice_s: float) -> None:
        """Take in messages for up to `slice_s` seconds, or until the one of `receiving` has come."""
        look = _Look(self._crossing, slice_s)
        spin_ns = SPIN_NS if slice_s > 0 else 0
        while not receiving.has_come:
            if self._take_in(spin_ns, look.park_ns()):
                continue
            # This may be in the middle of a message, whose rest will not come.
            if self.has_ended() and not receiving.has_come:
                raise_left()
            spin_ns = 0
            if look.is_over(self):
                return

    def has_news(self, tag: int) -> bool:
        """Return whether `take_arrived` may find something, or that nothing will come."""
        return self.endpoint.has_news or bool(self._arrived.get(tag))

    def take_arrived(self, tag: int) -> Receiving | None:
        """Take the oldest message of `tag` that is there and that nobody awaits; `abandon` puts it back."""
        self.drain()
        receiving = Receiving(self, tag, None)
        _, arrived = self._of_tag(tag)
        # Nothing is called from here on.
        for number in arrived:
            receiving.message, receiving.number, receiving.has_come = arrived[number], number, True
            del arrived[number]
            return receiving
        return None

    def has_ended(self) -> bool:
        """Return whether nothing will come any more, and all that came was taken in."""
        try:
            return rings.ring_wait(self._memory, 0, 0, 0) == _ENDED and not self.endpoint.has_message
        except rings.MappingError as error:
            self._crossing.fail_corrupt(self.peer, error)

    def drain(self) -> bool:
        """Take in what is there without waiting; return whether that was something, or is still under way."""
        for count in range(_MOST_AT_ONCE):
            if self.endpoint.is_busy:
                # Another thread takes in what comes, or this one does and runs a signal handler meanwhile.
                return False
            if not self._take_in(_BARELY_NS, 0):
                return count > 0 or self.endpoint.is_assembling
        return True

    def _of_tag(self, tag: int) -> tuple[dict[int, Receiving], dict[int, Any]]:
        return self._awaited.setdefault(tag, {}), self._arrived.setdefault(tag, {})

    def _take_in(self, spin_ns: int, park_ns: int) -> bool:
        """Take in a message if one comes within these times; return whether one came."""
        self.endpoint.fetch_within(spin_ns, park_ns)
        has_come = self._sort()
        if self._landing:
            self.land()
        return has_come

    def _sort(self) -> bool:
        """Put the message that the endpoint keeps where it belongs; return whether it was still there."""
        endpoint = self.endpoint
        while endpoint.has_message:
            number, tag = endpoint.messages, endpoint.tag
            awaited, arrived = self._of_tag(tag)
            landing = self._landing
            # Nothing is called from here on, except for the next turn.
            if endpoint.messages != number or not endpoint.has_message:
                continue
            for key in awaited:
                receiving = awaited[key]
                del awaited[key]
                receiving.message, receiving.number, receiving.has_come = endpoint.message, number, True
                landing[number] = receiving
                return True
            arrived[number] = endpoint.message
            return True
        return False

    def close(self) -> None:
        """Tell the sender that nobody reads any more."""
        # First: ending the ring wakes a thread that waits, whose next call must find the endpoint closed.
        self.endpoint.close(_refuse_closed)
        rings.ring_end(self._memory, 0)
        self._memory = NO_RING


class ReceivingAll:
    """Messages that are awaited from several ranks; see `Pollable`."""

    def __init__(self, receivings: Sequence[Receiving]) -> None:
        """Await all of them. Each one raises what is wrong with it when it is polled by itself."""
        self._receivings = list(receivings)

    def poll(self, slice_s: float) -> bool:
        """Wait for up to `slice_s` seconds; the others' messages are taken in meanwhile."""
        until = time.monotonic() + slice_s
        for receiving in self._receivings:
            if not receiving.has_come:
                receiving.receiver.await_arrival(receiving, max(until - time.monotonic(), 0.0))
        return all(receiving.has_come for receiving in self._receivings)

    def pending(self) -> tuple[int, ...]:
        """Return the senders that are still awaited."""
        return tuple(sorted(peer for receiving in self._receivings for peer in receiving.pending()))


class _Look:
    """When a call that waits for one rank looks for what the others send meanwhile."""

    def __init__(self, crossing: Crossing, slice_s: float) -> None:
        self._crossing = crossing
        self._until = time.monotonic() + slice_s
        self._pause_s = _FIRST_LOOK_S

    def park_ns(self) -> int:
        """Return how long to sleep until then."""
        return max(int(min(self._pause_s, self._until - time.monotonic()) * 1e9), 0)

    def is_over(self, busy: ChannelReceiver | None) -> bool:
        """Take in what others send, except through `busy`; return whether the slice is over."""
        if self._crossing.drain(busy):
            self._pause_s = _BUSY_LOOK_S
        else:
            self._pause_s *= 2
        return time.monotonic() >= self._until


class Sending:
    """A message on its way into one channel; see `Pollable`."""

    def __init__(self, sender: ChannelSender, message: codec.Message, tag: int) -> None:
        """Write nothing yet."""
        self.sender: ChannelSender = sender
        self._message: codec.Message | None = message
        self._tag = tag
        self._done = 0
        self._error: BaseException | None = None
        # The thread that makes the call.
        self.thread: int = threading.get_ident()
        # Whether a part may be in the channel, where nothing but the rest may follow it.
        self.has_begun: bool = False
        # Set, and the memory let go, when the channel owns the whole message.
        self.is_owned: threading.Event = threading.Event()

    def advance(self, spin_ns: int, park_ns: int) -> bool:
        """Write what there is room for, waiting once where there is none; return whether anything was written.

        RuntimeError: The receiver has left.
        """
        message, sender, before = self._message, self.sender, self._done
        if message is None:
            return False
        if before == 0:
            sender.raise_if_deserted()
        self.has_begun = True
        self._done = sender.endpoint.write_some(
            message.header, message.buffers, before, spin_ns, park_ns, self._tag
        )
        if self._done == message.nbytes:
            self._finish(None)
        elif self._done == before:
            sender.raise_if_deserted()
        return self._done > before

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._message = None
        self.sender.done(self)
        self.is_owned.set()

    def run(self) -> None:
        """Write the whole message on a thread of our own; never raises."""
        try:
            spin_ns = SPIN_NS
            while not self.is_owned.is_set():
                if self.sender.crossing.is_closed:
                    raise_left()
                spin_ns = SPIN_NS if self.advance(spin_ns, _BACKGROUND_SLICE_NS) else 0
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._finish(error)

    def is_complete(self) -> bool:
        """Return whether the channel owns all of it. Raises why it cannot."""
        if self._error is not None:
            raise self._error
        if self.is_owned.is_set():
            return True
        # The thread that writes may not have noticed yet.
        self.sender.raise_if_deserted()
        return False

    def poll(self, slice_s: float) -> bool:
        """Wait for the thread that writes."""
        look = _Look(self.sender.crossing, slice_s)
        while not self.is_owned.wait(look.park_ns() / 1e9):
            if look.is_over(None):
                # If a signal handler waits here, it may have interrupted the call that is about to start the thread.
                self.sender.call_thread(again=True)
                break
        return self.is_complete()

    def pending(self) -> tuple[int, ...]:
        """Return the receiver while there is no room."""
        return () if self.is_owned.is_set() else (self.sender.peer,)


class Writing:
    """Messages that the calling thread writes itself, one to each of several ranks; see `Pollable`."""

    def __init__(self, crossing: Crossing, sendings: Sequence[Sending]) -> None:
        """Each must be the first in its channel."""
        self._crossing = crossing
        self._open = list(sendings)

    def poll(self, slice_s: float) -> bool:
        """Write on for up to `slice_s` seconds."""
        look = _Look(self._crossing, slice_s)
        while self._open:
            # With several receivers this waits for one of them, and looks after the others soon.
            is_alone = len(self._open) == 1
            moved = [sending.advance(0, 0) for sending in self._open] if not is_alone else []
            if not any(moved):
                park_ns = look.park_ns() if is_alone else int(_BUSY_LOOK_S * 1e9)
                if not self._open[0].advance(SPIN_NS, park_ns) and look.is_over(None):
                    break
            self._open = [sending for sending in self._open if not sending.is_owned.is_set()]
        return not self._open

    def pending(self) -> tuple[int, ...]:
        """Return the receivers that make no room."""
        return tuple(sorted(peer for sending in self._open for peer in sending.pending()))


class ChannelSender:
    """The writing end of the channel to one rank.

    As in `ChannelReceiver`, several threads may use it and a signal handler may interrupt any call. What waits is kept
    in statements that call nothing before the last one. A handler that needed a thread of ours while its own thread
    held a lock would wait for ever.
    """

    def __init__(
        self, crossing: Crossing, memory: mmap.mmap, peer: int, bell: memoryview | None = None
    ) -> None:
        """Write into a ring, which global rank `peer` reads, and sound its `bell`."""
        self.peer = peer
        self.crossing = crossing
        self.memory: mmap.mmap = memory
        self.endpoint: rings.WriteEndpoint = rings.WriteEndpoint(
            memory, codec.describe, "adaptive", look_around_of(crossing, peer), bell
        )
        # What is not in the channel as a whole, in order: the first is under way.
        self._waiting: deque[Sending] = deque()
        # The first one if the call that sends it writes it.
        self._own: Sending | None = None
        # Whether a thread of ours writes what waits, until nothing does; and whether one was called and has not come.
        self._has_thread = False
        self._is_called = False

    def send_now(self, obj: Any, tag: int) -> codec.Message | None:
        """Send an object that fits and has nothing before it; return it encoded if it was not sent."""
        if self._waiting:
            return codec.encode(obj)
        encoded = self.endpoint.send_now(obj, tag)
        return None if encoded is None else codec.Message(*encoded)

    def write_now(self, message: codec.Message, tag: int) -> bool:
        """Send a message that fits and has nothing before it; return whether it was sent."""
        return not self._waiting and self.endpoint.write_now(message.header, message.buffers, tag)

    def enqueue(self, sending: Sending, *, aside: bool = False) -> bool:
        """Add a message to those that wait; return whether the caller has to write it now.

        If this raises, or the caller is interrupted before it waits, the caller withdraws the message.

        Args:
            sending: The message.
            aside: Whether a thread of ours shall write it in any case.

        Raises:
            UsageError: A call writes another message to this rank, which nothing overtakes and no thread of ours ends.
            CapabilityError: No thread can be started.
        """
        # Nothing is called from here to the end of `append`.
        own = self._own
        is_own = not (aside or self._waiting or self._has_thread)
        if own is None:
            if is_own:
                self._own = sending
            self._waiting.append(sending)
            if not is_own:
                self.call_thread()
            return is_own
        where = f"inside of a call that sends to rank {self.peer} already"
        if own.thread == sending.thread:
            raise UsageError(f"this thread is {where}, as in a signal handler or a finalizer")
        raise UsageError(
            f"another thread of this process is {where}, and its message is not in the channel yet"
        )

    def call_thread(self, *, again: bool = False) -> None:
        """Let a thread of ours write what waits, if none does. One that was called must come, unless `again`."""
        if self._has_thread or not self._waiting or (self._is_called and not again):
            return
        try:
            self._is_called = True
            self.crossing.submit(self._write_waiting)
        except BaseException:
            # If it comes all the same, it finds nothing to do, or does what the next one is called for.
            self._is_called = False
            raise

    def _write_waiting(self) -> None:
        """Write, on a thread of ours, until nothing waits."""
        # Nothing is called between these statements: they are one step for all threads and signal handlers.
        self._is_called = False
        if self._has_thread or self._own is not None:
            return
        self._has_thread = True
        while True:
            # Nor between these: what is added behind the look is added while no thread writes, or taken here.
            if not self._waiting:
                self._has_thread = False
                return
            first = self._waiting[0]
            first.has_begun = True
            first.run()

    def withdraw(self, sending: Sending) -> bool:
        """Take back a message of which nothing was written; return whether none of it still waits."""
        # Nothing is called from here to the end of `remove`.
        if sending not in self._waiting:
            return True
        if sending.has_begun:
            return False
        if self._own is sending:
            self._own = None
        self._waiting.remove(sending)
        return True

    def raise_if_deserted(self) -> None:
        """Raise if the receiver has left."""
        try:
            if rings.ring_state(self.memory)[4][0][4] == _LEFT:
                raise_left()
        except rings.MappingError as error:
            self.crossing.fail_corrupt(self.peer, error)

    def done(self, sending: Sending) -> None:
        """Forget a message that is owned by the channel, or cannot be sent."""
        # Nothing is called from here to the end of `remove`.
        if self._own is sending:
            self._own = None
        if sending in self._waiting:
            self._waiting.remove(sending)

    def close(self) -> None:
        """Tell the receiver that nothing follows; what was written can still be read."""
        # First: ending the ring wakes a thread that waits, whose next call must find the endpoint closed.
        self.endpoint.close(_refuse_closed)
        rings.ring_end(self.memory, -1)
        self.memory = NO_RING


def raise_left() -> NoReturn:
    """Raise for a channel whose other end has left."""
    raise LeftError("a rank has left the group")
