"""Links between hosts: who holds them, how they are opened, shared and closed, and when a host counts as vanished."""

import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.bootstrap.agreement.views import Places, View, Views
from coordinator.heartbeats import handshake, links
from coordinator.heartbeats.handshake import Meeting, Target, listen_at
from coordinator.heartbeats.joining import join_heartbeats
from coordinator.heartbeats.links import Link, State
from coordinator.heartbeats.partners import REACH, partners_of
from coordinator.heartbeats.watching import Heartbeats
from shm_broadcast.errors import CapabilityError, CommTimeoutError, NativeError, PeerLostError
from shm_broadcast.liveness import ProcessIdentity, this_process
from tests.counting_store import CountingStore, Traffic
from tests.heartbeat_links import LOST_AFTER_S, PROMPT_S, join, joined, no_check
from tests.waiting import wait_until


@contextmanager
def linked() -> Iterator[tuple[Link, socket.socket]]:
    """Yield a link, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    link = Link(1, ours, "name", LOST_AFTER_S)
    with theirs, closing(link):
        yield link, theirs


def hosts_of(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(range(first, last)) for first, last in pairwise((0, *accumulate(sizes)))]


# --- Who holds a link to whom --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [(1, 1), (2, 2, 2), (1, 4), (4, 1, 3), (8, 8), (1,) * 16, (2,) * 17, (1, 3) * 20]
)
def test_partners_are_mutual_and_on_every_host_that_is_watched(sizes: Sequence[int]) -> None:
    """Both ends know of a link. A rank has one to each neighbour, and several only where its host has fewer ranks."""
    hosts = hosts_of(sizes)
    found = {rank: partners_of(rank, hosts) for ranks in hosts for rank in ranks}
    host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    for rank, partners in found.items():
        assert all(rank in found[partner] for partner in partners)
        watched = [host_of[partner] for partner in partners]
        assert len(set(watched)) == (len(hosts) - 1 if len(hosts) <= 16 else 2 * REACH)
        for partner, together in partners.items():
            theirs, mine = hosts[host_of[partner]], hosts[host_of[rank]]
            assert together == theirs
            assert watched.count(host_of[partner]) <= -(-len(theirs) // len(mine))


def test_a_group_on_one_host_needs_no_link() -> None:
    """Neither does a group of one rank."""
    assert partners_of(3, [(1, 3)]) == {}
    assert partners_of(0, [(0,)]) == {}


def test_hosts_on_one_kernel_are_apart_in_the_ring() -> None:
    """Containers with a network of their own are hosts; the next one in the ring is on another kernel."""
    own = this_process()
    where = [("k0", 1), ("k0", 1), ("k0", 2), ("k1", 1), ("k1", 2), ("k1", 2)]
    views = {
        rank: View({}, _on(own, kernel, network), f"10.0.0.{rank}")
        for rank, (kernel, network) in enumerate(where)
    }
    known = Views(0, range(6), {0: views[0]}, Places.of(views.values()))
    assert known.hosts == [(0, 1), (3,), (2,), (4, 5)]


def _on(own: ProcessIdentity, kernel: str, network: int) -> ProcessIdentity:
    return ProcessIdentity(kernel, 1, network, own.pid, own.start_ticks, kernel)


# --- Opening -------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("V4")
def test_links_are_opened_once_shared_and_closed_with_their_last_user() -> None:
    """A second group of the same ranks opens nothing. What one end closes ends at the other, and nobody is lost."""
    before = _descriptors()
    store = dist.HashStore()
    with joined(3, store) as beats:
        names = [beats[rank].names(range(3)) for rank in range(3)]
        assert names[0][1] == names[1][0]
        assert names[0][2] == names[2][0]
        assert names[1][2] == names[2][1]
        opened = _descriptors()
        assert opened - before == 6
        assert join(dist.PrefixStore("again", store), beats, range(3), "second") == {}
        assert [beats[rank].names(range(3)) for rank in range(3)] == names
        assert _descriptors() == opened
        for rank in range(3):
            # A group that was interrupted before it used any releases as well.
            for user in ("second", "second", "interrupted"):
                beats[rank].release(user)
            assert beats[rank].names(range(3)) == names[rank]
    assert _descriptors() == before


def test_a_rank_asks_the_store_for_two_things() -> None:
    """It puts its page there, and gets those of its partners at once, however many they are."""
    server, traffic = dist.HashStore(), [Traffic() for _ in range(4)]
    with ExitStack() as stack:
        beats = {rank: Heartbeats(LOST_AFTER_S) for rank in range(4)}
        for rank in range(4):
            stack.callback(beats[rank].release, "first")
        stores: Any = [CountingStore(lambda: server, each) for each in traffic]
        assert join(stores, beats, range(4)) == {}
    assert [each.names for each in traffic] == [["set", "multi_get"]] * 4


def test_a_pair_that_has_lost_one_end_opens_a_new_link() -> None:
    """A rank may have closed its end, while the other one has not noticed: both see that from their pages."""
    store = dist.HashStore()
    with joined(2, store) as beats:
        beats[0].release("first")
        former = beats[1].names([0])
        assert former
        assert beats[0].names([1]) == {}
        assert join(dist.PrefixStore("again", store), beats, range(2), "second") == {}
        assert beats[0].names([1])[1] == beats[1].names([0])[0] != former[0]
        for rank in range(2):
            beats[rank].release("second")


def test_a_partner_that_does_not_come_is_named() -> None:
    """The other one gives up at its deadline, and closes what it has opened."""
    before, beats = _descriptors(), Heartbeats(LOST_AFTER_S)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(CommTimeoutError) as caught:
        join_heartbeats(
            beats,
            0,
            [1],
            store,
            "127.0.0.1",
            serves_store=False,
            check=no_check,
            where="test",
            timeout_s=0.3,
        )
    assert caught.value.missing == (1,)
    wait_until(lambda: _descriptors() == before, "the listener is closed")


def test_what_the_check_raises_ends_the_handshake() -> None:
    """A rank that waits for its partner's connection notices that the other has died."""

    def check() -> None:
        raise PeerLostError("gone", peers=(1,))

    before = _descriptors()
    meeting = Meeting(0, listen_at("127.0.0.1"), bytes(32), [1], {})
    with pytest.raises(PeerLostError):
        meeting.run(check, "test", PROMPT_S)
    assert _descriptors() == before


