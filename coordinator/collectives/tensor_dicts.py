"""Tensor dicts between ranks: to one peer, or from one rank to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from coordinator.collectives.object_collectives import OpenSend
from coordinator.host.tags import DICT_TENSOR_TAG, TENSOR_DICT_TAG
from coordinator.host.tensor_dict_format import (
    WHOLE_TENSORS,
    Landing,
    PackedDict,
    Plane,
    Slicing,
    TensorDictMessage,
    join,
    landing_places,
    pack_whole,
)
from coordinator.planes import GroupPlanes, Result
from device_comm import checks
from device_comm.handles import Handle
from device_comm.health import GRACE_S, Operation
from device_comm.stages import in_parts, in_stages, until
from shm_broadcast import codec
from shm_broadcast.errors import DecodeError, DisagreementError, UsageError
from shm_broadcast.timeouts import AnyTimeout

TensorDict = dict[Any, Any]

# What `irecv_tensor_dict` returns: the dict, the handles of its tensors, and what gathers their slices.
Receiving = tuple[TensorDict | None, list[Handle], list[Callable[[], None]]]

# The tensors that follow a message, by plane.
Parts = Sequence[tuple[Plane, torch.Tensor]]

# The calls that a signal handler can leave between a message and its tensors. They are made before, because whoever
# notes that a call was left must call nothing (`GroupHealth.left_halfway`).
_RECEIVE: Final = Operation("host", "recv_tensor_dict", 0)
_SEND: Final = Operation("host", "send_tensor_dict", 0)
_BROADCAST: Final = Operation("host", "broadcast_tensor_dict", 0)
# The turns of a peer: while one thread moves a message and its tensors, no other thread moves any between them.
_SENDING, _RECEIVING = range(2)


class TensorDicts(GroupPlanes):
    """Tensor dicts. Between ranks of one host a dict is one message; otherwise the larger tensors follow the message.

    On one host a send returns when shared memory owns the dict. That is at once for up to 512 KiB, unless the receiver
    is that far behind. The receiver takes in a larger dict during any point-to-point call of the group. All ranks may
    therefore send first and receive afterwards, whatever the size. Over Gloo a large send waits for its receive. Where
    tensors follow the message, the threads of a rank take turns to send to a rank, and to receive from it.

    Values may be tensors, nested dicts, and all other types of the codec. CPU tensors arrive as CPU tensors; tensors on
    the group's device arrive on the receiver's own device.

    The all-gather optimisation needs an `all_gather_group`: the tensor-parallel group, whose ranks hold the same
    tensors. Each rank then sends only its slice of every tensor whose size that group's world size divides, and the
    receivers all-gather the slices. `all_gather_tensors` overrides this by key (`outer.inner` in nested dicts) for
    tensors that are not equal on those ranks. Sender and receiver must pass the same; otherwise the receiver raises
    `DisagreementError` and the group is broken.
    """

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any],
        dst: int | None = None,
        all_gather_group: GroupPlanes | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        async_send: bool = False,
        timeout_s: AnyTimeout = None,
    ) -> TensorDict | list[OpenSend] | None:
        """Send a tensor dict to rank `dst` (the next one by default); return when its memory may be reused.

        Returns:
            None; in a group of one the dict itself, because no other rank can receive it. With `async_send` it returns
            at once, with the open sends in a list; see `isend_tensor_dict`.
        """
        name = "send_tensor_dict"
        if async_send and self.world_size > 1:
            where = (dst, all_gather_group, all_gather_tensors)
            return [
                OpenSend(each) for each in self.isend_tensor_dict(tensor_dict, *where, timeout_s=timeout_s)
            ]
        with self._calls.call(name, timeout_s, in_line=False) as limit_s:
            if self.world_size == 1:
                return tensor_dict if isinstance(tensor_dict, dict) else dict(tensor_dict)
            peer = self._neighbour(dst, 1, "dst")
            packed = self._host.pack(tensor_dict, _slicing(all_gather_group, all_gather_tensors))
            if packed.is_single:
                self._host.send_object(packed.message(), peer, name, limit_s, TENSOR_DICT_TAG)
                return None
            for handle in self._start(packed, peer, limit_s):
                handle.wait()
            return None

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any],
        dst: int | None = None,
        all_gather_group: GroupPlanes | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        timeout_s: AnyTimeout = None,
    ) -> list[Handle]:
        """Start to send a tensor dict.

        Returns:
            Handles; in a group of one an empty list. Do not change the tensors until you have waited for all handles.
            Their memory is kept until then, even if the handles are dropped.
        """
        with self._calls.call("send_tensor_dict", timeout_s, in_line=False) as limit_s:
            if self.world_size == 1:
                return []
            peer = self._neighbour(dst, 1, "dst")
            packed = self._host.pack(tensor_dict, _slicing(all_gather_group, all_gather_tensors))
            return self._start(packed, peer, limit_s)

    def _start(self, packed: PackedDict, peer: int, timeout_s: float | None) -> list[Handle]:
        """Start to send a dict: first what the host plane carries, then the tensors on the group's device."""

        def stages(timeout_s: float | None) -> list[Handle]:
            handles = self._host.isend_tensor_dict(packed, peer, timeout_s)
            on_device = packed.beside("device")
            if on_device:
                there = self.device_communicator
                with there.group():
                    handles += [there.isend(tensor, peer, timeout_s=timeout_s) for tensor in on_device]
            for handle in handles:
                self._open_sends.keep(handle)
            return handles

        if packed.is_single:
            return stages(timeout_s)
        # Behind a message without its tensors, the receiver would take those of the next dict.
        return self._in_turn(_SEND, _SENDING, peer, timeout_s or self._timeout_s(), stages)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupPlanes | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        timeout_s: AnyTimeout = None,
    ) -> TensorDict | None:
        """Receive a tensor dict from rank `src` (the previous one by default).

        Without `timeout_s` this waits without limit for the start of the dict, but ends when a peer dies or the group
        is destroyed. For each tensor that follows it waits within the group's deadline.

        Returns:
            A new dict of new tensors; None in a group of one.
        """
        tensor_dict, handles, callbacks = self.irecv_tensor_dict(
            src, all_gather_group, all_gather_tensors, timeout_s=timeout_s
        )
        if handles or callbacks:
            try:
                for handle in handles:
                    handle.wait()
                _gather_all(all_gather_group or self, callbacks)
            except BaseException as error:
                self._health.left.append((_RECEIVE, error))
                self._health.left_halfway(_RECEIVE, error)
                raise
        return tensor_dict

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupPlanes | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
        *,
        timeout_s: AnyTimeout = None,
    ) -> tuple[TensorDict | None, list[Handle], list[Callable[[], None]]]:
        """Receive the metadata of a tensor dict, and start to receive its tensors.

        Returns:
            (dict, handles, callbacks). The dict is complete once you have waited for all handles and then run all
            callbacks, in order. CPU tensors from a rank of the same host are complete at once. The callbacks all-gather
            the slices, which is why all ranks of the all-gather group must run them. In a group of one: (None, [], []).
        """
        name = "recv_tensor_dict"

        def receive(peer: int, slicing: Slicing, limit_s: float | None) -> Receiving:
            message = self._host.recv_object(peer, limit_s, None, name, TENSOR_DICT_TAG)
            # Python looks for signals behind a call, but not behind a pattern.
            match message:
                case dict():
                    # The message contains all tensors; a dict whose tensors follow is a `TensorDictMessage`.
                    return message, [], []
            try:
                return self._receive_beside(message, peer, limit_s, slicing, all_gather_group)
            except BaseException as error:
                self._health.left.append((_RECEIVE, error))
                self._health.left_halfway(_RECEIVE, error)
                raise

        def take(limit_s: float | None) -> Receiving:
            if self.world_size == 1:
                return None, [], []
            peer = self._neighbour(src, -1, "src")
            slicing = _slicing(all_gather_group, all_gather_tensors)
            if self._is_whole:
                return receive(peer, slicing, limit_s)
            return self._in_turn(_RECEIVE, _RECEIVING, peer, limit_s, partial(receive, peer, slicing))

        return self._calls.receive(name, timeout_s, take)

    def _receive_beside(
        self,
        message: object,
        peer: int,
        timeout_s: float | None,
        slicing: Slicing,
        all_gather_group: GroupPlanes | None,
    ) -> Receiving:
        """Start to receive the tensors that follow `message`."""
        # The sender is in the middle of its dict: from here on silence is a failure.
        limit_s = timeout_s or self._timeout_s()

        def receive(parts: Parts) -> list[Handle]:
            return [
                self._host.irecv_tensor(tensor, peer, limit_s, DICT_TENSOR_TAG)
                if plane == "host"
                else self.device_communicator.irecv(tensor, peer, timeout_s=limit_s)
                for plane, tensor in parts
            ]

        landing = self._land(message, slicing, receive)
        handles = receive(landing.parts)
        callbacks: list[Callable[[], None]] = [
            partial(_gather_slices, all_gather_group, part, put)
            for part, put in landing.sliced
            if all_gather_group is not None
        ]
        return landing.tensor_dict, handles, callbacks

    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any] | None = None,
        src: int = 0,
        group: dist.ProcessGroup | None = None,
        metadata_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: AnyTimeout = None,
    ) -> TensorDict | None:
        """Return rank `src`'s tensor dict on every rank. Collective.

        Args:
            tensor_dict: The dict on rank `src`; ignored elsewhere.
            src: Rank in the group.
            group: None or this group's own `device_group` or `cpu_group`; any other group is refused.
            metadata_group: None or this group's own `cpu_group`; any other group is refused.
            timeout_s: Deadline in seconds; by default receivers wait without limit.

        Returns:
            On rank `src` the dict itself, elsewhere a new dict of new tensors. A group of one returns what it is given,
            also None.
        """
        name = "broadcast_tensor_dict"

        def take(limit_s: float | None) -> TensorDict | None:
            checks.check_rank(src, self.world_size, "src")
            self._check_own_group(group, (self._cpu_group, self._device_group), "group")
            self._check_own_group(metadata_group, (self._cpu_group,), "metadata_group")
            if self.rank_in_group != src:
                return self._receive_broadcast(src, limit_s)
            if tensor_dict is None:
                if self.world_size == 1:
                    return None
                raise UsageError(f"{name}: rank src must give a tensor dict")
            queue = self._broadcaster
            by_queue = queue is not None and queue.writer == src
            # A queue moves a message of any size as fast as separate tensors.
            packed = (pack_whole if by_queue else self._host.pack)(tensor_dict, WHOLE_TENSORS)
            if packed.is_single:
                self._broadcast(packed.message(), src, limit_s, None)
            else:
                in_parts(self._health, _BROADCAST, partial(self._send_broadcast, packed, src, limit_s))
            return tensor_dict if isinstance(tensor_dict, dict) else dict(tensor_dict)

        return self._make_broadcast(name, src, timeout_s, take, in_line=True)

    def _send_broadcast(self, packed: PackedDict, src: int, timeout_s: float | None) -> None:
        """Send the message of a dict to all ranks, and the tensors that follow it."""
        self._broadcast(packed.message(), src, timeout_s, None)
        self._host.broadcast_tensors(packed.beside("host"), src, timeout_s)
        for tensor in packed.beside("device"):
            self.device_communicator.broadcast(tensor, src, timeout_s=timeout_s)

    def _receive_broadcast(self, src: int, timeout_s: float | None) -> TensorDict | None:
        # When tensors are due, the source is in the middle of its dict. It waits for each receiver within the group's
        # deadline, and names who is missing; a receiver that has all so far would name the source.
        limit_s = timeout_s or self.device_communicator.context.timeout_s + GRACE_S

        def receive(parts: Parts) -> list[Handle]:
            on_host = [tensor for plane, tensor in parts if plane == "host"]
            self._host.broadcast_tensors(on_host, src, limit_s)
            for plane, tensor in parts:
                if plane == "device":
                    self.device_communicator.broadcast(tensor, src, timeout_s=limit_s)
            return []

        def parts() -> TensorDict:
            landing = self._land(message, WHOLE_TENSORS, receive)
            receive(landing.parts)
            return landing.tensor_dict

        message = self._broadcast(None, src, timeout_s, None)
        match message:
            case dict():
                return message
        try:
            return in_parts(self._health, _BROADCAST, parts)
        except BaseException as error:
            # A handler may have raised before that function began.
            self._health.left.append((_BROADCAST, error))
            self._health.left_halfway(_BROADCAST, error)
            raise

    # ------------------------------------------------------------------ helpers

    @property
    def _is_whole(self) -> bool:
        """Whether no tensor follows the message of a dict."""
        return self._host.carries_whole and self.device.type == "cpu"

    def _timeout_s(self) -> float:
        return self.device_communicator.context.timeout_s

    def _in_turn(
        self,
        operation: Operation,
        direction: int,
        peer: int,
        timeout_s: float | None,
        stages: Callable[[float | None], Result],
    ) -> Result:
        """Return `stages(limit_s)`, which moves a message and its tensors, behind other threads of this rank."""
        end = None if timeout_s is None else time.monotonic() + timeout_s

        def turn() -> Result:
            turns = self._dict_turns.take(operation, [peer], direction, end)
            try:
                return stages(None if end is None else until(end))
            finally:
                for each in turns:
                    each.release()

        return in_stages(self._health, operation, turn)

    def _land(self, message: object, slicing: Slicing, receive: Callable[[Parts], list[Handle]]) -> Landing:
        """Allocate the tensors of the dict in `message`; if it cannot be decoded, receive what follows it and raise.

        The group breaks if what follows the message has no place to be received: the next transfer would take it.
        """
        if type(message) is dict:
            return Landing(message)
        if not isinstance(message, TensorDictMessage):
            raise DecodeError(f"expected the message of a tensor dict, received {type(message).__name__}")
        try:
            metadata = codec.decode(message.tree)
        except DecodeError:
            for handle in receive(self._or_fail(message, lambda: landing_places(message, self.device))):
                handle.wait()
            raise
        return self._or_fail(message, lambda: join(metadata, self.device, slicing, message.parts))

    def _or_fail(self, message: TensorDictMessage, make: Callable[[], Result]) -> Result:
        """Return what `make` makes for the tensors of `message`; if it fails while they travel, break the group."""
        try:
            return make()
        except DisagreementError as error:
            self._health.fail(error)
            raise
        except DecodeError as error:
            if not any(map(message.follows, message.slots)):
                raise
            failure = DecodeError(
                f"{error}; tensors of the dict are on their way to this rank, so the group is now unusable, destroy it"
            )
            self._health.fail(failure)
            raise failure from error

    def _neighbour(self, rank: int | None, step: int, name: str) -> int:
        peer = (self.rank_in_group + step) % self.world_size if rank is None else rank
        return checks.check_peer(peer, self.rank_in_group, self.world_size, name)


