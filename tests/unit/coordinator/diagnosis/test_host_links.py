"""Connections of the check of hosts: what is measured, who is refused, and how failures are told apart."""

import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest

from coordinator.addresses.names import addresses_of
from coordinator.diagnosis.hosts_check import links
from coordinator.diagnosis.hosts_check.links import Pair, answer, listen, measure
from coordinator.diagnosis.hosts_check.reaching import failure_of, keep_connecting
from coordinator.diagnosis.hosts_check.records import Failure, Link, LinkFailure, Plan
from coordinator.diagnosis.hosts_check.wire import ENDS, LARGE, RECORD, Broken, Wire, accept, introduce
from tests.ports import free_port, listening_addresses

HOST = "127.0.0.1"
TOKEN = "ab" * 32
PLAN = Plan((0, 1), TOKEN, 0.02, 10.0)
WAIT_S = 5.0
SHORT_S = 0.2


@contextmanager
def beside(action: Callable[[], Any]) -> Iterator[None]:
    """Run something on a thread while the block runs."""
    thread = threading.Thread(target=action)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def pair_of(rank: int, listener: socket.socket) -> Pair:
    """Return the pair of a rank whose peer listens there."""
    address, port = listener.getsockname()[:2]
    return Pair(rank, 1 - rank, address, port, address)


def both(timeout_s: float = WAIT_S, host: str = HOST) -> tuple[Link, Link]:
    """Return what two ranks find of each other on this host."""
    found: list[Link] = []
    with (
        closing(listen(host)) as first,
        closing(listen(host)) as second,
        beside(lambda: found.append(answer(pair_of(1, first), PLAN, second, timeout_s))),
    ):
        link = measure(pair_of(0, second), PLAN, first, timeout_s)
    return link, found[0]


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_a_pair_measures_both_directions_and_the_way_back(host: str) -> None:
    """Of one host the clocks are equal, and the error of the offset says so truly."""
    link, back = both(host=host)
    assert (link.failure, back.failure) == (None, None)
    assert (link.source, link.target, back.source, back.target) == (0, 1, 1, 0)
    for value in (link.connect_ms, link.round_trip_us, link.sent_gbit, link.received_gbit, back.connect_ms):
        assert value is not None
        assert value > 0
    assert link.clock is not None
    assert link.clock.error_ns is not None
    # Setting the clock is the only thing that could move it meanwhile: NTP slews by half a thousandth.
    assert abs(link.clock.offset_ns) <= link.clock.error_ns + 1_000_000
    assert back.round_trip_us is None  # it was measured once


@pytest.mark.guarantee("H5")
def test_the_listener_is_bound_to_the_given_address_only() -> None:
    """Not to every interface, whatever is free."""
    before = listening_addresses()
    with closing(listen("127.0.0.2")) as listener:
        assert listener.getsockname()[0] == "127.0.0.2"
        assert set(listening_addresses()) - set(before) == {"127.0.0.2"}


STRANGERS = [
    pytest.param(b"GET / HTTP/1.1\r\n\r\n".ljust(44), id="another protocol"),
    pytest.param(struct.pack("!8s32sI", b"gchosts1", bytes.fromhex("cd" * 32), 0), id="another token"),
    pytest.param(struct.pack("!8s32sI", b"gchosts1", bytes.fromhex(TOKEN), 5), id="another rank"),
    pytest.param(b"gchosts1", id="too short"),
    pytest.param(b"", id="nothing"),
]


@pytest.mark.guarantee("H5")
@pytest.mark.parametrize("hello", STRANGERS)
def test_a_connection_without_the_token_is_closed_and_the_right_one_taken(hello: bytes) -> None:
    """A stranger that comes first keeps nobody out, and gets not a byte."""
    with closing(listen(HOST)) as listener:
        stranger = socket.create_connection(listener.getsockname())
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
        with closing(stranger), closing(socket.create_connection(listener.getsockname())) as honest:
            wire = Wire(honest, "rank 1")
            taken: list[Wire | None] = []
            with beside(lambda: taken.append(accept(listener, TOKEN, 0, time.monotonic() + WAIT_S))):
                introduce(wire, TOKEN, 0, WAIT_S)
            assert taken[0] is not None
            taken[0].close()
            stranger.settimeout(WAIT_S)
            assert received(stranger) == b""