def test_an_error_of_a_handler_in_a_handshake_arrives_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is a `ConnectionError`, as a stranger that has closed its connection causes."""

    def lose(*_: object) -> None:
        raise PeerLostError("of another group", peers=(5,))

    listener, accept = listen_at("127.0.0.1"), socket.socket.accept

    def struck(self: socket.socket) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", struck)
    before = signal.signal(signal.SIGUSR1, lose)
    try:
        with socket.create_connection(listener.getsockname()):
            meeting = Meeting(0, listener, bytes(32), [1], {})
            with pytest.raises(PeerLostError, match="of another group"):
                meeting.run(no_check, "test", PROMPT_S)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_host_that_refuses_connections_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once: the reason of a rank that has given up counts, and can be read by then."""
    monkeypatch.setattr(handshake, "_REFUSED_S", 0.2)
    with listen_at("127.0.0.1") as taken:
        port = taken.getsockname()[1]
    before, checks = _descriptors(), list[int]()
    meeting = Meeting(1, None, b"", [], {0: Target("127.0.0.1", port, bytes(32))})
    with pytest.raises(NativeError, match=rf"rank 0's host refuses .* 127.0.0.1 port {port}"):
        meeting.run(lambda: checks.append(1), "test", PROMPT_S)
    assert checks
    assert _descriptors() == before


@pytest.mark.guarantee("V5")
def test_strangers_are_refused_and_do_not_hold_up_a_start() -> None:
    """Silent, loud and slow ones, a wrong token, a rank that is not expected, and one that comes twice."""
    token, listener = bytes(range(32)), listen_at("127.0.0.1")
    address, port = listener.getsockname()
    meeting = Meeting(0, listener, token, [1], {})
    opened: dict[int, Any] = {}

    def accept() -> None:
        opened.update(meeting.run(no_check, "test", PROMPT_S))

    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((address, port))) for _ in range(80)]
        thread = threading.Thread(target=accept)
        thread.start()
        loud = [stack.enter_context(socket.create_connection((address, port))) for _ in range(10)]
        for each in loud:
            each.sendall(bytes(1000))
        slow = stack.enter_context(socket.create_connection((address, port)))
        slow.sendall(b"\0")
        for wrong, rank in ((bytes(32), 1), (token, 2)):
            stranger = Meeting(rank, None, b"", [], {0: Target(address, port, wrong)})
            with pytest.raises(CommTimeoutError):
                stranger.run(no_check, "test", 0.3)
        assert not opened
        right = Meeting(1, None, b"", [], {0: Target(address, port, token)}).run(no_check, "test", PROMPT_S)
        thread.join(PROMPT_S)
        assert opened[1].name == right[0].name
        for each in (*silent[:1], *loud[:1], slow):
            each.settimeout(PROMPT_S)
            assert _is_closed(each)
        # Nobody is expected any more, so nobody listens.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port))
        right[0].connection.close()
        opened[1].connection.close()


