"""Threads that wait in a transport."""

import threading
import time

import pytest

from device_comm.works import WaiterThreads


def test_closing_while_a_thread_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` joins only threads that have started, whenever it is called."""
    threads = WaiterThreads("test")
    is_starting = threading.Event()
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        if thread.name.startswith("group-coordinator"):
            is_starting.set()
            time.sleep(0.05)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    ran = threading.Event()
    submitter = threading.Thread(target=lambda: threads.submit(ran.set))
    submitter.start()
    assert is_starting.wait(5)
    threads.close(timeout_s=5)
    submitter.join()
    assert ran.wait(5)
    assert not [t for t in threading.enumerate() if t.name.startswith("group-coordinator-test")]