def _slicing(group: GroupPlanes | None, overrides: Mapping[str, bool] | None) -> Slicing:
    if overrides is not None and not isinstance(overrides, Mapping):
        raise UsageError(
            f"all_gather_tensors must be a dict of bools by key, not {overrides!r}; pass async_send by name"
        )
    if group is None:
        return WHOLE_TENSORS
    if not isinstance(group, GroupPlanes):
        raise UsageError(f"all_gather_group must be a GroupCoordinator, not {type(group).__name__}")
    return Slicing(group.world_size, group.rank_in_group, dict(overrides or {}))


def _gather_all(group: GroupPlanes, callbacks: Sequence[Callable[[], None]]) -> None:
    """Gather the slices of all tensors, as one call of `group`: between two slices its ranks wait for the next one."""

    def stages() -> None:
        for callback in callbacks:
            callback()

    in_parts(group._health, _RECEIVE, stages)  # noqa: SLF001


def _gather_slices(group: GroupPlanes, part: torch.Tensor, put: Callable[[torch.Tensor], None]) -> None:
    """Gather the slices of a tensor from the ranks of `group`, on the device of its tensors."""
    group._calls.enter("recv_tensor_dict")  # noqa: SLF001
    gathered = group.device_communicator.all_gather(part.to(group.device), dim=0)
    put(gathered.to(part.device))
