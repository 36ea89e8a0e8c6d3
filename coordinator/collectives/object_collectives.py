"""The object collectives of a group, which use its host plane and no pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, overload

import torch.distributed as dist

from coordinator.host.object_order import ObjectCall
from coordinator.host.tags import FIRST_OBJECT_TAG, GATHER_TAG, OBJECT_TAG, OBJECT_TAG_COUNT, SCATTER_TAG
from coordinator.planes import GroupPlanes
from coordinator.queues.broadcast_order import refusal_of
from device_comm import checks
from device_comm.handles import Handle
from shm_broadcast import codec
from shm_broadcast._core import NOTHING
from shm_broadcast.errors import CommError, DisagreementError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.timeouts import AnyTimeout


class ObjectCollectives(GroupPlanes):
    """Python objects between ranks.

    A received object equals the sent one in value and type. `shm_broadcast.codec` lists the types that can be sent; an
    application registers its own classes with `register_type` on every rank. For any other type `UsageError` names the
    type and its place in the object, and nothing is sent.

    Receivers wait without limit unless given `timeout_s` (an idle engine is not an error), but they raise when the
    sender dies (`PeerLostError`) or the group is destroyed (`ClosedError`). An object that cannot be decoded raises
    `DecodeError`; the group is intact.
    """

    def broadcast_object(
        self,
        obj: Any | None = None,
        src: int = 0,
        *,
        timeout_s: AnyTimeout = None,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """Return rank `src`'s object on every rank. Collective.

        Args:
            obj: The object on rank `src`; ignored elsewhere.
            src: Rank in the group.
            timeout_s: Deadline in seconds.
            type: The type into which the message is decoded. A message that does not fit raises `DecodeError`.

        Returns:
            The object: on rank `src` `obj` itself, elsewhere a copy that shares nothing.
        """
        # Compared by identity: a bool or a float that equals the rank is refused below. Ranks above 256, which Python
        # does not share, take the slow path.
        if src is self._queue_source and timeout_s is None and type is None:
            # This bypasses the gate, whose two frames delayed all workers by up to 10 us after a pause of 2 ms. The
            # queue is closed when its group is destroyed or breaks, and its endpoint counts the calls.
            try:
                # On a reader a second step takes the object over: no signal handler runs between the two. First the
                # message must prove to belong to this call.
                while (value := self._exchange(obj)) is NOTHING:
                    if self._queue_end.tag != self._order.tag:
                        self._order.sort()
                    elif (value := self._queue_end.message) is not NOTHING:
                        break
                return value
            except DisagreementError:
                raise
            except CommError as error:
                self._blame_queue(error, obj)
        return self._broadcast_object(obj, src, timeout_s, type)

    def _broadcast_object(self, obj: Any, src: int, timeout_s: AnyTimeout, type_: Any) -> Any:
        # Not in `broadcast_object`, where the variables of a nested function would cost each call 0.1 us.
        def take(limit_s: float | None) -> Any:
            checks.check_rank(src, self.world_size, "src")
            return self._broadcast(obj, src, limit_s, type_)

        return self._make_broadcast("broadcast_object", src, timeout_s, take)

    def broadcast_object_list(
        self,
        obj_list: list[Any],
        src: int = 0,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: AnyTimeout = None,
    ) -> list[Any]:
        """Overwrite the objects in `obj_list` on every rank with those of rank `src`; return the list. Collective.

        Args:
            obj_list: A list, of the same length on every rank.
            src: Rank in the group.
            group: None or this group's own `cpu_group` or `device_group`; any other group is refused.
            timeout_s: Deadline in seconds.
        """

        def take(limit_s: float | None) -> list[Any]:
            self._check_own_group(group, (self._cpu_group, self._device_group), "group")
            checks.check_rank(src, self.world_size, "src")
            if not isinstance(obj_list, list):
                raise UsageError(f"obj_list must be a list, not {obj_list.__class__.__name__}")
            received = self._broadcast(obj_list, src, limit_s, list)
            if received is not obj_list:
                if len(received) != len(obj_list):
                    raise UsageError(
                        f"broadcast_object_list: rank {src} sent {len(received)} objects, "
                        f"this rank's list holds {len(obj_list)}"
                    )
                obj_list[:] = received
            return obj_list

        return self._make_broadcast("broadcast_object_list", src, timeout_s, take)

    def all_gather_object(self, obj: Any, *, timeout_s: AnyTimeout = None) -> list[Any]:
        """Return every rank's object, in rank order, on every rank. Collective."""
        with self._calls.call("all_gather_object", timeout_s, plane="host") as limit_s:
            return self._host.all_gather_object(obj, limit_s)

    def gather_object(self, obj: Any, dst: int = 0, *, timeout_s: AnyTimeout = None) -> list[Any] | None:
        """Return every rank's object, in rank order, on rank `dst`; None elsewhere. Collective.

        Raises:
            UsageError: This rank refuses the call; what the others send for it is dropped.
            DisagreementError: On rank `dst`: another rank refused the call (see `.views`), or made another one. The
                next call works.
        """

        def act(call: ObjectCall) -> list[Any] | None:
            def take(limit_s: float | None) -> list[Any] | None:
                checks.check_rank(dst, self.world_size, "dst")
                return self._gather_object(call, obj, dst, limit_s)

            return self._calls.receive("gather_object", timeout_s, take, in_line=True)

        # Before it counts: no other rank makes this call.
        self._calls.refuse_inside("gather_object")
        return self._gathers.make(partial(self._tell_refusal, dst, GATHER_TAG), act)

    def _gather_object(
        self, call: ObjectCall, obj: Any, dst: int, timeout_s: float | None
    ) -> list[Any] | None:
        """Return the objects on rank `dst`, for a call whose arguments were checked."""
        host, name = self._host, "gather_object"
        if self.rank_in_group == dst:
            others = [rank for rank in range(self.world_size) if rank != dst]
            found = self._gathers.receive(
                call, others, lambda sources: host.recv_each(sources, timeout_s, name, GATHER_TAG)
            )
            return [*found[:dst], obj, *found[dst:]]
        try:
            host.send_object(call.message(obj), dst, name, timeout_s, GATHER_TAG)
        except UsageError as error:
            if raised_by_handler(error):
                raise
            # The text is to name a place in `obj`, and not in the message.
            raise refusal_of(obj) or error from None
        return None

    def _tell_refusal(self, root: object, tag: int, call: ObjectCall, reason: str) -> None:
        """Tell those who may wait for this rank that it refuses its call; wait for nobody.

        In a gather these are the root, in a scatter all others if this rank is the root. If this rank passed no valid
        root, they are all others.
        """
        peers = [rank for rank in range(self.world_size) if rank != self.rank_in_group]
        if isinstance(root, int) and not isinstance(root, bool) and 0 <= root < self.world_size:
            is_root = root == self.rank_in_group
            if tag == GATHER_TAG:
                peers = [] if is_root else [root]
            elif not is_root:
                peers = []
        for peer in peers:
            handle = self._host.isend_object(call.refusal(reason), peer, "refuse", None, tag)
            self._open_sends.keep(handle)

    def scatter_object_list(
        self,
        output_list: list[Any],
        input_list: Sequence[Any] | None = None,
        src: int = 0,
        *,
        timeout_s: AnyTimeout = None,
    ) -> Any:
        """Put the i-th object of rank `src`'s list into `output_list[0]` on rank i, and return it. Collective.

        Args:
            output_list: The list whose first element is replaced.
            input_list: On rank `src` one object for each rank, in rank order; ignored elsewhere.
            src: Rank in the group.
            timeout_s: Deadline in seconds; by default receivers wait without limit.

        Raises:
            UsageError: `output_list` is empty, or `input_list` does not hold one object for each rank. Nothing is sent.
            DisagreementError: Rank `src` refused the call (see `.views`), or made another one. The next call works.
        """

        def act(call: ObjectCall) -> Any:
            def take(limit_s: float | None) -> Any:
                checks.check_rank(src, self.world_size, "src")
                return self._scatter_objects(call, output_list, input_list, src, limit_s)

            return self._calls.receive("scatter_object_list", timeout_s, take)

        self._calls.refuse_inside("scatter_object_list", in_line=False)
        return self._scatters.make(partial(self._tell_refusal, src, SCATTER_TAG), act)

    def _scatter_objects(
        self,
        call: ObjectCall,
        output_list: list[Any],
        input_list: Sequence[Any] | None,
        src: int,
        timeout_s: float | None,
    ) -> Any:
        host, name = self._host, "scatter_object_list"
        if not isinstance(output_list, list) or not output_list:
            raise UsageError(f"{name}: output_list must be a list of at least one element")
        if self.rank_in_group != src:
            [output_list[0]] = self._scatters.receive(
                call, [src], lambda _: [host.recv_object(src, timeout_s, None, name, SCATTER_TAG)]
            )
            return output_list[0]
        objects = list(input_list or ())
        if len(objects) != self.world_size:
            raise UsageError(f"{name}: rank src must give {self.world_size} objects, not {len(objects)}")
        # What cannot be encoded is refused before anything is sent.
        messages = [_encoded_part(call, each) for each in objects]
        for rank, message in enumerate(messages):
            if rank != src:
                host.send_message(message, rank, name, timeout_s, SCATTER_TAG)
        output_list[0] = objects[src]
        return output_list[0]

    @overload
    def send_object(
        self,
        obj: Any,
        dst: int,
        async_send: Literal[False] = False,
        tag: int = 0,
        *,
        timeout_s: AnyTimeout = None,
    ) -> None: ...

    @overload
    def send_object(
        self, obj: Any, dst: int, async_send: bool, tag: int = 0, *, timeout_s: AnyTimeout = None
    ) -> list[OpenSend] | None: ...

    def send_object(
        self,
        obj: Any,
        dst: int,
        async_send: bool = False,
        tag: int = 0,
        *,
        timeout_s: AnyTimeout = None,
    ) -> list[OpenSend] | None:
        """Send an object to rank `dst`, which calls `recv_object` with the same `tag`.

        Returns when the transport owns the object. For a small object that is at once, whether or not the receiver has
        called already.

        Args:
            obj: The object.
            dst: Rank in the group.
            async_send: Whether to return at once, as `isend_object` does.
            tag: Objects of one tag arrive in the order in which they were sent, those of another tag independently.
            timeout_s: Deadline in seconds.

        Returns:
            None; with `async_send` a list with the open send, which may be dropped.
        """
        if async_send:
            return [OpenSend(self.isend_object(obj, dst, tag=tag, timeout_s=timeout_s))]
        with self._calls.call("send_object", timeout_s, in_line=False) as limit_s:
            peer = checks.check_peer(dst, self.rank_in_group, self.world_size, "dst")
            self._host.send_object(obj, peer, "send_object", limit_s, _wire_tag(tag))
            return None

    def isend_object(self, obj: Any, dst: int, *, tag: int = 0, timeout_s: AnyTimeout = None) -> Handle:
        """Start to send an object to rank `dst`; it is encoded before this returns.

        Returns:
            A handle that owns the encoded object; it may be waited for more than once, or dropped.
        """
        with self._calls.call("send_object", timeout_s, in_line=False) as limit_s:
            peer = checks.check_peer(dst, self.rank_in_group, self.world_size, "dst")
            handle = self._host.isend_object(obj, peer, "send_object", limit_s, _wire_tag(tag))
            self._open_sends.keep(handle)
            return handle

    def recv_object(
        self,
        src: int,
        tag: int = 0,
        *,
        timeout_s: AnyTimeout = None,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """Receive the next object that rank `src` sent to this rank with `tag`.

        Args:
            src: Rank in the group.
            tag: The tag that the sender passed.
            timeout_s: Deadline in seconds; when it passes, the group is broken.
            type: The type into which the message is decoded.
        """

        def take(limit_s: float | None) -> Any:
            peer = checks.check_peer(src, self.rank_in_group, self.world_size, "src")
            return self._host.recv_object(peer, limit_s, type, "recv_object", _wire_tag(tag))

        return self._calls.receive("recv_object", timeout_s, take)


@dataclasses.dataclass(frozen=True, eq=False)
class OpenSend:
    """A send that was begun with `async_send`.

    Attributes:
        work: Its handle.
    """

    work: Handle

    def is_completed(self) -> bool:
        """Return whether the transport owns what is sent, without waiting. Raises what went wrong."""
        return self.work.is_completed()

    def wait(self) -> None:
        """Wait until the memory may be reused; may be called more than once."""
        self.work.wait()


def _encoded_part(call: ObjectCall, obj: object) -> codec.Message:
    """Return the message of one part of a scatter."""
    try:
        return codec.encode(call.message(obj))
    except UsageError as error:
        if raised_by_handler(error):
            raise
        raise refusal_of(obj) or error from None


def _wire_tag(tag: int) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < OBJECT_TAG_COUNT:
        raise UsageError(f"tag must be an integer from 0 to {OBJECT_TAG_COUNT - 1}, not {tag!r}")
    return FIRST_OBJECT_TAG + tag if tag else OBJECT_TAG
