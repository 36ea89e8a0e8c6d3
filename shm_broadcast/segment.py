"""One shared mapping without a name, and how peers get it.

A segment is a memfd: it stands in no directory, so nothing can be planted in its place and nothing is left
when its processes are killed. It is sealed against shrinking and growing, and its pages are reserved when
it is made, so that no access can raise SIGBUS. Peers get the descriptor over a Unix socket in the abstract
namespace, which has no file either, after they have shown that they are the same user and know the key.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from shm_broadcast.errors import CapabilityError, CommTimeoutError, DecodeError, PeerLostError
from shm_broadcast.liveness import ProcessIdentity, fork_count, this_process

# Linux's fcntl.h; Python names them only from 3.12 on.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing

_PEER_CREDENTIALS: Final = struct.Struct("3i")
_CHALLENGE_BYTES: Final = 32
_MESSAGE_BYTES: Final = 4096

# Peers answer at once, stopped ones later; a stranger who says nothing costs one descriptor for so long.
_VISIT_S: Final = 30.0
_MOST_VISITORS: Final = 256
_BACKLOG: Final = 128

# Memory that stays free besides a segment: a machine that is filled to the last page kills processes.
_SPARE_BYTES: Final = 16 << 20


class Segment:
    """A sealed shared mapping whose pages are reserved.

    What lies behind the mapping, if anything does, has no pages before one of the processes reserves and maps it.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Map the first `nbytes` of `descriptor`, which this object owns from now on."""
        self.descriptor: int = descriptor
        self.nbytes = nbytes
        # Populated: the first touch of a page costs 1 us or more, which the first messages would pay.
        self.memory: mmap.mmap = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)

    @classmethod
    def create(cls, nbytes: int, later_bytes: int = 0) -> Segment:
        """Make a zeroed segment of `nbytes`, all of whose pages exist when this returns.

        Args:
            nbytes: What is reserved and mapped; a multiple of the page size if `later_bytes` follow.
            later_bytes: Room behind it that takes no memory yet; see `reserve`.

        Raises:
            CapabilityError: There is too little memory; the text gives the needed and the free bytes.
        """
        descriptor = os.memfd_create("group-coordinator", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _reserve(descriptor, 0, nbytes)
            if later_bytes:
                os.ftruncate(descriptor, nbytes + later_bytes)
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
            return cls(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def adopt(cls, descriptor: int, nbytes: int, later_bytes: int = 0) -> Segment:
        """Map a segment that a peer handed over, once its size and seals are as they must be.

        Raises:
            DecodeError: It is no sealed memory of this size.
        """
        try:
            sealed = fcntl.fcntl(descriptor, _F_GET_SEALS) & _SEALS == _SEALS
            if sealed and os.fstat(descriptor).st_size == nbytes + later_bytes:
                return cls(descriptor, nbytes)
        except OSError as error:
            os.close(descriptor)
            raise DecodeError(f"what was handed over is no shared segment: {error}") from error
        os.close(descriptor)
        raise DecodeError(f"what was handed over is no sealed segment of {nbytes} bytes")

    def reserve(self, offset: int, nbytes: int) -> None:
        """Give pages of zeros to a part of what lies behind the mapping, which all processes may map then.

        Raises:
            CapabilityError: There is too little memory.
        """
        _reserve(self.descriptor, offset, nbytes)

    def map(self, offset: int, nbytes: int) -> mmap.mmap:
        """Map a part of what lies behind the mapping and was reserved."""
        return mmap.mmap(self.descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)

    def close(self) -> None:
        """Close the descriptor and let the mapping go, which lives on for views of it. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self.memory


def _reserve(descriptor: int, offset: int, nbytes: int) -> None:
    free = free_memory_bytes()
    if nbytes + _SPARE_BYTES > free:
        raise CapabilityError(
            f"a shared segment needs {nbytes} bytes, {free} are free (and {_SPARE_BYTES} are left alone)",
            requirement=f"{nbytes} bytes of memory",
        )
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC):
            raise
        raise CapabilityError(
            f"a shared segment needs {nbytes} bytes, {free_memory_bytes()} are free: {error.strerror}",
            requirement=f"{nbytes} bytes of memory",
        ) from error


