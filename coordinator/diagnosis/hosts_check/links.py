"""Measure one pair of hosts: round trip, clocks, large messages, bandwidth, and whether the way back is open too."""

from __future__ import annotations

import socket
import statistics
import time
from contextlib import closing
from typing import Final

import msgspec

from coordinator.addresses.names import Address, addresses_of
from coordinator.diagnosis.clock_offsets import Meeting, Offset, find_offsets
from coordinator.diagnosis.hosts_check.reaching import connect, failure_of
from coordinator.diagnosis.hosts_check.records import Link, LinkFailure, Plan
from coordinator.diagnosis.hosts_check.wire import ENDS, LARGE, RECORD, Broken, Wire, accept, introduce

__all__ = ["Pair", "answer", "listen", "measure"]

_PINGS: Final = 100
# At most this for all small messages; over a slow line there are fewer of them.
_PINGING_S: Final = 1.0
_FEWEST_PINGS: Final = 5
# How long a listener waits for its peer beyond the peer's own deadline, since rounds do not begin at one moment.
_SLACK_S: Final = 1.0

_PING: Final = b"P"
_LARGE: Final = b"L"
_TAKE: Final = b"T"
_GIVE: Final = b"G"
_END: Final = b"E"


class Pair(msgspec.Struct, frozen=True):
    """What a rank knows of the other one of its pair.

    Attributes:
        rank: This rank.
        peer: The other one.
        address: At which the peer listens.
        port: There.
        source: This rank's own address.
    """

    rank: int
    peer: int
    address: str
    port: int
    source: str

    @property
    def where(self) -> str:
        """Return where the peer listens, for texts."""
        return f"{self.address} port {self.port}"

    def failed(self, failure: LinkFailure, **measured: float | None) -> Link:
        """Return the link that does not work."""
        return Link(
            source=self.rank,
            target=self.peer,
            address=self.where,
            failure=failure,
            **measured,  # type: ignore[arg-type]
        )


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of `address`, and nowhere else.

    Raises:
        OSError: It cannot.
    """
    target = addresses_of(address, 0)[0]
    return socket.create_server(target.target, family=target.family, backlog=16)


def measure(pair: Pair, plan: Plan, listener: socket.socket, timeout_s: float) -> Link:
    """Connect to the other rank and measure the way; then let it connect back. For the first rank of a pair."""
    begin = time.monotonic()
    link = _measured(pair, plan, timeout_s)
    # The peer connects back when it has served this rank, or has waited in vain.
    waits_s = (2 * timeout_s + _SLACK_S - (time.monotonic() - begin)) if link.failure else 0.0
    back = accept(listener, plan.token, pair.peer, time.monotonic() + max(waits_s, 0.0) + timeout_s)
    if back is not None:
        back.close()
    return link


def answer(pair: Pair, plan: Plan, listener: socket.socket, timeout_s: float) -> Link:
    """Serve the first rank while it measures, then connect to it. For the second rank of a pair."""
    wire = accept(listener, plan.token, pair.peer, time.monotonic() + timeout_s + _SLACK_S)
    if wire is not None:
        with closing(wire):
            _serve(wire, plan, timeout_s)
    try:
        wire, took_ms = _opened(pair, plan, timeout_s)
    except Broken as broken:
        return pair.failed(broken.failure)
    wire.close()
    return Link(source=pair.rank, target=pair.peer, address=pair.where, connect_ms=took_ms)


def _opened(pair: Pair, plan: Plan, timeout_s: float) -> tuple[Wire, float]:
    target = addresses_of(pair.address, pair.port)[0]
    try:
        connection, took_ms = connect(Address(target.family, target.target), timeout_s, pair.source)
    except OSError as error:
        raise Broken(failure_of(error, pair.where, timeout_s)) from None
    wire = Wire(connection, pair.where)
    try:
        introduce(wire, plan.token, pair.rank, timeout_s)
    except BaseException:
        wire.close()
        raise
    return wire, took_ms


def _measured(pair: Pair, plan: Plan, timeout_s: float) -> Link:
    try:
        wire, took_ms = _opened(pair, plan, timeout_s)
    except Broken as broken:
        return pair.failed(broken.failure)
    with closing(wire):
        try:
            round_trip_us, clock = _ping(wire, timeout_s)
        except Broken as broken:
            return pair.failed(broken.failure, connect_ms=took_ms)
        try:
            _send_large(wire, pair, timeout_s)
            sent = _upload(wire, plan.bulk_s, timeout_s)
            received = _download(wire, plan.bulk_s, timeout_s)
            wire.send(RECORD.pack(_END, 0.0), timeout_s)
        except Broken as broken:
            return pair.failed(broken.failure, connect_ms=took_ms, round_trip_us=round_trip_us)
        return Link(
            source=pair.rank,
            target=pair.peer,
            address=pair.where,
            connect_ms=took_ms,
            round_trip_us=round_trip_us,
            sent_gbit=sent,
            received_gbit=received,
            clock=clock,
        )


def _ping(wire: Wire, timeout_s: float) -> tuple[float, Offset]:
    """Return the median time of a small message there and back in us, and how the clocks relate."""
    took_ns, meetings = list[int](), list[dict[int, Meeting]]()
    end = time.monotonic() + _PINGING_S
    for number in range(_PINGS):
        if number >= _FEWEST_PINGS and time.monotonic() > end:
            break
        begin_ns, begin = time.time_ns(), time.perf_counter_ns()
        wire.send(RECORD.pack(_PING, 0.0), timeout_s)
        came_ns, left_ns = ENDS.unpack(wire.receive(ENDS.size, timeout_s))
        took_ns.append(time.perf_counter_ns() - begin)
        # The question came not before it was sent, and the answer not before it left: each is an end on one clock that
        # is not before a begin on the other. A clock that is set meanwhile shows as a contradiction.
        meetings.append({0: Meeting(begin_ns, begin_ns + took_ns[-1]), 1: Meeting(left_ns, came_ns)})
    best = sorted(range(len(meetings)), key=took_ns.__getitem__)[: len(meetings) // 2 + 1]
    return statistics.median(took_ns) / 1e3, find_offsets((meetings[each] for each in best), 2)[1]


def _send_large(wire: Wire, pair: Pair, timeout_s: float) -> None:
    """Send what does not fit into one packet.

    Raises:
        Broken: It does not come through, though small messages do.
    """
    try:
        wire.send(RECORD.pack(_LARGE, 0.0), timeout_s)
        wire.send(bytes(LARGE), timeout_s)
        content = wire.receive(LARGE, timeout_s)
    except Broken as broken:
        if broken.failure.kind != "timed out":
            raise
        text = (
            f"messages of 64 bytes pass to {pair.where}, and {LARGE >> 10} KiB do not come there and back within "
            f"{timeout_s:g} s"
        )
        raise Broken(LinkFailure("large messages", text)) from None
    if len(content) != LARGE:
        raise Broken(LinkFailure("error", f"{pair.where} returned {len(content)} bytes"))


def _upload(wire: Wire, seconds: float, timeout_s: float) -> float:
    wire.send(RECORD.pack(_TAKE, seconds), timeout_s)
    wire.send_bulk(seconds, timeout_s)
    return _rate(*ENDS.unpack(wire.receive(ENDS.size, timeout_s)))


def _download(wire: Wire, seconds: float, timeout_s: float) -> float:
    wire.send(RECORD.pack(_GIVE, seconds), timeout_s)
    return _rate(*wire.receive_bulk(seconds + timeout_s, timeout_s))


def _rate(nbytes: int, took_ns: int) -> float:
    """Return gigabits per second."""
    return nbytes * 8 / max(took_ns, 1)


def _serve(wire: Wire, plan: Plan, timeout_s: float) -> None:
    """Answer until the other end has measured, or gives up: it is the one that reports what went wrong."""
    waits_s = timeout_s + _SLACK_S  # the other end, which reports, has to give up first
    end = time.monotonic() + plan.bulk_s * 2 + 4 * timeout_s
    try:
        while time.monotonic() < end:
            kind, seconds = RECORD.unpack(wire.receive(RECORD.size, waits_s))
            came_ns = time.time_ns()
            if kind == _PING:
                wire.send(ENDS.pack(came_ns, time.time_ns()), timeout_s)
            elif kind == _LARGE:
                wire.send(wire.receive(LARGE, waits_s), timeout_s)
            elif kind == _TAKE:
                wire.send(ENDS.pack(*wire.receive_bulk(plan.bulk_s + waits_s, waits_s)), timeout_s)
            elif kind == _GIVE:
                wire.send_bulk(min(max(seconds, 0.0), plan.bulk_s), timeout_s)
            else:
                return
    except Broken:
        return
