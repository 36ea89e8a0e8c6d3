"""What the parts of `GroupCoordinator` share: its place in the world and its planes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist

from coordinator.calls import Calls, limit_of
from coordinator.host.frame_turns import FrameTurns
from coordinator.host.object_order import ObjectOrder
from coordinator.host.open_sends import OpenSends
from coordinator.host.plane import HostPlane
from coordinator.queues.broadcast_order import BroadcastOrder, refusal_of
from coordinator.queues.broadcaster import Broadcaster
from device_comm.base import DeviceCommunicator
from device_comm.health import GroupHealth
from shm_broadcast.codec.hooks import RUNNING
from shm_broadcast.errors import CommError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.timeouts import AnyTimeout

Result = TypeVar("Result")

# No caller can pass this as a rank.
_NO_RANK: Final = object()


class GroupPlanes:
    """The attributes that the tensor, object and point-to-point parts of a group build on.

    Attributes:
        unique_name: The group's name with its number, such as `tp:0`; equal on all its ranks.
        rank: Global rank of this process.
        ranks: Global ranks of the group, in group order.
        world_size: Number of ranks in the group.
        rank_in_group: This process's position in `ranks`.
        local_rank: Index of this process's device on its host.
        device: The device of the group's tensors.
        device_communicator: The device plane.
        overridden: Of `all_reduce`, `all_gather` and `reduce_scatter` those that the class replaces, and by which of
            its methods; see `TensorCollectives`.
    """

    unique_name: str
    rank: int
    ranks: list[int]
    world_size: int
    rank_in_group: int
    local_rank: int
    device: torch.device
    device_communicator: DeviceCommunicator
    overridden: ClassVar[Mapping[str, str]] = {}
    _host: HostPlane
    _broadcaster: Broadcaster | None = None
    # Stays when the group is destroyed: the group of the next epoch gets one, too.
    _has_had_broadcaster: bool = False
    # The broadcaster's writer, for `broadcast_object`: the rank whose objects go through the queue.
    _queue_source: object = _NO_RANK
    _exchange: Callable[[Any], Any]
    _queue_end: Any  # the native endpoint of the queue
    _order: BroadcastOrder
    _gathers: ObjectOrder
    _scatters: ObjectOrder
    _health: GroupHealth
    _calls: Calls
    _open_sends: OpenSends
    _dict_turns: FrameTurns
    _cpu_group: dist.ProcessGroup | None
    _device_group: dist.ProcessGroup | None

    def _adopt_queue(self, broadcaster: Broadcaster | None) -> None:
        """Broadcast the objects of the queue's writer through it from now on; None ends this."""
        self._broadcaster = broadcaster
        self._has_had_broadcaster |= broadcaster is not None
        if broadcaster is None:
            self._queue_source = _NO_RANK
            self._order.adopt(None, -1, is_writer=False, is_local=True)
        else:
            writer, self._queue_end = broadcaster.writer, broadcaster.endpoint
            is_writer, is_local = writer == self.rank_in_group, broadcaster.is_local
            # Only the messages of a queue of one host have tags.
            self._queue_source = writer if is_local else _NO_RANK
            if is_local:
                self._exchange = self._queue_end.exchange
            self._order.adopt(self._queue_end, writer, is_writer=is_writer, is_local=is_local)

    def _blame_queue(self, error: CommError, obj: object) -> NoReturn:
        """Raise the group's error for an error of its queue in the broadcast of `obj`."""
        self._health.check_owner("broadcast_object")
        if raised_by_handler(error):
            raise error
        broadcaster = self._broadcaster
        if isinstance(error, UsageError):
            self._calls.refuse("broadcast_object", error)
            if broadcaster is not None and refusal_of(obj) is not None:
                broadcaster.refuse(f"broadcast_object: {error}", self._order)
        if broadcaster is None:
            # Another thread destroyed the group during the call.
            self._health.check_usable("broadcast_object")
            raise error
        broadcaster.blame(error, broadcaster.timeout_s)

    def _broadcast(self, obj: Any, src: int, timeout_s: float | None, type_: Any) -> Any:
        """Return rank `src`'s object, through the queue if `src` is its writer, else over the host plane."""
        broadcaster, order, host = self._broadcaster, self._order, self._host
        order.begin()
        if broadcaster is None or broadcaster.writer != src:
            if self.rank_in_group == src:
                order.send(obj, lambda message: host.broadcast_object(message, src, timeout_s))
                return obj
            return order.receive(src, lambda: host.broadcast_object(None, src, timeout_s), type_)
        if self.rank_in_group != src:
            return broadcaster.receive(timeout_s, type_, order)
        broadcaster.send(obj, timeout_s, order)
        return obj

    def _make_broadcast(
        self,
        name: str,
        src: int,
        timeout_s: AnyTimeout,
        take: Callable[[float | None], Result],
        *,
        in_line: bool = False,
    ) -> Result:
        """Make the object broadcast `name` from rank `src`, as `Calls.receive` does, behind those of other threads.

        If this rank refuses it, the others learn why.
        """
        # Before it counts: no other rank makes this call. What cannot apply is not even called, which takes 0.05 us.
        if in_line or RUNNING:
            self._calls.refuse_inside(name, in_line)
        order, thread = self._order, threading.get_ident()
        while order.holder is not None:
            limit_s = limit_of(timeout_s)
            own_s = self.device_communicator.context.timeout_s if src == self.rank_in_group else None
            left_s = order.await_turn(name, own_s if limit_s is None else limit_s)
            timeout_s = timeout_s if limit_s is None else left_s
        order.holder = thread
        try:
            order.expect(name)
            return self._calls.receive(name, timeout_s, take, in_line=in_line)
        except UsageError as error:
            if not raised_by_handler(error) and order.refuses(error):
                self._tell_refused_broadcast(src, f"{name}: {error}")
            raise
        finally:
            order.holder = None

    def _tell_refused_broadcast(self, src: int, reason: str) -> None:
        broadcaster = self._broadcaster
        if src != self.rank_in_group or isinstance(src, bool):
            self._order.skip()
        elif broadcaster is None or broadcaster.writer != src:
            self._order.send_refusal(reason, lambda message: self._host.broadcast_object(message, src, None))
        else:
            broadcaster.refuse(reason, self._order)

    def _check_own_group(self, group: object, own: tuple[object, ...], name: str) -> None:
        """Raise unless `group` is None, this group or one of its `own` process groups; it is not ignored."""
        if group is None or group is self or any(group is each for each in own):
            return
        raise UsageError(
            f"{name}: {self.unique_name!r} moves data over its own process groups; pass None or the matching one of "
            f"them, not {group!r}"
        )
