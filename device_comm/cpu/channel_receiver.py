"""The reading end of a channel between two ranks of one host, and the messages that are awaited from it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from device_comm.cpu.channel_ends import (
    FIRST_LOOK_S,
    NO_RING,
    SPIN_NS,
    Crossing,
    Look,
    Undecodable,
    look_around_of,
    raise_left,
    refuse_closed,
    unplaced,
)
from shm_broadcast import _core as rings
from shm_broadcast import codec
from shm_broadcast.errors import CommError, UsageError
from shm_broadcast.interruption import raised_by_handler

# How many messages a waiting call takes in before it goes on with its own.
_MOST_AT_ONCE: Final = 64
# The shortest wait. With none at all, `fetch_within` would not go on with a message that comes in parts.
_BARELY_NS: Final = 1

_ENDED: Final = 2  # of ring_wait


class Receiving:
    """A message that is awaited; see `Pollable`."""

    def __init__(self, receiver: ChannelReceiver, tag: int, land: Callable[[Any], Any] | None) -> None:
        """Await a message of `tag`. `value` becomes what `land` returns for it; without `land`, the message itself."""
        self.receiver = receiver
        self.tag = tag
        self._land = land
        # Whether the message has a place of its own, which it must reach even if nobody polls this any more.
        self.has_place: bool = False
        self._error: Exception | None = None
        # Whether the message was put in its place, or cannot be.
        self.has_landed: bool = False
        self.value: Any = None
        # The receiver sets these when the message comes.
        self.message: Any = None
        self.number: int = 0
        self.has_come: bool = False
        self.is_enlisted: bool = False
        # How long a wait pauses before it looks for what others send. It grows from slice to slice: with short
        # pauses at the beginning of each slice a wait took up to 1.1 % of a core.
        self.pause_s: float = FIRST_LOOK_S

    def finish(self) -> None:
        """Put the message in its place. If a signal handler raises meanwhile, the next call does it."""
        # No function is called between these two reads: another thread may finish this at the same time.
        message, has_landed = self.message, self.has_landed
        if has_landed:
            return
        value = None
        try:
            value = self._placed(message)
        except UsageError:
            # The caller's mistake, as a type into which nothing can be decoded. The message becomes the next one of its
            # tag again by statements that call nothing: no signal handler drops it.
            if not self.has_place:
                arrived, self.has_come, self.is_enlisted = self.receiver.arrived, False, False
                arrived[self.tag] = {self.number: message, **arrived[self.tag]}
            raise
        except CommError as error:
            self._error = error
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._error = unplaced(self.receiver.peer, error)
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
        """Take in what is there and return whether the message has come. Raises what is wrong with it."""
        return self.poll(0.0)

    def pending(self) -> tuple[int, ...]:
        """Return the sender while it is awaited."""
        return () if self.has_come else self.receiver.peers


class ChannelReceiver:
    """The reading end of the channel from one rank.

    Several threads may use it, and a signal handler may interrupt any call. A message is therefore always in one place:
    the ring, the endpoint, `arrived`, or the `Receiving` that awaits it. It moves in statements that call nothing:
    between these the interpreter runs neither a handler nor another thread. A lock would not keep out a handler.
    """

    def __init__(
        self, crossing: Crossing, memory: mmap.mmap, peer: int, bell: memoryview | None = None
    ) -> None:
        """Attach to a ring, into which global rank `peer` writes. It sounds `bell`, that of this rank."""
        self.peer = peer
        self.peers: tuple[int, ...] = (peer,)
        self._crossing = crossing
        self._memory = memory
        self._look_around = look_around_of(crossing, peer)
        self.endpoint: rings.ReadEndpoint = rings.ReadEndpoint(
            memory, 0, codec.build_owned, "adaptive", self._judge, bell
        )
        rings.ring_attach(memory, 0)
        # By tag, the messages that came by their numbers, and those that are awaited; the oldest first.
        self.arrived: dict[int, dict[int, Any]] = {}
        self._awaited: dict[int, dict[int, Receiving]] = {}
        # Those that have come and may not be in their places yet, by the numbers of the messages.
        self._landing: dict[int, Receiving] = {}
        self._undecodable = 0

    def _judge(self, reason: int, detail: Any) -> object:
        instead = self._look_around(reason, detail)
        if instead is not None:
            self._undecodable = self.endpoint.messages + 1
        return instead

    def receive_soon(self, tag: int, spin_ns: int) -> Any:
        """Return the next message of `tag` if it comes while this polls for `spin_ns`, else NOTHING."""
        endpoint = self.endpoint
        # What has come needs no wait.
        endpoint.fetch_within(0 if self.arrived.get(tag) else spin_ns, 0)
        awaited, arrived = self._of_tag(tag)
        # Nothing is called from here to the end of the `if`.
        if endpoint.tag == tag and not awaited and not arrived and endpoint.messages != self._undecodable:
            return endpoint.message
        self._sort()
        return rings.NOTHING

    def land_soon(self, tag: int, spin_ns: int, land: Callable[[Any], Any]) -> Any:
        """Return what `land` makes of the next message of `tag`; NOTHING as `receive_soon`, and for an `Undecodable`.

        The message is taken once `land` has returned or refused it. If a handler raises before that, it
        stays.
        """
        endpoint = self.endpoint
        endpoint.fetch_within(0 if self.arrived.get(tag) else spin_ns, 0)
        awaited, arrived = self._of_tag(tag)
        message, number = rings.NOTHING, endpoint.messages
        # Nothing is called from here to the end of the `if`.
        if (
            endpoint.tag == tag
            and not awaited
            and not arrived
            and number == endpoint.messages != self._undecodable
        ):
            message = endpoint.message
            if message is not rings.NOTHING:
                endpoint.message = message
        if message is rings.NOTHING:
            self._sort()
            for number in arrived if not awaited else ():
                message = arrived[number]
                break
            if message is rings.NOTHING or isinstance(message, Undecodable):
                return rings.NOTHING
        try:
            value = land(message)
        except CommError as error:
            if not isinstance(error, UsageError) and not raised_by_handler(error):
                self._take(tag, number)
            raise
        return value if self._take(tag, number) else rings.NOTHING

    def _take(self, tag: int, number: int) -> bool:
        """Take a message that has come; return whether it was still there, and the oldest. Calls nothing."""
        endpoint, arrived = self.endpoint, self.arrived[tag]
        for oldest in arrived:
            if oldest == number:
                del arrived[number]
                return True
            return False
        if endpoint.messages == number and endpoint.has_message:
            _ = endpoint.message
            return True
        return False

    def expect(self, tag: int, land: Callable[[Any], Any] | None) -> Receiving:
        """Await the next message of `tag` that nobody awaits yet; `land`, if there is one, puts it in its place."""
        receiving = Receiving(self, tag, land)
        receiving.has_place = land is not None
        self.enlist(receiving)
        return receiving

    def enlist(self, receiving: Receiving) -> None:
        """Await the next message of its tag that nobody awaits yet."""
        key = id(receiving)
        awaited, arrived = self._of_tag(receiving.tag)
        landing = self._landing
        # Nothing is called from here on.
        receiving.is_enlisted = True
        for number in arrived if not awaited else ():
            receiving.message, receiving.number, receiving.has_come = arrived[number], number, True
            landing[number] = receiving
            del arrived[number]
            break
        else:
            awaited[key] = receiving

    def abandon(self, receiving: Receiving) -> None:
        """Stop awaiting the message; if it has come, it becomes the next message of its tag again."""
        awaited, _ = self._of_tag(receiving.tag)
        awaited.pop(id(receiving), None)
        receiving.is_enlisted = False
        if receiving.has_come and not receiving.has_landed:
            # No function is called here. The message goes before those that came later.
            arrived = self.arrived
            arrived[receiving.tag] = {receiving.number: receiving.message, **arrived[receiving.tag]}

    def land(self) -> None:
        """Put the messages that have come for handles in their places, even if the handles were dropped."""
        for number in list(self._landing):
            receiving = self._landing.get(number)
            # One without a place of its own can still be abandoned.
            if receiving is not None and receiving.has_place:
                receiving.finish()
            self._landing.pop(number, None)

    def await_arrival(self, receiving: Receiving, slice_s: float) -> None:
        """Take in messages for up to `slice_s` seconds, or until the one of `receiving` has come.

        The first time this enlists `receiving`, so that a call which has not begun to wait leaves nothing behind.
        """
        if not receiving.is_enlisted:
            self.enlist(receiving)
        look = Look(self._crossing, slice_s, receiving.pause_s)
        spin_ns = SPIN_NS if slice_s > 0 else 0
        while not receiving.has_come:
            if self._take_in(spin_ns, look.park_ns()):
                continue
            if self.arrived[receiving.tag]:
                # Another thread has put a message back, which is for whoever has waited longest.
                self._hand_out(receiving.tag)
                continue
            # The ring may have ended in the middle of a message, whose rest will not come.
            if self.has_ended() and not receiving.has_come:
                raise_left()
            spin_ns = 0
            is_over = look.is_over(self)
            receiving.pause_s = look.pause_s
            if is_over:
                return

    def has_news(self, tag: int) -> bool:
        """Return whether `take_arrived` may find a message, or no message will come any more."""
        return self.endpoint.has_news or bool(self.arrived.get(tag))

    def take_arrived(self, tag: int) -> Receiving | None:
        """Take the oldest message of `tag` that is there and that nobody awaits; `abandon` puts it back."""
        self.drain()
        receiving = Receiving(self, tag, None)
        awaited, arrived = self._of_tag(tag)
        # Nothing is called from here on.
        for number in arrived if not awaited else ():
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
                # Another thread is taking in messages, or this one was when a signal handler interrupted it.
                return False
            if not self._take_in(_BARELY_NS, 0):
                return count > 0 or self.endpoint.is_assembling
        return True

    def _of_tag(self, tag: int) -> tuple[dict[int, Receiving], dict[int, Any]]:
        return self._awaited.setdefault(tag, {}), self.arrived.setdefault(tag, {})

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
            arrived[number] = endpoint.message
            for key in awaited:
                # The one that has come, unless another thread has put an older one back.
                for oldest in arrived:
                    receiving = awaited[key]
                    del awaited[key]
                    receiving.message, receiving.number, receiving.has_come = arrived[oldest], oldest, True
                    landing[oldest] = receiving
                    del arrived[oldest]
                    return True
            return True
        return False

    def _hand_out(self, tag: int) -> None:
        """Give the oldest message of `tag` that was put back to the oldest `Receiving` that awaits one."""
        awaited, arrived = self._of_tag(tag)
        landing = self._landing
        # Nothing is called from here on.
        for key in awaited:
            for number in arrived:
                receiving = awaited[key]
                del awaited[key]
                receiving.message, receiving.number, receiving.has_come = arrived[number], number, True
                landing[number] = receiving
                del arrived[number]
                return

    def close(self) -> None:
        """Tell the sender that nobody reads any more. Idempotent."""
        # Copied, because a signal handler that closes this too in the meantime replaces the attribute.
        memory = self._memory
        if memory is NO_RING:
            return
        # Close the endpoint first: ending the ring wakes a waiting thread, which must find it closed.
        self.endpoint.close(refuse_closed)
        rings.ring_end(memory, 0)
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