def free_memory_bytes() -> int:
    """Return how much memory this process may still take: the machine's, or less in a limited cgroup."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            text = Path(limit).read_text().strip()
            if text != "max":
                free = min(free, int(text) - int(Path(usage).read_text()))
        except OSError:
            # This machine has no such cgroup.
            continue
    return max(free, 0)


class Hello(msgspec.Struct, frozen=True):
    """What a peer says when it has shown that it knows the key.

    Attributes:
        member: Which of the expected peers it is.
        process: Its process.
    """

    member: int
    process: ProcessIdentity


_hello_decoder = msgspec.msgpack.Decoder(Hello)


class _Visitor(NamedTuple):
    """One who has connected and was asked to prove that it knows the key."""

    peer: socket.socket
    challenge: bytes
    until: float


class HasDescriptor(Protocol):
    """What can be handed over: a `Segment`, or other memory behind a descriptor."""

    descriptor: int


class Handover:
    """Gives a segment to its expected peers, each once, and takes their pidfds in return.

    A thread serves all who connect at once until every peer has come or `close` is called: strangers who
    connect and say nothing hold nobody up.
    """

    def __init__(
        self, segment: HasDescriptor, key: bytes, members: set[int], joined: Callable[[Hello, int], None]
    ) -> None:
        """Listen on a fresh abstract address.

        Args:
            segment: What is handed over.
            key: What a peer must know; 32 bytes.
            members: The peers that are expected.
            joined: Called on the thread for each that came, with its pidfd, which the callee then owns.
        """
        self._segment = segment
        self._key = key
        self._members = set(members)
        self._joined = joined
        self._own = this_process()
        self._visitors: dict[int, _Visitor] = {}
        self._poller = select.poll()
        self._stopping = False
        self._forks = fork_count()
        # Held to shut the listener down, and to close it: a closed descriptor's number may be another's.
        self._lock = threading.Lock()
        self.address: str = f"group-coordinator-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind("\0" + self.address)
        self._listener.listen(_BACKLOG)
        self._poller.register(self._listener, select.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="group-coordinator-handover", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        listener = self._listener.fileno()
        while self._members and not self._stopping:
            now = time.monotonic()
            # In the order in which they came, so the first is the first whose time is up.
            for descriptor in [number for number, visitor in self._visitors.items() if visitor.until <= now]:
                self._dismiss(descriptor)
            until = min((visitor.until for visitor in self._visitors.values()), default=None)
            for descriptor, _ in self._poller.poll(None if until is None else (until - now) * 1000 + 1):
                if descriptor == listener:
                    self._welcome()
                elif descriptor in self._visitors:
                    self._answer(descriptor)
        for descriptor in list(self._visitors):
            self._dismiss(descriptor)
        with self._lock:
            self._listener.close()

    def _welcome(self) -> None:
        """Take a connection from the same user, and ask for a proof."""
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # No descriptor is left: those who say nothing have to go first.
                self._dismiss(next(iter(self._visitors), -1))
                time.sleep(0.01)
            # Otherwise `close` shut the listener down, or the peer went away again.
            return
        peer.setblocking(False)
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        _, user, _ = _PEER_CREDENTIALS.unpack(credentials)
        if user != os.geteuid():
            peer.close()
            return
        if len(self._visitors) >= _MOST_VISITORS:
            self._dismiss(next(iter(self._visitors)))
        visitor = _Visitor(peer, secrets.token_bytes(_CHALLENGE_BYTES), time.monotonic() + _VISIT_S)
        self._visitors[peer.fileno()] = visitor
        self._poller.register(peer, select.POLLIN)
        try:
            peer.sendall(visitor.challenge)
        except OSError:
            self._dismiss(peer.fileno())

    def _answer(self, descriptor: int) -> None:
        """Give the segment to who has answered, if it is one of ours and knows the key."""
        try:
            self._give(self._visitors[descriptor])
        except (OSError, msgspec.MsgspecError):
            # Not one of ours, or it went away: it gets nothing, the others are served.
            pass
        finally:
            self._dismiss(descriptor)

    def _dismiss(self, descriptor: int) -> None:
        visitor = self._visitors.pop(descriptor, None)
        if visitor is not None:
            self._poller.unregister(descriptor)
            visitor.peer.close()

    def _give(self, visitor: _Visitor) -> None:
        data, descriptors, _, _ = socket.recv_fds(visitor.peer, _MESSAGE_BYTES, 1)
        try:
            proof, body = data[:_CHALLENGE_BYTES], data[_CHALLENGE_BYTES:]
            if not hmac.compare_digest(proof, _proof(self._key, b"peer", visitor.challenge + body)):
                return
            hello = _hello_decoder.decode(body)
            if hello.member not in self._members or len(descriptors) != 1:
                return
            own = os.pidfd_open(os.getpid())
            try:
                reply = msgspec.msgpack.encode(Hello(-1, self._own))
                answer = _proof(self._key, b"owner", proof + reply) + reply
                socket.send_fds(visitor.peer, [answer], [self._segment.descriptor, own])
            finally:
                os.close(own)
            self._members.discard(hello.member)
            self._joined(hello, descriptors.pop())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """Stop to listen. Idempotent."""
        if self._forks != fork_count():
            # A copy in a forked child: the thread, and the peers, belong to the parent.
            self._listener.close()
            return
        self._stopping = True
        with self._lock:
            if self._listener.fileno() >= 0:
                # Wakes the thread, which closing alone does not.
                self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()


def _proof(key: bytes, role: bytes, data: bytes) -> bytes:
    return hmac.digest(key, role + data, "sha256")


def _connect(owner: socket.socket, address: str, timeout_s: float) -> None:
    """Connect, also to one whose queue of connections is full just now.

    Raises:
        TimeoutError: It stays full.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            owner.connect("\0" + address)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError from error
            time.sleep(0.005)


