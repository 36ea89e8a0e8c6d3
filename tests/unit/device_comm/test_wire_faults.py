"""What each kind of connection between leaders does if a peer is late, dead, half-open or wrong, or a call is aborted.

A kind is added to `KINDS`; it has the methods of `Wire`, and `Swap` waits for it. This module is also the program of a
network namespace whose only interface goes down.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from device_comm.cpu.several_hosts.wires import Swap, Wire, WireError
from tests.hosts import ROOT
from tests.probes import requires
from tests.waiting import wait_until

# More than the kernel keeps for one connection: the sender waits for the receiver.
LARGE = 32 << 20
PROMPT_S = 20.0
SILENT_S = 0.5


class Pair:
    """Two connected ends, as rank 3 and rank 5 hold them, and the sockets below them."""

    def __init__(self, connect: Callable[[int, socket.socket], Any], address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as server:
            one = socket.create_connection(server.getsockname()[:2])
            other, _ = server.accept()
        self.ends = [connect(5, one), connect(3, other)]
        self.sockets = [one, other]

    def end(self, how: str) -> None:
        """End the connection at the other end, as its process or its kernel does."""
        if how == "reset":
            self.sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sockets[1].close()
        else:
            self.ends[1].close()

    def close(self) -> None:
        for each in self.ends:
            each.close()


KINDS = {"Wire, IPv4": (Wire, "127.0.0.1"), "Wire, IPv6": (Wire, "::1")}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Connect two ends of each kind, and close them."""
    found = Pair(*KINDS[request.param])
    yield found
    found.close()


def memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def finish(swap: Swap) -> None:
    end = time.monotonic() + PROMPT_S
    while not swap.poll(0.01):
        assert time.monotonic() < end, "a swap does not end"


def error_of(swap: Swap) -> tuple[threading.Thread, list[WireError]]:
    """Wait for a swap on a thread; return that, and a list that gets the error."""
    found: list[WireError] = []

    def wait() -> None:
        try:
            finish(swap)
        except WireError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, found


@pytest.mark.guarantee("D95")
def test_a_late_peer_is_waited_for_in_slices(pair: Pair) -> None:
    """`poll` returns False when its slice has passed, and the next one goes on."""
    one, other = pair.ends
    into = memory(4)
    one.receive(into)
    swap = Swap([one])
    start = time.monotonic()
    assert not swap.poll(0.05)
    assert time.monotonic() - start >= 0.05
    assert swap.pending() is None
    other.send(memoryview(b"late"))
    Swap([other]).begin()
    assert swap.poll(PROMPT_S)
    assert bytes(into) == b"late"


@pytest.mark.guarantee("D95")
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_dead_peer_is_named(pair: Pair, how: str) -> None:
    """Whether its kernel ended the connection in order or not; a message that was cut counts for nothing."""
    one, other = pair.ends
    other.send(memoryview(b"half"))
    Swap([other]).begin()
    pair.end(how)
    one.receive(memory(8))
    swap = Swap([one])
    with pytest.raises(WireError, match="rank 5"):
        finish(swap)
    assert swap.pending() == (5,)
    assert one.done == [0, 0]


@pytest.mark.guarantee("D95")
def test_a_message_that_is_too_short_is_waited_for_until_the_deadline(pair: Pair) -> None:
    """Nobody takes a part for a whole; what comes behind it would fill the rest."""
    one, other = pair.ends
    other.send(memoryview(b"abc"))
    Swap([other]).begin()
    one.receive(memory(4))
    assert not Swap([one]).poll(0.1)
    assert one.done == [0, 0]


@pytest.mark.guarantee("D95")
def test_a_message_that_is_too_long_overwrites_nothing(pair: Pair) -> None:
    """What is left of it is not read before more is asked for, and a header there is refused: then nothing is read."""
    one, other = pair.ends
    both = bytearray(b"....untouched")
    one.receive(memoryview(both)[:4])
    other.send(memoryview(b"too long"))
    Swap([other]).begin()
    assert Swap([one]).poll(PROMPT_S)
    assert one.done == [0, 1]
    assert bytes(both) == b"too untouched"
    one.receive(memory(4), check=lambda header: header == b"next")
    one.receive(memoryview(both)[4:])
    swap = Swap([one])
    assert swap.poll(PROMPT_S)
    assert swap.is_refused
    other.send(memoryview(b"untouch.."))
    Swap([other]).begin()
    assert swap.poll(0.05)
    assert bytes(both) == b"too untouched"


@pytest.mark.guarantee("D95")
@pytest.mark.parametrize("end", [0, 1])
def test_an_abort_in_flight_ends_the_wait_at_both_ends(pair: Pair, end: int) -> None:
    """Whichever end shuts the connection while a large message moves, of which a part has come."""
    one, other = pair.ends
    one.send(memory(LARGE))
    into = memory(2 * LARGE)
    other.receive(into)
    # The sender cannot give all of it to its kernel, as the receiver has not read; then it reads some.
    Swap([one]).begin()
    Swap([other]).begin()
    assert one.done == other.done == [0, 0]
    waits = [error_of(Swap([each])) for each in (one, other)]
    pair.ends[end].shut()
    for thread, found in waits:
        thread.join(PROMPT_S)
        assert not thread.is_alive()
        assert len(found) <= 1
    # The sender may have given all of it to its kernel; the receiver waits for more than that.
    assert len(waits[1][1]) == 1
    assert other.done == [0, 0]


@pytest.mark.guarantee("D95")
@requires("network_namespaces")
@pytest.mark.parametrize("kind", KINDS)
def test_a_half_open_connection_is_waited_for_and_can_be_aborted(kind: str) -> None:
    """The host of the peer has vanished without a word: here the only interface of a namespace goes down.

    The connection reports no end for minutes, and nothing counts as sent or received. Who waits looks for a vanished
    host in between, and aborts the wait, which ends at once although nothing can be sent any more.
    """
    unshare = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    told = subprocess.run(
        [*unshare, sys.executable, "-m", __name__, kind],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == ["quiet", "aborted"]


def set_loopback(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def main(kind: str) -> None:
    """Run in a network namespace of its own."""
    set_loopback("up")
    pair = Pair(*KINDS[kind])
    one, other = pair.ends
    into = memory(4)
    one.receive(into)
    set_loopback("down")
    one.send(memory(LARGE))
    other.send(memoryview(b"lost"))
    Swap([other]).begin()
    swap = Swap([one])
    start = time.monotonic()
    while time.monotonic() - start < SILENT_S:
        assert not swap.poll(0.05)
    assert swap.pending() is None
    assert one.done == [0, 0]
    print("quiet", flush=True)
    thread, found = error_of(swap)
    wait_until(thread.is_alive, "the thread waits")
    one.shut()
    thread.join(PROMPT_S)
    assert not thread.is_alive()
    assert len(found) == 1
    pair.close()
    print("aborted", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
