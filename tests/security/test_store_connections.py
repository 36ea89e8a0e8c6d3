"""A connection to the store of a job that is good is kept, whatever came before it, and only its own end counts."""

import os
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
import zmq

from coordinator.security import client as client_module
from coordinator.security import server as server_module
from coordinator.security import store_thread
from coordinator.security.keys import keys_of_rank, keys_of_store
from coordinator.security.opening import connect_to, serve_at
from coordinator.security.records import NO_GENERATION, Kind, pack
from coordinator.security.store import SecuredStore
from shm_broadcast.errors import CapabilityError, UsageError
from tests.handlers import handling_at, raising_at
from tests.harness import run_ranks
from tests.leaks import Snapshot, leaked_since
from tests.ports import listening_ports
from tests.relay import relay_to
from tests.secured import DEADLINE_S, HERE, SECRET, check_nothing, joined, place, ranks_of, served, server_of
from tests.waiting import sleeping_in, wait_until
from tests.worlds import meet

# A busy machine may take this long. A silent connection at a loopback address ends after 22 s.
AT_ONCE_S = 10.0

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


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        (client_module, UsageError, "refuses rank 1: a record of a store has version 2, this is version 1"),
        (server_module, dist.DistNetworkError, "a record of a store has version 2, this is version 1"),
    ],
)
def test_two_versions_that_meet_say_so_at_once(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, error: type[Exception], text: str
) -> None:
    """Whichever end is the newer one: nobody waits for the deadline of a minute."""

    def newer(kind: int, *fields: Any) -> bytes:
        record = bytearray(pack(kind, *fields))
        record[1] += 1
        return bytes(record)

    with served() as first:
        monkeypatch.setattr(module, "pack", newer)
        with pytest.raises(error, match=text):
            connect_to(place(1), HERE, first.port, DEADLINE_S, check_nothing)
        monkeypatch.undo()


def test_a_store_whose_keys_cannot_be_made_lets_go_of_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """It owns the socket from the beginning, also without CURVE in libzmq."""
    before, others = Snapshot.take(), listening_ports()
    listener = socket.create_server((HERE, 0))
    port = listener.getsockname()[1]
    monkeypatch.setattr(zmq, "has", lambda _feature: False)
    with pytest.raises(CapabilityError, match="without CURVE"):
        serve_at(place(0), HERE, (port, port), DEADLINE_S, check_nothing, listener.detach())
    assert leaked_since(before) == []
    assert listening_ports() == others


CLOSING = (
    *(f"/security/{name}.py" for name in ("client", "server", "store", "store_thread")),
    "/shm_broadcast/threads.py",
)


