"""The life of a window beside its connection: in which order it is deregistered and freed, and what is staged."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, cast

import pytest
import torch

from device_comm.nccl import connection as module
from device_comm.nccl.connection import NcclConnection
from device_comm.nccl.dtypes import DATA_TYPES
from device_comm.nccl.library import WINDOW_FUNCTIONS, NcclLibrary
from device_comm.nccl.window import Window, Wish, fits, obstacle_of
from shm_broadcast.errors import ClosedError
from tests.log_records import fields_of
from tests.nccl_ranks import FakeProgress
from tests.queues import background
from tests.unit.device_comm.test_nccl_connection import (
    COMM,
    LIMIT_S,
    Library,
    connection_of,
    error_of,
    health_of,
)
from tests.waiting import wait_until

WINDOW = 4096
MEMORY, HANDLE = 0x10000, 0x20


class WindowLibrary(Library):
    """A library with one window; see `Library`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_register = threading.Event()
        self.may_register.set()
        self._is_registering = False

    def call(self, name: str, *arguments: Any, comm: int = 0) -> int:
        """Do what a function of the library does."""
        if name not in WINDOW_FUNCTIONS:
            return super().call(name, arguments[0], comm)
        self.calls.append(name)
        if name == "ncclMemAlloc":
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = MEMORY
        elif name == "ncclCommWindowRegister":
            assert arguments[:3] == (COMM, MEMORY, WINDOW)
            assert arguments[4] == 1
            self._is_registering = True
            assert self.may_register.wait(LIMIT_S)
            self._is_registering = False
            ctypes.cast(arguments[3], ctypes.POINTER(ctypes.c_void_p))[0] = HANDLE
        elif name == "ncclCommWindowDeregister":
            assert (arguments[0], arguments[1].value, self.is_freed) == (COMM, HANDLE, False)
        else:
            assert arguments == (MEMORY,)
            if self._is_registering:
                self.faults.append("ncclMemFree of memory that is being registered")
        return 0

    def ends(self) -> list[str]:
        """Return the calls that end the communicator and its window."""
        return [
            name
            for name in self.calls
            if name.endswith(("Deregister", "Finalize", "Destroy", "Abort", "Free"))
        ]


def connected(library: WindowLibrary, progress: FakeProgress | None = None) -> NcclConnection:
    connection = connection_of(library, progress)
    connection._wish = lambda: Wish(WINDOW, "", lambda *_: None)
    connection.connect()
    assert connection.window is not None
    return connection


@pytest.mark.guarantee("D86")
def test_a_close_deregisters_then_finalizes_then_frees() -> None:
    """Peers' memory is unmapped while the communicator lives, and the memory is freed when nobody can use it."""
    library = WindowLibrary()
    connection = connected(library)
    connection.close()
    assert library.ends() == [
        "ncclCommWindowDeregister",
        "ncclCommFinalize",
        "ncclCommDestroy",
        "ncclMemFree",
    ]
    assert connection.window is None
    assert not library.faults


@pytest.mark.guarantee("D86")
def test_an_abort_of_a_quiet_communicator_deregisters_first() -> None:
    """No kernel uses the window, so it can go before the communicator."""
    library = WindowLibrary()
    connection = connected(library)
    cast("Any", health_of(connection)).watch.lost = lambda: (1,)
    connection.close()
    assert library.ends() == ["ncclCommWindowDeregister", "ncclCommAbort", "ncclMemFree"]


