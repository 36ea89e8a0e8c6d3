"""Only expected peers of the same user that know the key get a segment, once each; strangers delay nobody."""

import errno
import hmac
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from shm_broadcast.errors import CapabilityError, CommTimeoutError, DecodeError, PeerLostError
from shm_broadcast.handle import new_key
from shm_broadcast.liveness import this_process
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.segment import Hello, take_over
from tests.leaks import Snapshot
from tests.probes import requires
from tests.queues import background, find_sockets, segments_of
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20.0


def descriptors() -> dict[int, str]:
    """Return the open descriptors of this process."""
    return Snapshot.take().descriptors


def connect(address: str) -> socket.socket:
    """Connect as a stranger would."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Connect without a time-out, to wait for a place in the backlog.
    stranger.connect("\0" + address)
    stranger.settimeout(TIMEOUT_S)
    return stranger


def attach(writer: QueueWriter, rank: int) -> None:
    """Open and close the reader of `rank`."""
    QueueReader.open(writer.handle.to_bytes(writer.key), writer.key, rank, TIMEOUT_S).close()


def answer_of(key: bytes, challenge: bytes, member: int) -> bytes:
    """Return the answer of a peer that knows `key`."""
    body = msgspec.msgpack.encode(Hello(member, this_process()))
    return hmac.digest(key, b"peer" + challenge + body, "sha256") + body


@pytest.mark.guarantee("B16")
def test_who_does_not_know_the_key_gets_nothing() -> None:
    """A wrong key is refused before the answer is parsed; the place stays free for the real reader."""
    with QueueWriter.create("steps", [0]) as writer:
        with pytest.raises(PeerLostError, match="refused member 0: wrong key"):
            QueueReader.open(writer.handle, new_key(), 0, TIMEOUT_S)
        attach(writer, 0)


@pytest.mark.guarantee("B16")
def test_a_hundred_silent_strangers_delay_nobody() -> None:
    """Readers attach and the writer closes at once while silent strangers hold connections."""
    with QueueWriter.create("steps", [0, 1]) as writer, ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(writer.handle.address))
        start = time.monotonic()
        attach(writer, 0)
        for _ in range(300):
            stack.enter_context(connect(writer.handle.address))
        attach(writer, 1)
        # One second for each stranger would be minutes; a loaded machine takes a few seconds at most.
        assert time.monotonic() - start < TIMEOUT_S
    with QueueWriter.create("steps", [0]) as writer, connect(writer.handle.address):
        start = time.monotonic()
        writer.close()
        assert time.monotonic() - start < TIMEOUT_S


@pytest.mark.guarantee("B16")
@pytest.mark.parametrize(
    "said",
    [b"x", bytes(32), bytes(4096), bytes(100_000), b"\x80\x04\x95gadget", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["short", "zeros", "page", "long", "pickle", "http"],
)
def test_garbage_is_dropped(said: bytes) -> None:
    """A stranger that sends garbage is disconnected without an answer, and the next reader is served."""
    with QueueWriter.create("steps", [0]) as writer:
        with connect(writer.handle.address) as stranger:
            assert len(stranger.recv(4096)) == 32
            stranger.sendall(said)
            assert stranger.recv(4096) == b""
        attach(writer, 0)


@pytest.mark.guarantee("B16")
def test_descriptors_of_strangers_are_closed() -> None:
    """Files sent with garbage, or in the wrong number with a good answer, are closed."""
    with QueueWriter.create("steps", [0]) as writer:
        ours = len(descriptors())
        with open("/dev/null") as file:
            for said, count in ((b"x", 1), (b"x", 5), (None, 0)):
                with connect(writer.handle.address) as stranger:
                    challenge = stranger.recv(4096)
                    data = answer_of(writer.key, challenge, 0) if said is None else said
                    socket.send_fds(stranger, [data], [file.fileno()] * count)
                    assert stranger.recv(4096) == b""
        assert len(descriptors()) == ours
        attach(writer, 0)


@pytest.mark.guarantee("B16")
def test_a_good_answer_serves_once() -> None:
    """A recorded answer is refused, because each connection has a new challenge."""
    with QueueWriter.create("steps", [0]) as writer:
        with connect(writer.handle.address) as stranger, connect(writer.handle.address) as replayer:
            recorded = answer_of(writer.key, stranger.recv(4096), 0)
            assert len(replayer.recv(4096)) == 32
            own = os.pidfd_open(os.getpid())
            socket.send_fds(replayer, [recorded], [own])
            os.close(own)
            assert replayer.recv(4096) == b""
        attach(writer, 0)


@pytest.mark.guarantee("B16")
def test_a_member_comes_once_and_only_if_expected() -> None:
    """A second reader of a rank and a place that does not exist are refused even with the key."""
    with QueueWriter.create("steps", [4, 5]) as writer:
        attach(writer, 4)
        with pytest.raises(PeerLostError, match="this member has it already"):
            attach(writer, 4)
        for member in (-1, 2, 2**40):
            with pytest.raises(PeerLostError, match=f"refused member {member}"):
                take_over(writer.handle.address, writer.key, member, writer.handle.segment_bytes, TIMEOUT_S)
        attach(writer, 5)
        # All peers have come, so the listener closes.
        address = f"@{writer.handle.address}"
        wait_until(lambda: address not in find_sockets(), f"the end of socket {address}", TIMEOUT_S)
        with pytest.raises(PeerLostError, match="no longer offered"):
            attach(writer, 5)


OTHER_USER = """
import os, sys
from shm_broadcast.errors import PeerLostError
from shm_broadcast.segment import take_over
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    take_over(sys.argv[1], bytes.fromhex(sys.stdin.read()), 0, int(sys.argv[2]), 20.0)
except PeerLostError as error:
    print("refused")