def test_a_signal_handler_may_close_the_store_that_is_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place where Python would run it: nothing waits for itself, and nothing is closed twice or left open."""
    monkeypatch.setattr(store_thread, "_END_S", 0.2)
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
    monkeypatch.setattr(store_thread, "_END_S", 0.2)
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
        wait_until(lambda: 1 not in ranks_of(first), "the rank's BYE at the server")
    assert leaked_since(before) == []


# --- forked children ------------------------------------------------------------------------------------------


def leaves_a_child(rank: int, world_size: int, directory: Path, dying: int) -> list[Any]:
    """Kill a rank whose forked child lives on; return whom the other one has lost, and whether the address is free."""
    told: list[int] = []
    if rank == 0:
        store = serve_at(place(0), HERE, None, DEADLINE_S, check_nothing)
        (directory / "port.new").write_text(str(store.port))
        (directory / "port.new").rename(directory / "port")
    else:
        wait_until((directory / "port").exists, "the store of rank 0")
        store = connect_to(place(1), HERE, int((directory / "port").read_text()), DEADLINE_S, check_nothing)
    try:
        store.watch(lambda lost, _how: told.append(lost))
        meet(rank, [0, 1], directory, "joined")
        if rank == dying:
            child = os.fork()
            if child == 0:
                signal.pause()
            (directory / "child.new").write_text(str(child))
            (directory / "child.new").rename(directory / "child")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: told, "the loss", timeout_s=AT_ONCE_S)
        return [told, store.port in listening_ports()]
    finally:
        wait_until((directory / "child").exists, "the child")
        os.kill(int((directory / "child").read_text()), signal.SIGKILL)
        store.close()


@pytest.mark.guarantee("K10")
@pytest.mark.parametrize(("dying", "listens"), [(1, True), (0, False)])
def test_a_rank_that_ends_is_lost_at_once_though_a_forked_child_lives_on(dying: int, listens: bool) -> None:
    """The child keeps no copy of a connection, nor of the socket that listens."""
    found = run_ranks(leaves_a_child, 2, dying, expect_dead=[dying], check_leaks=False)
    assert found[1 - dying] == [[dying], listens]


# --- members --------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("K10")
def test_a_second_process_with_the_rank_of_a_live_one_changes_nothing_for_that() -> None:
    """Neither that it leaves nor that it dies: the first one is told of losses, its own is told, and it gets END."""
    told: dict[int, list[int]] = {0: [], 1: []}
    with ExitStack() as stack:
        first = stack.enter_context(served())
        relay, of_two = stack.enter_context(relay_to(first.port)), stack.enter_context(relay_to(first.port))
        first.watch(lambda rank, _: told[0].append(rank))
        (one,) = stack.enter_context(joined(relay.port, 1))
        one.watch(lambda rank, _: told[1].append(rank))
        with joined(first.port, 1):
            assert ranks_of(first) == [0, 1, 1]
        wait_until(lambda: ranks_of(first) == [0, 1], "the BYE of the second process")
        with relay_to(first.port) as its_relay, joined(its_relay.port, 1):
            its_relay.close()
            wait_until(lambda: ranks_of(first) == [0, 1], "the end of the second process")
        assert told == {0: [], 1: []}
        stack.enter_context(joined(of_two.port, 2))
        of_two.close()
        wait_until(lambda: told == {0: [2], 1: [2]}, "both ranks to learn of a loss")
        with joined(first.port, 1):
            relay.close()
            wait_until(lambda: told[0] == [2, 1], "rank 0 to learn of the loss of the first process")


def dialled(context: zmq.Context[Any], rank: int, port: int) -> zmq.Socket[bytes]:
    """Return the socket of a rank that has said HELLO."""
    keys = keys_of_rank(SECRET, "run", rank)
    dialling: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dialling.set(zmq.CURVE_SERVERKEY, keys_of_store(SECRET, "run").public)
    dialling.set(zmq.CURVE_PUBLICKEY, keys.public)
    dialling.set(zmq.CURVE_SECRETKEY, keys.secret())
    dialling.connect(f"tcp://{HERE}:{port}")
    dialling.send(pack(Kind.HELLO, rank, 0, NO_GENERATION))
    return dialling


@pytest.mark.guarantee("K10")
def test_ranks_that_leave_in_order_are_not_lost_though_many_leave_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of rank 0 has come to other things for a while, and then reads a part of what came, 128 BYEs."""
    many, lost = 2 * server_module._BATCH, list[int]()
    with served(world_size=many + 1) as first:
        first.watch(lambda rank, _: lost.append(rank))
        server, goes_on = server_of(first), threading.Event()
        context: zmq.Context[Any] = zmq.Context()
        ranks = [dialled(context, rank, first.port) for rank in range(1, many + 1)]
        wait_until(lambda: len(ranks_of(first)) == 1 + many, "all to be welcomed")
        expire = server._table.expire

        def expire_late(now: float) -> None:
            assert goes_on.wait(DEADLINE_S)
            expire(now)

        monkeypatch.setattr(server._table, "expire", expire_late)
        wait_until(lambda: sleeping_in("expire_late"), "the thread of rank 0")
        for number, rank in enumerate(ranks, 1):
            rank.send(pack(Kind.BYE, number, 0, server.generation))
            rank.close(1000)
        context.term()
        goes_on.set()
        wait_until(lambda: ranks_of(first) == [0], "all to have left")
        assert not first.check(["a"])  # what the server has told before has arrived
    assert lost == []