@pytest.mark.guarantee("V5")
def test_a_rank_listens_on_its_own_address_only() -> None:
    """It needs another token each time, and the other end must know it too."""
    with listen_at("127.0.0.2") as listener:
        assert listener.getsockname()[0] == "127.0.0.2"
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address, port = impostor.getsockname()
        meeting = Meeting(1, None, b"", [], {0: Target(address, port, bytes(32))})
        stop = threading.Event()

        def greet() -> None:
            while not stop.is_set():
                guest, _ = impostor.accept()
                with guest:
                    guest.sendall(bytes(16 + 32))

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(CommTimeoutError):
            meeting.run(no_check, "test", 0.3)
        stop.set()
        socket.create_connection(impostor.getsockname()).close()
        thread.join(PROMPT_S)


def _is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        return True
    return True


def test_a_listener_says_that_no_descriptor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the one of a connection, and says what to allow."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(
        CapabilityError, match="Too many open files. It carries tensors .* a free file"
    ) as raised:
        listen_at("127.0.0.1", "tensors")
    assert raised.value.requirement == "the system call socket"


# --- Beats ---------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("V4")
def test_nothing_runs_while_nobody_waits() -> None:
    """Links have no thread; over a second this thread sleeps once, and no byte is sent."""
    with joined(2) as beats:
        threads = set(os.listdir("/proc/self/task"))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        time.sleep(1.0)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before <= 2
        assert set(os.listdir("/proc/self/task")) <= threads
        assert not any("heartbeats" in thread.name for thread in threading.enumerate())
        (link,) = beats[0]._links.values()
        assert link._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert link._connection.getsockopt(socket.IPPROTO_TCP, links._THIN_LINEAR_TIMEOUTS) == 1
        with pytest.raises(BlockingIOError):
            link._connection.recv(1)


def test_a_rank_that_waits_beats_until_nobody_has_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for what the other rank has not read is limited. It may beat in return when it waits itself."""
    monkeypatch.setattr(links, "UNANSWERED_BEATS", 5)
    with linked() as (link, theirs):
        now = 100.0
        for _ in range(40):
            assert link.look(now) is State.OPEN
            now += 1.0
            _acknowledged(link)
        assert theirs.recv(100) == b"....."
        theirs.sendall(b"..")
        wait_until(lambda: link.look(now) is State.OPEN and link._beats_left == 4, "the beat is read")
        assert theirs.recv(100) == b"."


def test_beats_are_as_rare_as_the_setting_allows() -> None:
    """A look between two beats sends none."""
    with linked() as (link, theirs):
        for tenth in range(11):
            assert link.look(100.0 + tenth * links.beat_period_s(LOST_AFTER_S) / 5) is State.OPEN
            _acknowledged(link)
        assert theirs.recv(100) == b"..."
    assert [links.beat_period_s(seconds) for seconds in (0.01, 0.8, 60.0)] == [0.125, 0.2, 0.5]


def _acknowledged(link: Link) -> None:
    wait_until(lambda: link._seen().unanswered == 0, "the kernel has acknowledged the beat")


@pytest.mark.guarantee("V3")
@pytest.mark.parametrize("with_reset", [False, True])
def test_an_end_that_is_closed_is_no_vanished_host(with_reset: bool) -> None:
    """The process has ended, or has destroyed the group: in order, or with data that it has not read."""
    with linked() as (link, theirs):
        if with_reset:
            assert link.look(100.0) is State.OPEN
            wait_until(lambda: len(theirs.recv(10, socket.MSG_PEEK)) == 1, "the beat arrives")
        theirs.close()
        wait_until(lambda: link.look(101.0) is State.ENDED, "the end is seen")


def test_silence_counts_only_while_a_beat_is_unanswered_and_somebody_looks() -> None:
    """A machine that was suspended for a minute, and whose kernel has not read the answers yet, blames nobody."""
    with linked() as (link, _):
        told = [links._Seen(1, 60.0)]
        link._seen = lambda: told[0]  # type: ignore[method-assign]
        assert link.look(100.0) is State.OPEN  # sent, perhaps, just before
        assert link.look(160.0) is State.OPEN
        assert link.look(220.0) is State.VANISHED  # half for each look
        assert link.reason == "no answer from the host for 60.0 s"
    with linked() as (link, _):
        link._seen = lambda: told[0]  # type: ignore[method-assign]
        assert link.look(100.0) is State.OPEN
        told[0] = links._Seen(0, 0.0)
        assert link.look(160.0) is State.OPEN
        told[0] = links._Seen(1, 0.7)
        assert link.look(160.1) is State.OPEN
        assert link.look(160.5) is State.OPEN
        assert link.look(160.8) is State.OPEN
        assert link.look(161.0) is State.OPEN  # acknowledgements come, though not of this beat
        told[0] = links._Seen(1, 0.8)
        assert link.look(161.1) is State.VANISHED


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
