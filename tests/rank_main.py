"""The processes that `harness` starts: a server that has imported torch, and the ranks that it forks.

To import torch takes more than a second of processor time; to fork a process that has imported it takes
milliseconds. The server has one thread and never touches CUDA, therefore its forks behave like new interpreters.
A rank that must be a new interpreter (`fresh`) is a fork that then executes one.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import reprlib
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec

from tests.frame_evaluator import COMPILED, frames_compiled
from tests.late_alarms import take_late_alarms
from tests.leaks import Snapshot, leaked_since
from tests.rank_exit import RankExit
from tests.strict import STRICT

__all__ = ["STACKS_SIGNAL", "end_briefly", "import_foreign", "receive", "send"]

STACKS_SIGNAL = signal.SIGUSR2
"""On this signal a rank writes the Python stack of each of its threads into its stacks file."""

FOREIGN = ("torch", "torch.distributed", "pytest")
PRELOADED = (
    "shm_broadcast",
    "device_comm",
    "coordinator",
    "tests.worlds",
)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LENGTH = struct.Struct("<I")

Message = dict[str, Any]


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message; block until the kernel has taken all of it."""
    payload = msgspec.msgpack.encode(message)
    channel.sendall(LENGTH.pack(len(payload)) + payload)


def receive(channel: socket.socket) -> Message | None:
    """Return the next message, or None if the other side is gone. Blocks up to the socket's time-out."""
    header = _read(channel, LENGTH.size)
    payload = None if header is None else _read(channel, LENGTH.unpack(header)[0])
    return None if payload is None else msgspec.msgpack.decode(payload, type=Message)


def _read(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            chunk = channel.recv(size - len(data))
        except ConnectionResetError:
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)


# --- the server -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Foreign:
    """The part of the preloaded modules that is not ours: names of modules, and functions for the end of an object."""

    modules: Collection[str]
    finalizers: Collection[weakref.finalize]


def serve(control: socket.socket) -> None:
    """Fork ranks on request until the harness disconnects."""
    _prctl(
        PR_SET_CHILD_SUBREAPER, 1
    )  # processes that a rank leaves behind become our children, and we can count and reap them
    foreign = import_foreign()
    _import(PRELOADED)
    gc.collect()
    gc.freeze()  # collections in ranks then leave these objects alone, and their pages stay shared
    send(control, {"ready": True})
    while (request := receive(control)) is not None:
        if "spawn" in request:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            pid = _fork_rank(control, descriptors[0], request["spawn"], foreign)
            send(control, {"pid": pid})
        elif "wait" in request:
            send(control, {"status": os.waitpid(request["wait"], 0)[1]})
        else:
            send(control, {"survivors": _reap_group(request["survivors"])})
    end_briefly(foreign)


def import_foreign() -> _Foreign:
    """Import what is not ours, before everything else, so that `end_briefly` can leave it alone."""
    # The first exit function that is registered runs last: others may still import.
    atexit.register(_leave_modules_alone)
    before = set(sys.modules)
    _import(FOREIGN)
    return _Foreign(frozenset(sys.modules) - before, tuple(vars(weakref.finalize)["_registry"]))


def _import(names: Iterable[str]) -> None:
    for name in names:
        # Ignore a failed import: the rank fails with the same error.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _fork_rank(control: socket.socket, descriptor: int, spawn: Message, foreign: _Foreign) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    control.close()
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ.clear()
    os.environ.update(spawn["environ"])
    log = os.open(spawn["log"], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if spawn["fresh"]:
        os.set_inheritable(descriptor, True)
        command = [
            *STRICT,
            "-m",
            __spec__.name,
            "rank",
            str(descriptor),
            spawn["stacks"],
        ]
        os.execve(sys.executable, command, spawn["environ"])
    run_jobs(socket.socket(fileno=descriptor), spawn["stacks"])
    if spawn["brief"]:
        end_briefly(foreign)
    sys.exit(0)


_LEFT_ALONE: set[str] = set()
"""Names of modules that the end of this process does not destroy."""


def end_briefly(foreign: _Foreign) -> None:
    """Skip what an exit does with torch alone, which takes longer than everything else in a rank.

    Python still exits normally: threads are joined, exit functions run, and our modules and all objects are destroyed
    to which torch does not refer. The `foreign` modules stay as they are, operators that torch defined in Python stay
    registered, and the destructors of torch's static objects, which would run after that, are skipped. If a thread is
    left that could use what they destroy, nothing is skipped.
    `tests/unit/project/test_harness.py` shows that our native cores have no static objects with destructors.
    """
    if len(os.listdir("/proc/self/task")) == 1:
        _LEFT_ALONE.update(foreign.modules)
        for finalizer in foreign.finalizers:
            finalizer.atexit = False
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        libc.on_exit(libc._exit, None)  # it was registered last and runs first; it gets the exit status


def _leave_modules_alone() -> None:
    """Hide modules from the interpreter's end, which would destroy their thousands of objects one by one."""
    hidden = [sys.modules.pop(name, None) for name in _LEFT_ALONE]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(hidden))  # this reference is never given back


