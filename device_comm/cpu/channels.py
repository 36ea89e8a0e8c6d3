"""Point to point between the ranks of one host: for each ordered pair of ranks a ring in memory that both share.

A channel is made by whichever of its two ranks needs it first. It carries whole objects, each with a tag. Objects of
one tag arrive in order. A receiver sets an object aside if it waits for another one that is behind it.

A call that waits here, to send or to receive, meanwhile takes in what other ranks send. Messages of any size that cross
each other, or form a circle, therefore make progress as long as every rank involved is in such a call.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeVar

from device_comm import _core
from device_comm.cpu.channel_ends import UNSENT, LeftError, NestedError, Undecodable, raise_left
from device_comm.cpu.channel_receiver import ChannelReceiver, Receiving, ReceivingAll
from device_comm.cpu.channel_sender import ChannelSender, Sending, Writing
from device_comm.cpu.receiving_any import ReceivingAny
from device_comm.cpu.shown_channels import ShownChannels
from device_comm.handles import CompletedHandle, Handle, PointToPointHandle
from device_comm.health import GroupHealth, Operation, Pollable
from device_comm.stages import until
from device_comm.works import WaiterThreads
from shm_broadcast import _core as rings
from shm_broadcast import codec
from shm_broadcast.errors import CapabilityError, CommError, InternalError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.layout import segment_bytes
from shm_broadcast.segment import Segment

# Bytes of records in a channel. The channel owns a message of up to half of this at once, unless it is full
# or earlier messages wait; a longer one streams through. This much stays in the second-level caches, so data
# is read before it gets to memory.
CHANNEL_BYTES: Final = 1 << 20

# Making a channel takes less than 1 ms. The other rank checks this often whether it is ready.
_MAKING_S: Final = 0.0001
_MAKING_DEADLINE_S: Final = 30.0
# Where the host has a core for each rank, a receive polls for this long in one native call, before it makes what a
# longer wait needs. Two ranks that answer each other then take 2.5 us for a small object in place of 5.9, and 14 us in
# place of 18 for 128 KB of tensors. With 8 ranks on two cores a message would take 125 us in place of 80.
_FIRST_SPIN_NS: Final = 60_000


_End = TypeVar("_End", ChannelSender, ChannelReceiver)

# Replaces the table when the channels are closed; every native function refuses it.
_NO_TABLE: Final = memoryview(b"")


def room_bytes(world_size: int) -> int:
    """Return the size of the room for all channels of a group, which take memory only when they are made."""
    return world_size * world_size * _stride()


def _stride() -> int:
    return segment_bytes(CHANNEL_BYTES, 1)


class _Making:
    """A channel that the other rank makes; see `Pollable`."""

    def __init__(self, channels: Channels, src: int, dst: int, peer: int) -> None:
        self._channels = channels
        self._pair = (src, dst)
        self._peer = peer

    def poll(self, slice_s: float) -> bool:
        until = time.monotonic() + slice_s
        while self._channels.state(*self._pair) == _core.CHANNEL_MAKING:
            if time.monotonic() >= until:
                return False
            time.sleep(_MAKING_S)
        return True

    def pending(self) -> tuple[int, ...]:
        return (self._peer,)


class Channels:
    """The channels of one rank. Ranks here are ranks in the group.

    Several threads may call it, and signal handlers that run inside of a call. A message that is longer than a channel,
    or finds it full, is written by the call that sends it. Until that is done, what other threads send to the same rank
    queues behind it, and a call of the same thread, as in a signal handler, is refused. A thread of ours writes what
    queues, and what `isend` leaves. The handles may be waited for in any thread.
    """

    def __init__(
        self, segment: Segment, table: memoryview, offset: int, health: GroupHealth, rank_in_group: int
    ) -> None:
        """Make nothing yet.

        Args:
            segment: Owned by somebody else.
            table: The part of it that says which channels there are.
            offset: Where the room for the channels begins, behind what is reserved.
            health: The group's shared state.
            rank_in_group: This process's position.
        """
        self._segment = segment
        self._table = table
        self._offset = offset
        self._health = health
        self._rank = rank_in_group
        self._world_size = len(health.ranks)
        self._first_spin_ns = _FIRST_SPIN_NS if self._world_size <= (os.cpu_count() or 1) else 0
        self._others = [rank for rank in range(self._world_size) if rank != rank_in_group]
        self._names = [f"rank {rank}" for rank in health.ranks]
        self._places = {rank: place for place, rank in enumerate(health.ranks)}
        nbytes = _core.BELL_BYTES
        self._bells = [table[nbytes * rank : nbytes * (rank + 1)] for rank in range(self._world_size)]
        self._senders: dict[int, ChannelSender] = {}
        self._receivers: dict[int, ChannelReceiver] = {}
        self._threads = WaiterThreads(f"{health.name}-send")
        # The channels through which a thread waits to receive, by the thread; and those that are being opened. A signal
        # handler that runs in such a call cannot make another one of the same channel.
        self._waits: dict[int, tuple[ChannelReceiver, ...]] = {}
        self._opening: set[tuple[int, int]] = set()
        self._shown = ShownChannels(segment, health, rank_in_group)
        # Held while channels are opened or all are closed; a wait for one may break the group, which closes all.
        self._lock = threading.RLock()
        self.is_closed: bool = False
        # Whether `close` has come to its end.
        self._has_left = False

    # ------------------------------------------------------------------ sending

    def send(self, plane: str, name: str, obj: Any, peers: Sequence[int], tag: int, timeout_s: float) -> None:
        """Send an object to each of `peers`; return when the channels own it.

        One of up to half of `CHANNEL_BYTES` does not wait for its receiver unless the channel is full.

        Raises:
            UsageError: The object cannot be carried; nothing was sent.
            CapabilityError: No thread can be started that the message needs. If a part was sent, the group is broken.
            CommTimeoutError: A receiver made no room in time; the group is broken.
            PeerLostError: A receiver is gone; the group is broken.
        """
        message: codec.Message | None
        if len(peers) > 1:
            message = codec.encode(obj)
        else:
            try:
                message = self._sender(peers[0], name).send_now(obj, tag)
            except UNSENT as error:
                raise self._left(plane, name, "to", peers, error) from error
        if message is not None:
            self.send_message(plane, name, message, peers, tag, timeout_s)

    def send_message(
        self, plane: str, name: str, message: codec.Message, peers: Sequence[int], tag: int, timeout_s: float
    ) -> None:
        """Send an encoded object to each of `peers`; as `send` otherwise."""
        try:
            rest = [peer for peer in peers if not self._sender(peer, name).write_now(message, tag)]
        except UNSENT as error:
            raise self._left(plane, name, "to", peers, error) from error
        if not rest:
            return
        operation = self._operation(plane, name, "to", rest)
        senders = [self._sender(peer, name) for peer in rest]
        # Ask all of them before queueing anything: another thread may begin to write what is queued at once.
        for sender in senders:
            sender.refuse_nested(self._health.where(operation))
        sendings = [Sending(sender, message, tag) for sender in senders]
        end = time.monotonic() + timeout_s
        try:
            own = [sending for sending in sendings if sending.sender.enqueue(sending)]
            # Write our own messages first. Another thread may wait behind one of them, while messages of this
            # call wait behind what that thread writes.
            if own:
                self._health.wait(operation, Writing(self, own), timeout_s)
            for queued in [sending for sending in sendings if sending not in own]:
                self._health.wait(operation, queued, until(end))
        except BaseException as error:
            try:
                self._withdraw(operation, sendings, error)
            except BaseException as second:
                self._health.left.append((operation, second))
                self._health.left_halfway(operation, second)
                raise
            raise

    def isend(
        self, plane: str, name: str, obj: Any, dst: int, tag: int, timeout_s: float, copies: bool = False
    ) -> Handle:
        """Start to send an object; what does not fit into the channel at once is written by a thread.

        Its tensors and large buffers must not change until the handle has been waited for, unless it `copies`.
        """
        sender = self._sender(dst, name)
        try:
            message = sender.send_now(obj, tag)
        except UNSENT as error:
            raise self._left(plane, name, "to", [dst], error) from error
        if message is None:
            return CompletedHandle()
        operation = self._operation(plane, name, "to", [dst])
        sender.refuse_nested(self._health.where(operation))
        if copies and message.buffers:
            message = codec.Message(message.to_bytes(), (), message.nbytes)
        sending = Sending(sender, message, tag)
        try:
            sender.enqueue(sending, aside=True)
            return PointToPointHandle(self._health, operation, sending, timeout_s)
        except BaseException as error:
            try:
                self._withdraw(operation, [sending], error)
            except BaseException as second:
                self._health.left.append((operation, second))
                self._health.left_halfway(operation, second)
                raise
            raise

    def _withdraw(self, operation: Operation, sendings: Sequence[Sending], error: BaseException) -> None:
        """Take back the messages of a call that `error` ends. If one is halfway, the group breaks.

        The memory of that message belongs to the caller again, while its channel can carry nothing else
        before the message is whole. If a signal handler raises meanwhile, the caller breaks the group: a
        message that was not taken back would be written later, from memory that has changed.
        """
        halfway = [sending for sending in sendings if not sending.sender.withdraw(sending)]
        if halfway and not (self._health.is_broken or self._health.is_closed):
            self._health.fail(error, str(operation))

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which writes what waits to be sent, on a thread.

        Raises:
            CapabilityError: There is none, and none can be started.
        """
        try:
            self._threads.submit(job)
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            raise CapabilityError(
                f"{self._health.where('send')}: no thread can be started to write a message: {error}",
                requirement="one more thread",
            ) from error

    # ------------------------------------------------------------------ receiving

    def recv(
        self,
        plane: str,
        name: str,
        src: int,
        tag: int,
        timeout_s: float | None,
        land: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return the next object of `tag` from `src`; without a deadline this waits until there is one.

        With `land`, this returns what `land` makes of the object. If a signal handler raises meanwhile, the
        object stays the next one; if `land` raises a `CommError` other than `UsageError`, the object is gone.

        Raises:
            DecodeError: It cannot be decoded; the next one can be received.
            CommTimeoutError: None came in time; the group is broken.
            PeerLostError: The sender is gone; the group is broken.
        """
        receiver = self._receiver(src, name)
        thread, waits = threading.get_ident(), self._waits
        before = waits.get(thread, ())
        if before:
            self._refuse_nested(name, [receiver])
        try:
            # As in `_await`, which is not called here: it would take 0.2 us.
            waits[thread] = (*before, receiver)
            if land is None:
                value = receiver.receive_soon(tag, self._first_spin_ns)
            else:
                value = receiver.land_soon(tag, self._first_spin_ns, land)
        except LeftError as error:
            raise self._left(plane, name, "from", [src], error) from error
        finally:
            if before:
                waits[thread] = before
            else:
                del waits[thread]
        if value is not rings.NOTHING:
            return value
        operation = self._operation(plane, name, "from", [src])
        receiving = Receiving(receiver, tag, land)
        try:
            self._await(operation, receiving, timeout_s, (receiver,))
        except BaseException:
            receiver.abandon(receiving)
            raise
        return receiving.value

    def recv_each(
        self, plane: str, name: str, sources: Sequence[int], tag: int, timeout_s: float
    ) -> list[Any]:
        """Return the next object of `tag` from each of `sources`; raises as `recv`, when all have come.

        If one of them cannot be decoded, all are taken: they belong to one gather. If this is interrupted, none is.
        """
        operation = self._operation(plane, name, "from", sources)
        receivers = tuple([self._receiver(src, name) for src in sources])
        self._refuse_nested(name, receivers)
        receivings = [Receiving(receiver, tag, None) for receiver in receivers]
        try:
            self._await(operation, ReceivingAll(receivings), timeout_s, receivers)
            messages = [receiving.message for receiving in receivings]
            faults = [message.error for message in messages if isinstance(message, Undecodable)]
        except BaseException:
            for receiving in receivings:
                receiving.receiver.abandon(receiving)
            raise
        # Nothing is called from here on, so that no signal handler drops the messages.
        if faults:
            raise faults[0]
        return messages

    def recv_any(
        self,
        plane: str,
        name: str,
        tag: int,
        timeout_s: float | None,
        land: Callable[[Any, int], Any] | None = None,
    ) -> tuple[Any, int]:
        """Return the next object of `tag` that any other rank has sent, and that rank; as `recv` otherwise.

        Each call looks at the ranks in another order: one that always has a message does not keep the others waiting.
        With `land`, what it makes of the object and the rank takes the object's place.

        PeerLostError: One of the other ranks is gone; it might have been the sender.
        """
        # Read first: if another thread has closed the channels before, the next statement says so.
        bells = self._bells
        operation = self._operation(plane, name, "from any of", sorted(self._others))
        receivers = tuple([self._receiver(src, name) for src in self._others])
        self._refuse_nested(name, receivers)
        # The next call begins with another rank, so that a busy one cannot starve the others.
        self._others = [*self._others[1:], self._others[0]]
        awaiting = ReceivingAny(receivers, tag, self, bells[self._rank])
        try:
            self._await(operation, awaiting, timeout_s, receivers)
        except BaseException:
            awaiting.abandon()
            raise
        # Nothing is called from the end of the wait on, so that no signal handler drops the message.
        found = awaiting.found
        if found is None:
            raise InternalError(f"{self._health.where(name)}: the wait has ended before a message came")
        src = self._places[found.receiver.peer]
        if land is None:
            return found.message, src
        try:
            return land(found.message, src), src
        except UsageError:
            # Nothing is called before the message is back: no signal handler drops it.
            found.receiver.arrived[tag] = {found.number: found.message, **found.receiver.arrived[tag]}
            raise
        except BaseException as error:
            if not isinstance(error, CommError) or raised_by_handler(error):
                awaiting.abandon()
            raise

    def _await(
        self,
        operation: Operation,
        work: Pollable,
        timeout_s: float | None,
        receivers: tuple[ChannelReceiver, ...],
    ) -> None:
        """Wait for what comes through `receivers`. A signal handler of this thread cannot receive from them then."""
        thread, waits = threading.get_ident(), self._waits
        before = waits.get(thread, ())
        try:
            waits[thread] = before + receivers
            self._health.wait(operation, work, timeout_s)
        finally:
            # Nothing is called here: no signal handler leaves the mark, or drops a message that has come.
            if before:
                waits[thread] = before
            else:
                del waits[thread]

    def _refuse_nested(self, name: str, receivers: Sequence[ChannelReceiver]) -> None:
        """Raise `UsageError` if this thread waits already for what comes through one of `receivers`.

        The other call goes on only behind this one, which might therefore wait for ever.
        """
        waiting = self._waits.get(threading.get_ident(), ())
        busy = sorted([receiver.peer for receiver in receivers if receiver in waiting])
        if busy:
            raise UsageError(
                f"{self._health.where(name)}: this thread is inside of a call on the channel with rank "
                f"{', '.join(map(str, busy))} already, as in a signal handler or a finalizer"
            )

    def irecv(
        self, plane: str, name: str, src: int, tag: int, timeout_s: float | None, land: Callable[[Any], Any]
    ) -> Handle:
        """Start to receive the next object of `tag` from `src`, for which `land` is called when it has come."""
        operation = self._operation(plane, name, "from", [src])
        receiving = self._receiver(src, name).expect(tag, land)
        return PointToPointHandle(self._health, operation, receiving, timeout_s)

    def drain(self, busy: object) -> bool:
        """Take in what others send, except through the receiver `busy`; tell whether something came or is under way."""
        found = False
        for rank in self._others:
            receiver = self._receivers.get(rank) or self._open_if_made(rank)
            if receiver is not None and receiver is not busy:
                found = receiver.drain() or found
        return found

    # ------------------------------------------------------------------ life

    def _operation(self, plane: str, name: str, direction: str, peers: Sequence[int]) -> Operation:
        # A list, which takes a third of a generator's time: every waiting receive comes here.
        ranks = ", ".join([self._names[peer] for peer in peers])
        return self._health.begin_point_to_point(plane, f"{name} {direction} {ranks}")

    def _left(self, plane: str, name: str, way: str, peers: Sequence[int], error: Exception) -> CommError:
        """Return what to raise for a channel that was closed, or is in use by this thread."""
        operation = self._operation(plane, name, way, peers)
        if isinstance(error, NestedError):
            return UsageError(f"{self._health.where(operation)}: {error}")
        return self._health.explain(operation, error, [self._health.ranks[peer] for peer in peers])

    def _sender(self, peer: int, name: str) -> ChannelSender:
        return self._senders.get(peer) or self._open_end(
            self._senders, ChannelSender, (self._rank, peer), peer, name
        )

    def _receiver(self, peer: int, name: str) -> ChannelReceiver:
        return self._receivers.get(peer) or self._open_end(
            self._receivers, ChannelReceiver, (peer, self._rank), peer, name
        )

    def _open_end(
        self, ends: dict[int, _End], kind: type[_End], pair: tuple[int, int], peer: int, name: str
    ) -> _End:
        """Open this rank's end of the channel of `pair`, to or from `peer`, unless another thread has."""
        with self._lock:
            # Two receivers on one ring would each miss messages.
            if peer in ends:
                return ends[peer]
            if pair in self._opening:
                raise UsageError(
                    f"{self._health.where(name)}: this thread is opening the channel with rank "
                    f"{self._health.ranks[peer]} already, as in a signal handler or a finalizer"
                )
            try:
                self._opening.add(pair)
                memory = self._open(pair, peer, name)
                end = kind(self, memory, self._health.ranks[peer], self._bells[pair[1]])
                self._shown.show(*pair, self._place(*pair))
                # A signal handler may have closed all channels. From the look to the storing nothing is called.
                if not self.is_closed:
                    ends[peer] = end
                    return end
                end.close()
                self._shown.hide()
                raise_left()
            except Exception as error:
                if not self.is_closed or isinstance(error, CommError) or raised_by_handler(error):
                    raise
                # The table and the bells are gone: whatever failed, this is why.
                raise self._left("host", name, "with", [peer], error) from error
            finally:
                self._opening.discard(pair)

    def _open_if_made(self, peer: int) -> ChannelReceiver | None:
        # The lock is taken only if the channel exists and no channel is being opened. A thread that opens one
        # may be in a signal handler that waits for what this thread sends; then the channel is left for
        # later. No function is called between the look at `_opening` and the lock.
        if self.is_closed or self.state(peer, self._rank) != _core.CHANNEL_READY or self._opening:
            return None
        with self._lock:
            if self.is_closed or (peer, self._rank) in self._opening:
                return None
            return self._receiver(peer, "recv")

    def state(self, src: int, dst: int) -> int:
        """Return what the table says of the channel from `src` to `dst`. LeftError: The channels were closed."""
        # Nothing is called between this and the native call.
        if self.is_closed:
            raise_left()
        return _core.channel_state(self._table, self._world_size, src, dst)

    def _open(self, pair: tuple[int, int], peer: int, name: str) -> mmap.mmap:
        """Return the memory of the channel of `pair`, made here or by the other rank, `peer`."""
        operation = self._operation("host", f"{name}: open a channel", "with", [peer])

        def make() -> mmap.mmap:
            self._segment.reserve(self._place(*pair), _stride())
            memory = self._map(*pair)
            rings.ring_format(memory, 1, int.from_bytes(os.urandom(7)))
            # A signal handler may have closed the segment: then this is not its memory, and the channel is not ready.
            if self.is_closed:
                raise_left()
            return memory

        # One call claims the channel, makes it and says that it is made, or missing again. Between these steps a signal
        # handler could leave a claim that nobody ends.
        found, memory = _core.channel_open(self._table, self._world_size, *pair, make)
        while found == _core.CHANNEL_MAKING:
            making = _Making(self, *pair, self._health.ranks[peer])
            self._health.wait(operation, making, _MAKING_DEADLINE_S)
            # This asks again: the rank that failed to make the channel may be trying again.
            found, memory = _core.channel_open(self._table, self._world_size, *pair, make)
        if memory is None:
            memory = self._map(*pair)
        if _core.channel_left(self._table, self._world_size, peer):
            # That rank ended the channels that it saw; this one may be newer.
            rings.ring_end(memory, -1 if peer == pair[0] else 0)
        return memory

    def _place(self, src: int, dst: int) -> int:
        return self._offset + (src * self._world_size + dst) * _stride()

    def _map(self, src: int, dst: int) -> mmap.mmap:
        return self._segment.map(self._place(src, dst), _stride())

    def fail_corrupt(self, peer: int, error: Exception) -> NoReturn:
        """Raise for a channel with rank `peer` that holds no ring: it was closed, or else the group breaks."""
        if self.is_closed:
            raise_left()
        corrupt = InternalError(
            f"{self._health.where('recv')}: the channel with rank {peer} was overwritten: {error}; "
            "the group is now unusable, destroy it"
        )
        self._health.fail(corrupt)
        raise corrupt from error

    def close(self) -> None:
        """Leave all channels; calls that wait, here and for this rank elsewhere, end. Idempotent.

        If a signal handler raises meanwhile, the next call does the rest. If a signal handler closes the
        channels itself, or destroys the group, nothing is left to do.
        """
        if self._health.is_inherited:
            return
        with self._lock:
            if self._has_left:
                return
            self.is_closed = True
            try:
                self._leave()
            except Exception as error:
                # If a signal handler has left them all in the middle of this, the table and the segment are gone.
                if not self._has_left or raised_by_handler(error):
                    raise

    def _leave(self) -> None:
        _core.channel_leave(self._table, self._world_size, self._rank)
        self._shown.hide()
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        # Tell the ranks that made channels which this one has not used that it never will.
        for peer in self._others:
            if peer not in self._receivers and self._is_ready(peer, self._rank):
                rings.ring_end(self._map(peer, self._rank), 0)
            if peer not in self._senders and self._is_ready(self._rank, peer):
                rings.ring_end(self._map(self._rank, peer), -1)
        # Let all that wait for any of several ranks, here and elsewhere, look at all rings again.
        for bell in self._bells:
            rings.bell_sound(bell)
        # No function is called from here on, so that whoever finds the table gone also finds `_has_left` set.
        self._bells = []
        self._table = _NO_TABLE
        self._has_left = True

    def _is_ready(self, src: int, dst: int) -> bool:
        return _core.channel_state(self._table, self._world_size, src, dst) == _core.CHANNEL_READY

    def end_threads(self, timeout_s: float) -> None:
        """Wait until the threads have ended; behind `close`."""
        self._threads.close(timeout_s)