def received(connection: socket.socket) -> bytes:
    """Return what comes; nothing if the other end closes with bytes unread."""
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


@pytest.mark.slow
def test_a_listener_that_does_not_know_the_token_is_no_rank() -> None:
    """It echoes what it gets, which proves nothing."""

    def echo() -> None:
        connection, _ = listener.accept()
        with closing(connection):
            connection.sendall(connection.recv(44)[:32])

    with closing(listen(HOST)) as listener, closing(listen(HOST)) as own, beside(echo):
        link = measure(pair_of(0, listener), PLAN, own, SHORT_S)
    assert link.failure is not None
    assert (link.failure.kind, link.failure.text) == ("error", "what listens there is no rank of this check")


def test_nobody_comes_in_time() -> None:
    """Both ends have deadlines of their own."""
    with closing(listen(HOST)) as listener:
        assert accept(listener, TOKEN, 0, time.monotonic() + 0.05) is None


# --- failures -------------------------------------------------------------------------------------------------


@contextmanager
def peer(exchange: Callable[[Wire], None]) -> Iterator[socket.socket]:
    """Listen as rank 1 does, and do `exchange` with rank 0 once it has shown its token."""

    def serve() -> None:
        wire = accept(listener, TOKEN, 0, time.monotonic() + WAIT_S)
        assert wire is not None
        with closing(wire):
            try:
                exchange(wire)
            except Broken:
                return

    with closing(listen(HOST)) as listener, beside(serve):
        yield listener