def take_over(
    address: str, key: bytes, member: int, nbytes: int, timeout_s: float, later_bytes: int = 0
) -> tuple[Segment, ProcessIdentity, int]:
    """Fetch the segment that a `Handover` offers.

    Args:
        address: Its abstract address.
        key: The key.
        member: Which of the expected peers this is.
        nbytes: The size that the segment must have.
        timeout_s: Deadline in seconds.
        later_bytes: What must lie behind that.

    Returns:
        (segment, identity of the owner's process, pidfd of it, which the caller owns).

    Raises:
        PeerLostError: Nobody listens there, or the owner refused.
        CommTimeoutError: The owner did not answer.
        DecodeError: The answer is not the owner's.
    """
    memory, identity, watch = take_descriptor(address, key, member, timeout_s)
    try:
        return Segment.adopt(memory, nbytes, later_bytes), identity, watch
    except BaseException:
        os.close(watch)
        raise


def take_descriptor(
    address: str, key: bytes, member: int, timeout_s: float
) -> tuple[int, ProcessIdentity, int]:
    """Fetch the descriptor that a `Handover` offers, whatever it stands for; see `take_over`.

    Returns:
        (descriptor, identity of the owner's process, pidfd of it); the caller owns both descriptors.
    """
    descriptors: list[int] = []
    own = os.pidfd_open(os.getpid())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as owner:
            owner.settimeout(timeout_s)
            _connect(owner, address, timeout_s)
            challenge = owner.recv(_CHALLENGE_BYTES)
            body = msgspec.msgpack.encode(Hello(member, this_process()))
            proof = _proof(key, b"peer", challenge + body)
            socket.send_fds(owner, [proof + body], [own])
            data, descriptors, _, _ = socket.recv_fds(owner, _MESSAGE_BYTES, 2)
        reply = data[_CHALLENGE_BYTES:]
        if not data:
            raise PeerLostError(
                f"the owner of the segment refused member {member}: wrong key, or it came before"
            )
        if not hmac.compare_digest(data[:_CHALLENGE_BYTES], _proof(key, b"owner", proof + reply)):
            raise DecodeError("who answered does not know the key of the segment")
        if len(descriptors) != 2:
            raise DecodeError("the owner of the segment handed over no descriptors")
        identity = _hello_decoder.decode(reply).process
        memory, watch = descriptors
        descriptors = []
        return memory, identity, watch
    except TimeoutError as error:
        raise CommTimeoutError(f"the owner of the segment did not answer within {timeout_s:.1f} s") from error
    except ConnectionError as error:
        if isinstance(error, PeerLostError):
            raise
        raise PeerLostError(f"nobody offers the segment any more: {error}") from error
    finally:
        os.close(own)
        for descriptor in descriptors:
            os.close(descriptor)