def _reap_group(group: int) -> list[int]:
    """Reap process group `group`; return [group] if a member is still alive, otherwise []."""
    while True:
        try:
            if os.waitpid(-group, os.WNOHANG)[0] == 0:
                return [group]
        except ChildProcessError:
            break
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    return [group]


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


# --- a rank ---------------------------------------------------------------------------------------------------


def run_jobs(channel: socket.socket, stacks: str) -> None:
    """Run one function after another as the harness asks, until it disconnects."""
    sys.stdin = open(os.devnull)
    errors: list[str] = []
    _collect_hidden_errors(errors)
    faulthandler.enable()
    take_late_alarms()
    # It is never closed; a process that hangs at exit can still write its stacks.
    descriptor = os.open(stacks, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
    with channel:
        jobs = 0
        while (job := receive(channel)) is not None:
            if jobs > 0:
                # What outlives a function is modules for the most part. To look through them after each later function
                # took almost half of the processor time of the pools. There is no garbage now that would be kept.
                gc.freeze()
            jobs += 1
            errors.clear()
            send(channel, _run(job, errors))
    if jobs > 1:
        gc.unfreeze()  # the end of the process destroys what earlier functions have left, too
    sys.stdin.close()


def _run(job: Message, errors: list[str]) -> Message:
    """Run a rank's function; return {"value": ...} or {"failure": text}."""
    try:
        body = _target(job["target"])
        compiled = frames_compiled()
        before = Snapshot.take()
        value = body(job["rank"], job["world_size"], Path(job["directory"]), *job["args"])
        reply = {"value": value}
        msgspec.msgpack.encode(reply)
    except RankExit:
        raise
    except BaseException as error:  # KeyboardInterrupt and other exits from the body are failures too
        return {"failure": _describe(error, job["target"])}
    gc.collect()
    if errors:
        return {"failure": "an error that nobody caught:\n" + "\n".join(errors)}
    leaks = leaked_since(before) if job["check_leaks"] else []
    leaks += _process_group_left()
    leaks += [] if job["compiles"] or frames_compiled() == compiled else [COMPILED]
    return {"failure": "left behind:\n  " + "\n  ".join(leaks)} if leaks else reply


def _target(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    body: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return body


def _process_group_left() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    return ["torch's default process group"]


def _describe(error: BaseException, target: str) -> str:
    """Return the traceback, and the local variables of the last frame in the test's own file."""
    text = "".join(traceback.format_exception(error)).rstrip()
    path = sys.modules[target.partition(":")[0]].__file__ if target.partition(":")[0] in sys.modules else None
    own: FrameType | None = None
    step: TracebackType | None = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == path:
            own = step.tb_frame
        step = step.tb_next
    if own is None:
        return text
    short = reprlib.Repr()
    short.maxstring = short.maxother = 200
    variables = []
    for name, value in own.f_locals.items():
        with contextlib.suppress(Exception):  # a repr may fail; the traceback matters more
            variables.append(f"    {name} = {short.repr(value)}")
    return text + f"\n  local variables of {own.f_code.co_name}:\n" + "\n".join(variables)


def _collect_hidden_errors(errors: list[str]) -> None:
    """Record errors in threads, `__del__` and callbacks, which Python only prints."""

    def unraisable(event: "sys.UnraisableHookArgs") -> None:
        trace = traceback.format_exception(event.exc_type, event.exc_value, event.exc_traceback)
        errors.append(f"{event.err_msg or 'ignored in'} {event.object!r}\n" + "".join(trace))

    def in_thread(event: threading.ExceptHookArgs) -> None:
        trace = traceback.format_exception(event.exc_type, event.exc_value, event.exc_traceback)
        errors.append(f"in thread {getattr(event.thread, 'name', '?')!r}\n" + "".join(trace))

    sys.unraisablehook = unraisable
    threading.excepthook = in_thread


if __name__ == "__main__":
    _channel = socket.socket(fileno=int(sys.argv[2]))
    if sys.argv[1] == "server":
        serve(_channel)
        _channel.close()
    else:
        run_jobs(_channel, sys.argv[3])
