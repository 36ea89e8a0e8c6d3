"""Show the calls of groups in the traces of torch's profiler.

While `profiling` is in force, the methods of `GroupCoordinator` and its subclasses are replaced in their classes by
ones that record themselves, and so is the function of the gate that makes the calls of compiled graphs, process groups
and the group's own thread. At any other time nothing is asked and nothing differs: a call takes no longer than without
this module.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch.compiler import is_dynamo_compiling
from torch.profiler import record_function

from coordinator.calls import Calls
from coordinator.group import GroupCoordinator

__all__ = ["PREFIX", "RECORDED", "profiling"]

PREFIX: Final = "group_coordinator::"
"""The names of all records begin with it."""

RECORDED: Final = (
    *("all_reduce", "all_reduce_", "all_reduce_add_rms_norm", "all_reduce_add_rms_norm_fp8"),
    *("all_reduce_add_rms_norm_nvfp4", "moe_finalize_all_reduce", "all_reduce_coalesced", "all_sum"),
    *("reduce", "reduce_scatter", "reduce_scatter_coalesced", "reduce_scatter_tensor", "reduce_scatterv"),
    *("reduce_scatterv_into_output", "all_gather", "all_gather_coalesced", "all_gather_into_tensor"),
    *("all_gather_to_list", "all_gatherv", "gather", "scatter", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_flag", "barrier", "monitored_barrier", "dispatch", "dispatch_router_logits"),
    *("combine", "combine_into_output", "all_gather_object", "broadcast_object", "broadcast_object_list"),
    *("gather_object", "scatter_object_list", "broadcast_tensor_dict", "send_tensor_dict"),
    *("recv_tensor_dict", "isend_tensor_dict", "irecv_tensor_dict", "send", "recv", "recv_any", "isend"),
    *("irecv", "batch_isend_irecv", "send_object", "isend_object", "recv_object"),
)
"""The methods of a group that move data or wait for other ranks."""


class _State(threading.local):
    """Whether this thread is in a recorded call: methods that make others are recorded once."""

    is_inside = False


class _Replaced:
    """What was replaced, while it is."""

    # A signal handler that runs while this thread holds it may profile, too.
    lock: Final = threading.RLock()
    users = 0
    originals: Final[list[tuple[type, str, Any]]] = []


_state: Final = _State()


@contextmanager
def profiling() -> Iterator[None]:
    """Let torch's profiler record the calls of all groups of this process; a context manager.

        with profiling(), torch.profiler.profile() as profile:
            step()
        profile.export_chrome_trace("rank0.json")

    Each call is a record `group_coordinator::all_reduce on tp:0`, with the unique name of the group; one that makes
    others is recorded once. A record of an asynchronous call ends when its handle is returned, and one in the group's
    own thread shows the call itself if the profiler records all threads. On an accelerator a record is the time that it
    takes to queue the call. A call takes longer by what the profiler takes for a record, and what torch has compiled is
    compiled once more.

    Not collective. It may be nested, and used by several threads. A signal handler that raises in the microseconds
    between a message's arrival and the end of its record loses the message.
    """
    with _Replaced.lock:
        _Replaced.users += 1
        if _Replaced.users == 1:
            _replace()
    try:
        yield
    finally:
        with _Replaced.lock:
            _Replaced.users -= 1
            if not _Replaced.users:
                while _Replaced.originals:
                    setattr(*_Replaced.originals.pop())


def _replace() -> None:
    for cls in _classes(GroupCoordinator):
        for name in RECORDED:
            original = vars(cls).get(name)
            if original is not None:
                _Replaced.originals.append((cls, name, original))
                setattr(cls, name, _recorded(original, name))
    made = "_make"
    _Replaced.originals.append((Calls, made, vars(Calls)[made]))
    setattr(Calls, made, _recorded_call(vars(Calls)[made]))


def _classes(base: type[Any]) -> set[type[Any]]:
    """Return the classes that hold methods of a group: its bases, and all that are derived from it."""
    found = {cls for cls in base.__mro__ if cls is not object}
    for derived in base.__subclasses__():
        found |= _classes(derived)
    return found


def _recorded(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def recorded(self: GroupCoordinator, *args: Any, **how: Any) -> Any:
        if is_dynamo_compiling() or _state.is_inside:
            return method(self, *args, **how)
        return _record(f"{PREFIX}{name} on {self.unique_name}", method, self, *args, **how)

    return recorded


def _recorded_call(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def recorded(self: Calls, name: str, *args: Any) -> Any:
        if is_dynamo_compiling() or _state.is_inside:
            return method(self, name, *args)
        return _record(f"{PREFIX}{name} on {self.group_name}", method, self, name, *args)

    return recorded


def _record(title: str, method: Callable[..., Any], *args: Any, **how: Any) -> Any:
    _state.is_inside = True
    try:
        with record_function(title):
            return method(*args, **how)
    finally:
        _state.is_inside = False
