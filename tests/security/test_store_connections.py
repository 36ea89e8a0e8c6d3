"""A connection to the store of a job that is good is kept, whatever came before it, and only its own end counts."""

import socket
import threading
import time

import pytest

from coordinator.security import client as client_module
from coordinator.security import server as server_module
from coordinator.security.opening import connect_to, serve_at
from coordinator.security.store import SecuredStore
from tests.handlers import handling_at, raising_at
from tests.leaks import Snapshot, leaked_since
from tests.relay import relay_to
from tests.secured import DEADLINE_S, HERE, check_nothing, joined, place, served, server_of
from tests.waiting import wait_until

NULL_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\3\0NULL" + bytes(48)


@pytest.mark.guarantee("K10")
@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", NULL_GREETING])
def test_a_rank_keeps_the_connection_that_follows_a_failed_one(said: bytes) -> None:
    """Who listened there before rank 0 has ended the first one, with or without a word that zmq does not understand."""
    came: list[SecuredStore] = []
    lost: list[tuple[int, str]] = []

    def join() -> None:
        came.append(connect_to(place(1), HERE, port, DEADLINE_S, check_nothing))

    with socket.create_server((HERE, 0)) as before:
        port = before.getsockname()[1]
        thread = threading.Thread(target=join)
        thread.start()
        first_try, _ = before.accept()
    with first_try:
        assert first_try.recv(1)
        first_try.sendall(said)
    with served(port=port) as first:
        first.watch(lambda rank, how: lost.append((rank, how)))
        thread.join()
        try:
            time.sleep(3 * client_module._PAUSE_S)
            came[0].set("a", "1")
            assert first.get("a") == b"1"
            assert lost == []
        finally:
            came[0].close()


CLOSING = ("/security/client.py", "/security/server.py", "/security/store.py", "/shm_broadcast/threads.py")


def test_a_signal_handler_may_close_the_store_that_is_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place where Python would run it: nothing waits for itself, and nothing is closed twice or left open."""
    for module in (client_module, server_module):
        monkeypatch.setattr(module, "_END_S", 0.2)
    before = Snapshot.take()
    step, comes = 0, True
    while comes:
        first = serve_at(place(0), HERE, None, DEADLINE_S, check_nothing)
        comes = handling_at(step, first.close, first.close, CLOSING)
        step += 1
    assert step > 10
    assert leaked_since(before) == []


def test_a_close_that_is_interrupted_leaves_nothing_open_once_it_is_called_again() -> None:
    """At every place: what was told to end ends by itself, and the second call does the rest."""
    before = Snapshot.take()
    step, comes = 0, True
    while comes:
        first = serve_at(place(0), HERE, None, DEADLINE_S, check_nothing)
        comes = raising_at(step, first.close, CLOSING)
        first.close()
        step += 1
    assert step > 10
    assert leaked_since(before) == []


def test_a_close_waits_a_while_only_for_who_is_being_told_of_a_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that closes the store may have interrupted who holds a lock. All is released once that goes on."""
    monkeypatch.setattr(client_module, "_END_S", 0.2)
    before = Snapshot.take()
    held, is_told = threading.Lock(), threading.Event()

    def on_lost(rank: int, how: str) -> None:
        is_told.set()
        with held:
            pass

    with (
        served() as first,
        joined(first.port, 1) as (second,),
        relay_to(first.port) as relay,
        joined(relay.port, 2),
    ):
        second.watch(on_lost)
        with held:
            relay.close()
            assert is_told.wait(DEADLINE_S)
            second.close()
        assert "has not ended within 0.2 s, and will later" in caplog.text
        wait_until(lambda: 1 not in server_of(first)._members, "the rank's BYE at the server")
    assert leaked_since(before) == []
