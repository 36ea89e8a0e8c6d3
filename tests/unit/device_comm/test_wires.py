"""Connections between leaders: what moves in which order. What faults lead to is in `test_wire_faults.py`."""

import os
import socket
import time
from collections.abc import Iterator

import pytest

from device_comm.cpu.several_hosts.wires import Swap, Wire, WireError

# More than the kernel keeps for one connection: the sender waits for the receiver.
LARGE = 32 << 20
PROMPT_S = 20.0


class Pair:
    """Two wires that are connected over TCP, as rank 3 and rank 5 hold them."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname())
            other, _ = server.accept()
        self.ends = [Wire(5, one), Wire(3, other)]
        self.sockets = [one, other]

    def close(self) -> None:
        for each in self.ends:
            each.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Connect two wires, and close them."""
    found = Pair()
    yield found
    found.close()


def memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def finish(*swaps: Swap) -> None:
    """Poll the swaps in turn until all are complete."""
    left, end = list(swaps), time.monotonic() + PROMPT_S
    while left:
        assert time.monotonic() < end, "a swap does not end"
        left = [each for each in left if not each.poll(0.01)]


@pytest.mark.guarantee("D95")
def test_large_messages_pass_in_both_directions_at_once(pair: Pair) -> None:
    """Neither end waits until the other has read: both send and receive whenever they can."""
    data = [memoryview(os.urandom(LARGE)) for _ in range(2)]
    into = [memory(LARGE) for _ in range(2)]
    for wire, own, theirs in zip(pair.ends, data, into, strict=True):
        wire.send(own)
        wire.receive(theirs)
    swaps = [Swap([wire]) for wire in pair.ends]
    for swap in swaps:
        swap.begin()
    finish(*swaps)
    assert bytes(into[1]) == bytes(data[0])
    assert bytes(into[0]) == bytes(data[1])
    assert all(wire.done == wire.queued == [1, 1] for wire in pair.ends)


@pytest.mark.guarantee("D95")
def test_messages_keep_their_order_and_a_swap_waits_for_its_own_only(pair: Pair) -> None:
    """One that was queued later does not count, and is complete by then if its bytes have come."""
    one, other = pair.ends
    into = [memory(3), memory(LARGE), memory(2)]
    other.receive(into[0])
    first = Swap([other])
    other.receive(into[1])
    other.receive(into[2])
    last = Swap([other])
    for data in (b"abc", bytes(LARGE), b"yz"):
        one.send(memoryview(data))
    sending = Swap([one])
    sending.begin()
    assert first.poll(PROMPT_S)
    assert bytes(into[0]) == b"abc"
    assert not last.poll(0.0)
    finish(sending, last)
    assert bytes(into[2]) == b"yz"


def test_memory_is_kept_until_it_has_been_sent_and_filled(pair: Pair) -> None:
    """A tensor whose caller has gone is not read or written behind its end."""

    class Owner:
        ended = 0

        def __del__(self) -> None:
            Owner.ended += 1

    one, other = pair.ends
    one.send(memory(LARGE), Owner())
    other.receive(memory(LARGE), Owner())
    swaps = Swap([one]), Swap([other])
    for swap in swaps:
        swap.begin()
    assert Owner.ended == 0
    finish(*swaps)
    assert Owner.ended == 2


@pytest.mark.guarantee("D95")
def test_a_sender_to_a_peer_that_closed_fails_without_a_signal(pair: Pair) -> None:
    """SIGPIPE would end a process of an application that has given it its default meaning."""
    one, other = pair.ends
    other.close()

    def send_on() -> None:
        for _ in range(100):
            one.send(memory(1 << 16))
            Swap([one]).begin()
            time.sleep(0.01)

    with pytest.raises(WireError, match="rank 5"):
        send_on()


@pytest.mark.guarantee("D95")
def test_nothing_is_read_behind_a_message_that_a_check_refuses(pair: Pair) -> None:
    """The header of another call comes first; the memory of this one stays as it is."""
    one, other = pair.ends
    into = memoryview(bytearray(b"untouched"))
    seen: list[bytes] = []

    def refuse(header: bytes) -> bool:
        seen.append(header)
        return False

    one.receive(memory(6), check=refuse)
    one.receive(into)
    other.send(memoryview(b"header"))
    other.send(memoryview(b"different"))
    Swap([other]).begin()
    swap = Swap([one])
    assert swap.poll(PROMPT_S)
    assert swap.is_refused
    assert seen == [b"header"]
    assert swap.poll(0.05)
    assert bytes(into) == b"untouched"


def test_a_forked_child_leaves_the_connection_to_its_parent(pair: Pair) -> None:
    """Its copy of the descriptor is closed, so that the other end hears of its parent's death; it ends nothing."""
    one, other = pair.ends
    child = os.fork()
    if child == 0:
        is_closed = one._connection.fileno() == -1
        one.shut()
        one.close()
        os._exit(0 if is_closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    other.send(memoryview(b"still here"))
    Swap([other]).begin()
    into = memory(10)
    one.receive(into)
    assert Swap([one]).poll(PROMPT_S)
    assert bytes(into) == b"still here"


def test_a_closed_wire_fails_and_closes_again() -> None:
    """A thread that waited when another destroyed the group finds out."""
    pair = Pair()
    one = pair.ends[0]
    one.receive(memory(1))
    swap = Swap([one])
    pair.close()
    pair.close()
    with pytest.raises(WireError, match="rank 5"):
        swap.poll(0.1)