"""


@pytest.mark.guarantee("B16")
@requires("other_user")
def test_another_user_is_refused_with_the_right_key() -> None:
    """Another user gets nothing even with the key: the kernel tells who connects."""
    with QueueWriter.create("steps", [0]) as writer:
        outcome = subprocess.run(
            [sys.executable, "-c", OTHER_USER, writer.handle.address, str(writer.handle.segment_bytes)],
            input=writer.key.hex(),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
            check=False,
        )
        assert outcome.stdout.strip() == "refused", outcome.stderr
        attach(writer, 0)


# --- false owners ----------------------------------------------------------------------------------------------


@contextmanager
def impostor(say: list[bytes], files: int = 0, late_s: float = 0.0) -> Iterator[str]:
    """Listen as an owner without the key: after `late_s` send each of `say` in turn, and `files` with the last."""
    address = f"impostor-{secrets.token_hex(8)}"
    done = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen(1)

        def serve() -> None:
            peer, _ = listener.accept()
            with peer, open("/dev/null") as file:
                time.sleep(late_s)
                for number, words in enumerate(say):
                    if number:
                        peer.recv(4096)
                    socket.send_fds(peer, [words], [file.fileno()] * files if number else [])
                if len(say) < 2:
                    done.wait(TIMEOUT_S)

        with background(serve):
            yield address
            done.set()


@pytest.mark.guarantee("B16")
def test_an_owner_that_does_not_know_the_key_is_refused() -> None:
    """A listener without the key cannot hand anything over; descriptors that it sends are closed."""
    ours = len(descriptors())
    for words in (b"x", bytes(32), bytes(200), bytes(4000)):
        with (
            impostor([bytes(32), words], 2) as address,
            pytest.raises(DecodeError, match="does not know the key"),
        ):
            take_over(address, new_key(), 0, 4096, TIMEOUT_S)
    assert len(descriptors()) == ours


@pytest.mark.guarantee("B4", "B16")
def test_an_owner_that_says_nothing_is_a_timeout() -> None:
    """Every step of attaching ends at the deadline."""
    with (
        impostor([bytes(32)]) as address,
        pytest.raises(CommTimeoutError, match="did not answer within 0.2 s"),
    ):
        take_over(address, new_key(), 0, 4096, 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0full-" + secrets.token_hex(8))
        listener.listen(0)
        address = listener.getsockname()[1:].decode()
        # A backlog of one is full, so the second connection waits for a place.
        with connect(address), pytest.raises(CommTimeoutError, match="did not answer within 0.2 s"):
            take_over(address, new_key(), 0, 4096, 0.2)
    with pytest.raises(PeerLostError, match="no longer offered"):
        take_over("group-coordinator-nobody", new_key(), 0, 4096, 0.2)


@pytest.mark.guarantee("B4")
def test_an_owner_that_answers_late_gives_no_further_time() -> None:
    """The steps of attaching share one deadline: an owner may be stopped, and go on, between any two of them."""
    with impostor([bytes(32)], late_s=1.2) as address:
        start = time.monotonic()
        with pytest.raises(CommTimeoutError, match=r"did not answer within 1\.5 s"):
            take_over(address, new_key(), 0, 4096, 1.5)
        # With a deadline of its own the last step would end after 2.7 s at the earliest.
        assert 1.5 <= time.monotonic() - start < 2.5


@pytest.mark.guarantee("B14")
@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS])
def test_a_message_that_the_kernel_cannot_take_is_told_by_its_call(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The reader lacks something then, and the writer is not to blame: it serves the next try."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with QueueWriter.create("steps", [0]) as writer:
        ours = len(descriptors())
        with monkeypatch.context() as patch:
            patch.setattr(socket, "send_fds", refuse)
            with pytest.raises(CapabilityError, match=f"sendmsg failed: {os.strerror(number)}"):
                attach(writer, 0)
        # The writer's thread closes its end of the connection.
        wait_until(lambda: len(descriptors()) == ours, "nothing to be left open")
        attach(writer, 0)


@pytest.mark.guarantee("B16")
def test_no_listener_of_a_queue_is_reached_over_a_network() -> None:
    """A local queue's only socket is a Unix socket without a file, at a random address."""
    before = {line for name in ("tcp", "tcp6", "udp", "udp6") for line in listeners(name)}
    with QueueWriter.create("steps", [0]) as writer:
        assert {line for name in ("tcp", "tcp6", "udp", "udp6") for line in listeners(name)} <= before
        assert f"@{writer.handle.address}" in find_sockets()
        assert len(writer.handle.address) >= len("group-coordinator-") + 32
    assert f"@{writer.handle.address}" not in find_sockets()
    assert segments_of() == []


def listeners(protocol: str) -> list[str]:
    """Return the inodes of this process's TCP and UDP sockets."""
    ours = set(descriptors().values())
    rows = [line.split() for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]]
    return [row[9] for row in rows if f"socket:[{row[9]}]" in ours]


@pytest.mark.guarantee("B16")
def test_a_pidfd_of_the_peer_comes_with_it() -> None:
    """Each side watches the other's process through a pidfd that it opened on itself."""
    with QueueWriter.create("steps", [0]) as writer:
        segment, owner, descriptor = take_over(
            writer.handle.address, writer.key, 0, writer.handle.segment_bytes, TIMEOUT_S
        )
        assert owner.pid == os.getpid()
        assert "Pid:\t" in Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert not poller.poll(0)
        os.close(descriptor)
        segment.close()