@pytest.mark.guarantee("D86")
@pytest.mark.parametrize("ends", [True, False])
def test_an_abort_beneath_queued_work_leaves_the_window_to_it(
    monkeypatch: pytest.MonkeyPatch, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that runs is ended by the abort before anything goes. Copies that never end keep the memory."""
    monkeypatch.setattr(module, "FLUSH_S", 0.2)
    monkeypatch.setattr(module, "IDLE_S", 0.2)
    library, progress = WindowLibrary(), FakeProgress()
    connection = connected(library, progress)
    progress.stuck = True
    call = library.call

    def abort_ends_work(name: str, *arguments: Any, comm: int = 0) -> int:
        if name == "ncclCommAbort":
            progress.stuck = not ends
        return call(name, *arguments, comm=comm)

    monkeypatch.setattr(library, "call", abort_ends_work)
    connection.close()
    assert library.ends() == ["ncclCommAbort", *(["ncclMemFree"] if ends else [])]
    assert ends or "stays until the process ends" in caplog.text
    fields = {"group": "tp:0", "rank": 0, "call": "destroy", "algorithm": "nccl"}
    assert [fields_of(record) for record in caplog.records] == [fields] * (1 if ends else 2)


def test_memory_is_kept_while_a_thread_registers_it() -> None:
    """A close meanwhile aborts; the memory is freed when the library has returned."""
    library = WindowLibrary()
    library.may_register.clear()
    connection = connection_of(library)
    connection._wish = lambda: Wish(WINDOW, "", lambda *_: None)
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            connection.connect()
        except ClosedError as error:
            errors.append(error)

    with background(connect):
        wait_until(lambda: "ncclCommWindowRegister" in library.calls, "the registration", LIMIT_S)
        with background(connection.close):
            wait_until(lambda: "ncclCommAbort" in library.calls, "the abort", LIMIT_S)
            assert "ncclMemFree" not in library.calls
            library.may_register.set()
    wait_until(lambda: "ncclMemFree" in library.calls, "the end of the memory", LIMIT_S)
    assert len(errors) == 1


@pytest.mark.guarantee("D86")
def test_memory_is_kept_while_a_thread_registers_it_for_a_group_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call that connects has raised, so no call is in the library. The thread that it started is."""
    monkeypatch.setattr(module, "IDLE_S", LIMIT_S)
    library = WindowLibrary()
    library.may_register.clear()
    connection = connection_of(library)
    connection._wish = lambda: Wish(WINDOW, "", lambda *_: None)
    with background(lambda: error_of(connection.connect)) as found:
        wait_until(lambda: "ncclCommWindowRegister" in library.calls, "the registration", LIMIT_S)
        health_of(connection).close()
    assert isinstance(found[0], ClosedError)
    with background(connection.close):
        wait_until(lambda: "ncclCommAbort" in library.calls, "the abort", LIMIT_S)
        time.sleep(0.1)
        library.may_register.set()
    wait_until(lambda: "ncclMemFree" in library.calls, "the end of the memory", LIMIT_S)
    assert not library.faults


@pytest.mark.parametrize(
    ("function", "dtype", "reduction", "count", "expected"),
    [
        ("ncclAllReduce", torch.float32, 0, 1024, True),
        ("ncclAllReduce", torch.float32, 0, 1025, False),
        ("ncclAllReduce", torch.bfloat16, 0, 2048, True),
        ("ncclAllReduce", torch.float16, 0, 1, True),
        ("ncclAllReduce", torch.float16, 0, 0, False),
        ("ncclAllReduce", torch.float16, 4, 1, False),
        ("ncclAllReduce", torch.float64, 0, 1, False),
        ("ncclReduceScatter", torch.float32, 0, 1, False),
    ],
)
def test_what_is_staged(
    function: str, dtype: torch.dtype, reduction: int, count: int, expected: bool
) -> None:
    """Sums of 16 and 32 bit floats that fit, and nothing else; addresses do not matter."""
    for address in (0, 16, 3):
        assert fits(function, (address, address, count, DATA_TYPES[dtype], reduction), WINDOW) is expected


def test_a_staged_call_copies_in_and_out() -> None:
    """The status of the call is settled before the result is copied."""
    done: list[Any] = []
    library = WindowLibrary()

    def all_reduce(*arguments: Any) -> int:
        done.append(arguments)
        return 7

    cast("Any", library).functions = {"ncclAllReduce": all_reduce}
    window = Window(cast("NcclLibrary", library), WINDOW, lambda *copy: done.append(copy))
    assert window.allocate() == ""
    comm = ctypes.c_void_p(COMM)
    assert window.carry("ncclAllReduce", (1, 2, 3, 7, 0), comm, 9, lambda *told: done.append(told))
    assert done == [
        (MEMORY, 1, 12, 9),
        (MEMORY, MEMORY, 3, 7, 0, comm, 9),
        ("ncclAllReduce", 7),
        (2, MEMORY, 12, 9),
    ]
    assert not window.carry("ncclAllReduce", (1, 2, 3, 2, 0), comm, 9, lambda *told: done.append(told))
    assert len(done) == 4


def test_a_library_that_lacks_a_function_says_which() -> None:
    """The reason names the first one that is missing, and since when NCCL has it."""
    library = WindowLibrary()
    cast("Any", library).functions = dict.fromkeys(WINDOW_FUNCTIONS)
    assert obstacle_of(cast("NcclLibrary", library)) == ""
    del cast("Any", library).functions["ncclCommWindowDeregister"]
    assert "has no ncclCommWindowDeregister, which needs NCCL 2.27.0" in obstacle_of(
        cast("NcclLibrary", library)
    )
