"""The gate that every operation of a group passes: order, health, deadline, refusal and asynchronous hand-over.

`Calls.run` makes a call that is one function; `Calls.receive` one that takes a message, which no signal handler loses;
`Calls.call` guards a block that does more. All admit the call with
`Calls.enter` and report an exception with `Calls.unwind`; the hottest methods call these two themselves. A counter or a
record of every operation belongs there. Only an object that `broadcast_object` sends through a queue of one host passes
beside the gate; the queue's endpoint counts it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableSequence, Sequence
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Final, Literal, NoReturn, Required, TypedDict, TypeVar, Unpack, overload

import torch

from coordinator import gradients
from device_comm import checks
from device_comm.async_calls import Aside, CallHandle, CallLine
from device_comm.health import GroupHealth
from device_comm.stages import HOOKED, refuse_between, without_place
from shm_broadcast.codec.hooks import RUNNING, is_inside
from shm_broadcast.errors import CapabilityError, ClosedError, CommError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.timeouts import AnyTimeout, seconds

logger: logging.Logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# The plane whose collectives a call is one of.
Plane = Literal["host", "device"]

# Whose methods make the calls of a group.
_PACKAGES: Final = ("coordinator", "device_comm")


class Blocking(TypedDict, total=False):
    """The last keyword arguments of a collective that returns its result; for overloads."""

    timeout_s: AnyTimeout
    async_op: Literal[False]


class Async(TypedDict, total=False):
    """The last keyword arguments of a collective that returns a handle; for overloads."""

    timeout_s: AnyTimeout
    async_op: Required[Literal[True]]


def limit_of(timeout_s: AnyTimeout) -> float | None:
    """Return a deadline in seconds, or None for one that the call itself refuses later, in its turn."""
    try:
        return None if timeout_s is None else seconds(timeout_s)
    except UsageError:
        return None


class Calls:
    """The gate of one group.

    Collectives keep one order on all ranks. Those with `async_op=True` stand in line, and the group's own thread makes
    them. One without it waits until the line is empty. Point-to-point calls and object broadcasts pass
    `in_line=False`: each pair of ranks has its own order, and these calls wait for no open call.
    """

    def __init__(
        self,
        health: GroupHealth,
        device: torch.device,
        *,
        is_alone: bool = False,
        is_collecting: Callable[[], bool] = bool,
        aside: Aside | None = None,
    ) -> None:
        """Admit calls at once; start no thread yet.

        Args:
            health: The group's shared state.
            device: The device of the group's tensors.
            is_alone: Whether there is no other rank to wait for. Asynchronous calls are then made at once.
            is_collecting: Returns whether the device communicator queues calls later; by default it never does.
            aside: Where an accelerator carries out asynchronous calls; by default on its current stream.
        """
        self._health = health
        self._device = device
        self._is_collecting = is_collecting
        self._line = CallLine(health, device, is_alone=is_alone, aside=aside)
        # Every call checks it, which takes 20 ns while it is empty.
        self._open = self._line.open
        # As this one, and the codec's table of functions that run; see `refuse_inside`.
        self._composed = health.composed

    @property
    def group_name(self) -> str:
        """Return the group's unique name."""
        return self._health.name

    def enter(self, name: str, in_line: bool = True, timeout_s: AnyTimeout = None) -> AnyTimeout:
        """Admit the call `name`, whose deadline is `timeout_s`, or raise the reason why it cannot be made.

        Returns:
            The deadline that the call has from here on: what the wait for open asynchronous calls has left of
            `timeout_s`. Without one, that wait ends with the deadlines of those calls, and then the group's counts.

        Raises:
            UsageError: This process is a forked child of the group's owner. Or asynchronous calls, behind which the
                call has its place, were open until its deadline. Or a signal handler makes it between the parts of a
                call of this thread, or a function of the codec inside of one. It has taken no number.
            ClosedError: The group was destroyed.
            GroupBrokenError: An earlier failure broke the group.
        """
        if in_line and self._open:
            left_s = self._line.settle(name, limit_of(timeout_s))
            # A deadline that the call refuses stays what it is.
            timeout_s = timeout_s if left_s is None else left_s
        if RUNNING or self._composed:
            self.refuse_inside(name, in_line)
        self._health.check_usable(name)
        return timeout_s

    def refuse_inside(self, name: str, in_line: bool = True) -> None:
        """Raise `UsageError` as `enter` does for a call that this thread makes inside of another one of the group."""
        if RUNNING and is_inside(self._is_call):
            raise without_place(self._health, name, HOOKED)
        if in_line and self._composed:
            refuse_between(self._health, name)

    def _is_call(self, frame: FrameType) -> bool:
        """Return whether `frame` is that of a method of ours that works for this group."""
        code = frame.f_code
        if not code.co_argcount or code.co_varnames[0] != "self":
            return False
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        return package in _PACKAGES and getattr(frame.f_locals["self"], "_health", None) is self._health

    def unwind(self, name: str, error: BaseException, plane: Plane | None = None) -> None:
        """Note that `error` ends the call `name`; its arguments are those of `refuse`.

        What carries the call has broken the group already, if `error` left the call halfway.
        """
        if isinstance(error, UsageError):
            self.refuse(name, error, plane)

    def refuse(self, name: str, error: UsageError, plane: Plane | None = None) -> None:
        """Log that this rank refused a call: nothing was sent, and the group stays usable.

        Args:
            name: The name of the call.
            error: The refusal. It counts once, also if it passes the gates of several calls.
            plane: The plane of a collective. The refused call takes its number, and the other ranks' call raises.
        """
        # What a signal handler raises has refused nothing: it may come when the call is complete.
        if isinstance(error, ClosedError) or error.is_told or raised_by_handler(error):
            return
        fields = self._health.log_fields(name)
        logger.debug("%s: refused: %s", self._health.where(name), error, extra=fields)
        if plane is not None:
            error.is_told = True
            self._take_number(name, error, plane)

    def _take_number(self, name: str, error: CommError, plane: Plane) -> None:
        """Take the number of the call that `error` refuses, behind the calls that are open, and tell the others."""
        health = self._health
        self._line.follow(name, partial(health.refusals.refuse, health, plane, f"{name}: {error}"))

    def refuse_unadmitted(self, name: str, error: UsageError) -> NoReturn:
        """Raise `error`, which refuses a collective of the device plane before it was admitted; see `refuse`.

        Raises:
            UsageError: The refusal.
            Others: As `enter`: a group that cannot be used says so first.
        """
        self.enter(name, in_line=False)
        self.refuse_inside(name)
        self.refuse(name, error, "device")
        raise error

    @overload
    def run(
        self, name: str, target: Callable[..., Result], *args: Any, **how: Unpack[Blocking]
    ) -> Result: ...

    @overload
    def run(
        self,
        name: str,
        target: Callable[..., Result],
        *args: Any,
        timeout_s: AnyTimeout = None,
        async_op: bool,
        on_host: bool = False,
    ) -> Result | CallHandle[Result]: ...

    def run(
        self,
        name: str,
        target: Callable[..., Result],
        *args: Any,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
        on_host: bool = False,
    ) -> Result | CallHandle[Result]:
        """Make a collective, or hand it over to the group's thread.

        Args:
            name: The name of the call, for errors.
            target: The function that makes the call. It takes `args` and `timeout_s`, checks them, blocks, and returns
                the result.
            args: The first one may be the tensor that is sent, or a list of tensors.
            timeout_s: Deadline in any form; None means the group's. The function gets it in seconds.
            async_op: Whether to return a handle at once.
            on_host: Whether the host plane makes the call, even if the group's tensors are on an accelerator.
        """
        if async_op:
            return self._hand_over(name, target, args, timeout_s, on_host)
        timeout_s = self.enter(name, timeout_s=timeout_s)
        if torch.is_grad_enabled():
            self.refuse_lost_gradient(name, args)
        return self._make(name, target, args, timeout_s, "host" if on_host else "device")

    def refuse_lost_gradient(self, name: str, arguments: Sequence[object]) -> None:
        """Refuse a call that would lose the gradient of one of its arguments; see `gradients`."""
        try:
            gradients.refuse_lost_gradient(name, arguments, len(self._health.ranks))
        except UsageError as error:
            self.refuse(name, error, "device")
            raise

    def call(
        self, name: str, timeout_s: AnyTimeout = None, *, in_line: bool = True, plane: Plane | None = None
    ) -> _Call:
        """Return the guard of a block that makes the call `name`; entering it admits the call.

        Args:
            name: The name of the call, for errors.
            timeout_s: The caller's deadline; the guard checks it, and entering returns it in seconds.
            in_line: Whether the call waits for open asynchronous calls; see the class.
            plane: The plane of a collective; see `refuse`.
        """
        return _Call(self, name, timeout_s, in_line, plane)

    def receive(
        self,
        name: str,
        timeout_s: AnyTimeout,
        take: Callable[[float | None], Result],
        *,
        in_line: bool = False,
    ) -> Result:
        """Return `take(limit_s)`, which makes the call `name` and takes a message as the last thing that it does.

        No function is called after it, not even the end of a `with` block: a signal handler that raised there
        would lose the message. The other arguments are those of `call`.
        """
        timeout_s = self.enter(name, in_line, timeout_s)
        try:
            return take(None if timeout_s is None else seconds(timeout_s))
        except BaseException as error:
            self.unwind(name, error)
            raise

    def close(self, timeout_s: float) -> None:
        """End the group's thread within about `timeout_s` seconds; open calls end with `ClosedError`. Idempotent."""
        self._line.close(timeout_s)

    def _make(
        self,
        name: str,
        target: Callable[..., Result],
        args: tuple[Any, ...],
        timeout_s: AnyTimeout,
        plane: Plane,
    ) -> Result:
        try:
            return target(*args, timeout_s=None if timeout_s is None else seconds(timeout_s))
        except BaseException as error:
            self.unwind(name, error, plane)
            raise

    def _hand_over(
        self,
        name: str,
        target: Callable[..., Result],
        args: tuple[Any, ...],
        timeout_s: AnyTimeout,
        on_host: bool,
    ) -> CallHandle[Result]:
        """Queue a call. Wrong tensors, deadlines and contexts raise here; other errors come by the handle."""
        plane: Plane = "host" if on_host else "device"
        # Lists of our own, which the caller cannot change before the thread reads them.
        args = tuple(list(each) if isinstance(each, MutableSequence) else each for each in args)
        with self.call(name, timeout_s, in_line=False, plane=plane):
            if not on_host and self._is_collecting():
                raise UsageError(
                    f"{self._health.where(name)}: within `device_communicator.group()` a call is queued only when the "
                    "context is left, so a handle could tell nothing of it: make it without async_op"
                )
            for tensor in args[0] if args and isinstance(args[0], Sequence) else args[:1]:
                checks.check_tensor(tensor, self._device, name)
            gradients.refuse_lost_gradient(name, args, len(self._health.ranks))
        make = partial(self._make, name, target, args, timeout_s, plane)
        try:
            # On an accelerator the call only queues work, so it does not block.
            return self._line.submit(name, make, at_once=not on_host and self._device.type != "cpu")
        except CapabilityError as error:
            if raised_by_handler(error):
                raise
            # There is no thread to make it. The other ranks make theirs.
            self._take_number(name, error, plane)
            raise


class _Call:
    """The guard of one call, from its admission to its end."""

    __slots__ = ("_calls", "_in_line", "_name", "_plane", "_timeout_s")

    def __init__(
        self, calls: Calls, name: str, timeout_s: AnyTimeout, in_line: bool, plane: Plane | None
    ) -> None:
        self._calls = calls
        self._plane: Plane | None = plane
        self._name = name
        self._timeout_s = timeout_s
        self._in_line = in_line

    def __enter__(self) -> float | None:
        timeout_s = self._calls.enter(self._name, self._in_line, self._timeout_s)
        if self._plane is not None and not self._in_line:
            self._calls.refuse_inside(self._name)
        if timeout_s is None:
            return None
        try:
            return seconds(timeout_s)
        except UsageError as error:
            self._calls.refuse(self._name, error, self._plane)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._calls.unwind(self._name, error, self._plane)
