"""A connection to the store of a job that is good is kept, whatever came before it, and only its own end counts."""

import socket
import threading
import time

import pytest

from coordinator.security import client as client_module
from coordinator.security.opening import connect_to
from coordinator.security.store import SecuredStore
from tests.secured import DEADLINE_S, HERE, check_nothing, place, served

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