def measured(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Link:
    """Return what rank 0 finds, which does not wait long for a way back that does not come."""
    monkeypatch.setattr(links, "_SLACK_S", 0.0)
    with closing(listen(HOST)) as own:
        return measure(pair_of(0, listener), PLAN, own, SHORT_S)


def answer_pings(wire: Wire, ahead_ns: int = 0) -> None:
    """Answer small messages as a host whose clock is ahead by so much; return at the first of another kind."""
    while RECORD.unpack(wire.receive(RECORD.size, WAIT_S))[0] == b"P":
        now_ns = time.time_ns() + ahead_ns
        wire.send(ENDS.pack(now_ns, now_ns), WAIT_S)


@pytest.mark.guarantee("H2")
def test_large_messages_that_vanish_are_told_from_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages were answered, so the round trip is known; a packet size between the hosts is at fault."""

    def swallow(wire: Wire) -> None:
        answer_pings(wire)
        time.sleep(2 * SHORT_S)

    with peer(swallow) as listener:
        link = measured(listener, monkeypatch)
    assert link.failure is not None
    assert link.failure.kind == "large messages"
    assert "messages of 64 bytes pass" in link.failure.text
    assert f"{LARGE >> 10} KiB do not come there and back within 0.2 s" in link.failure.text
    assert link.round_trip_us is not None
    assert link.sent_gbit is None


def test_a_peer_that_is_silent_after_its_hello_has_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the connection, so no firewall is in the way."""
    with peer(lambda _: time.sleep(2 * SHORT_S)) as listener:
        link = measured(listener, monkeypatch)
    assert link.failure is not None
    assert link.failure.kind == "timed out"
    assert "took the connection, and was silent for 0.2 s" in link.failure.text


def test_a_peer_that_ends_in_the_middle_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that has died."""
    with peer(lambda wire: wire.close()) as listener:
        link = measured(listener, monkeypatch)
    assert link.failure is not None
    assert link.failure.kind == "cut off"


@pytest.mark.guarantee("H5")
def test_a_peer_that_never_stops_sending_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a bulk transfer has an end on both sides."""

    def flood(wire: Wire) -> None:
        answer_pings(wire)
        wire.send(wire.receive(LARGE, WAIT_S), WAIT_S)
        wire.receive(RECORD.size, WAIT_S)
        wire.send(ENDS.pack(*wire.receive_bulk(WAIT_S, WAIT_S)), WAIT_S)
        wire.receive(RECORD.size, WAIT_S)
        wire.send_bulk(WAIT_S, WAIT_S)

    with peer(flood) as listener:
        link = measured(listener, monkeypatch)
    assert link.failure is not None
    assert link.failure.kind == "error"
    assert link.failure.text.endswith("does not stop sending")


@pytest.mark.parametrize("ahead_s", [-7200, 5])
def test_the_clock_of_the_peer_is_found_with_its_error(ahead_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added to the peer's clock the offset gives this one's, and the true value lies within the error."""
    found: list[Any] = []

    def stop_behind_pings(wire: Wire, pair: Pair, timeout_s: float) -> None:
        del pair
        wire.send(RECORD.pack(b"E", 0.0), timeout_s)
        raise Broken(LinkFailure("error", "enough"))

    def keep(wire: Wire, timeout_s: float) -> Any:
        found.append(ping(wire, timeout_s))
        return found[0]

    ping = links._ping
    monkeypatch.setattr(links, "_send_large", stop_behind_pings)
    monkeypatch.setattr(links, "_ping", keep)
    with peer(lambda wire: answer_pings(wire, ahead_s * 1_000_000_000)) as listener:
        measured(listener, monkeypatch)
    _, clock = found[0]
    assert abs(clock.offset_ns + ahead_s * 1_000_000_000) <= clock.error_ns + 1_000_000
    assert clock.error_ns < 1_000_000_000


def test_nobody_listens_at_the_port_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses for it."""
    monkeypatch.setattr(links, "_SLACK_S", 0.0)
    with closing(listen(HOST)) as own:
        pair = Pair(0, 1, HOST, free_port(), HOST)
        link = measure(pair, PLAN, own, 0.1)
    assert link.failure is not None
    assert link.failure.kind == "refused"


def test_a_listener_that_comes_late_is_reached() -> None:
    """Rank 0 may start after the others."""
    port = free_port()
    late: list[socket.socket] = []

    def listen_late() -> None:
        time.sleep(0.3)
        late.append(socket.create_server((HOST, port)))

    with beside(listen_late):
        took_ms = keep_connecting(addresses_of(HOST, port), WAIT_S)
    late[0].close()
    assert isinstance(took_ms, float)


@pytest.mark.guarantee("H2")
def test_a_port_at_which_nobody_listens_refuses_until_the_deadline() -> None:
    """It is told from silence."""
    failure = keep_connecting(addresses_of(HOST, free_port()), 0.2)
    assert isinstance(failure, LinkFailure)
    assert failure.kind == "refused"


ERRORS: list[tuple[OSError, Failure]] = [
    (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "refused"),
    (TimeoutError("timed out"), "timed out"),
    (OSError(errno.ETIMEDOUT, "x"), "timed out"),
    (OSError(errno.ENETUNREACH, "x"), "no route"),
    (OSError(errno.EHOSTUNREACH, "x"), "no route"),
    (ConnectionResetError(errno.ECONNRESET, "x"), "cut off"),
    (OSError(errno.EADDRNOTAVAIL, "x"), "error"),
]


@pytest.mark.parametrize(("error", "kind"), ERRORS)
def test_each_answer_of_the_kernel_has_a_kind(error: OSError, kind: Failure) -> None:
    """The text names the place."""
    failure = failure_of(error, "10.0.0.1 port 1", 3.0)
    assert failure.kind == kind
    assert "10.0.0.1 port 1" in failure.text


def test_links_survive_the_store() -> None:
    """What one rank tells, rank 0 reads."""
    link, _ = both()
    assert msgspec.json.decode(msgspec.json.encode(link), type=Link) == link
