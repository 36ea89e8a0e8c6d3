"""Create an anonymous shared mapping, and hand it to peers.

A segment is a memfd. It has no name in the file system, so nobody can plant another file in its place, and killed
processes leave nothing behind. It is sealed against shrinking and growing and its pages are reserved on creation, so
no access can raise SIGBUS. A peer receives the descriptor over an abstract Unix socket, which has no file either,
after it has proved that it runs as the same user and knows the key.
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
import weakref
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from shm_broadcast.descriptors import new_socket, refusal, refuse_if_full
from shm_broadcast.errors import CapabilityError, CommTimeoutError, DecodeError, PeerLostError
from shm_broadcast.free_memory import free_memory_bytes
from shm_broadcast.interruption import is_held, tolerating
from shm_broadcast.liveness import ProcessIdentity, fork_count, open_pidfd, this_process
from shm_broadcast.threads import DaemonThread, start_thread

# From Linux's fcntl.h; Python defines them from 3.12 on.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing

_NAME: Final = "group-coordinator"
_PEER_CREDENTIALS: Final = struct.Struct("3i")
_CHALLENGE_BYTES: Final = 32
_MESSAGE_BYTES: Final = 4096

# A peer has this many seconds to answer the challenge, which is enough for a process that is stopped for a while. A
# silent stranger occupies one descriptor for this time.
_VISIT_S: Final = 30.0
_MOST_VISITORS: Final = 256
_BACKLOG: Final = 128

# A segment must leave this much memory free: Linux kills processes when the last page is taken.
_SPARE_BYTES: Final = 16 << 20

# What this process hands over. A forked child closes its copies of the sockets: as long as one is open, the kernel
# accepts connections for a parent that has died, and whoever connects waits for an answer until its deadline.
# One that is collected is taken out by a callback that runs no Python code: Python would drop what a signal handler
# raises in one that does.
_handovers: Final[set[weakref.ref[Handover]]] = set()


def _close_inherited() -> None:
    handovers = [handover for reference in list(_handovers) if (handover := reference()) is not None]
    _handovers.clear()
    for handover in handovers:
        handover.close_descriptors()


os.register_at_fork(after_in_child=_close_inherited)


class Segment:
    """A sealed shared mapping whose pages are reserved, by one process or by several.

    The memfd may be longer than the mapping. Its tail takes no memory until one of the processes reserves and maps it.

    Attributes:
        descriptor: The memfd; -1 after `close`.
        nbytes: Size of the mapping.
        memory: The mapping.
        pages: Status pages of the processes that share it, which are kept until `close`.
    """

    descriptor: int = -1

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Take ownership of `descriptor`; use `create` or `adopt`.

        From here on only this object closes `descriptor`: closed twice, it may be somebody else's by then.

        Args:
            descriptor: The memfd.
            nbytes: Size of the mapping.
        """
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.memory: mmap.mmap
        self.pages: Pages | None = None

    def _complete(self, is_reserved: bool) -> None:
        """Map the first `nbytes`; without `is_reserved` the caller calls `populate` once all pages are allocated."""
        # Populate the pages now: the first touch of each costs 1 us or more, and would slow the first messages.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE if is_reserved else mmap.MAP_SHARED
        self.memory = _mapping(self.descriptor, self.nbytes, flags)

    def _check_sealed(self, later_bytes: int) -> None:
        """Raise `DecodeError` unless the memfd is sealed and as long as the mapping and the tail together."""
        if not is_sealed(self.descriptor) or os.fstat(self.descriptor).st_size != self.nbytes + later_bytes:
            raise DecodeError(f"the descriptor received is not a sealed segment of {self.nbytes} bytes")

    @classmethod
    def create(
        cls,
        nbytes: int,
        later_bytes: int = 0,
        own_parts: Sequence[tuple[int, int]] | None = None,
        name: str = _NAME,
    ) -> Segment:
        """Create a zeroed segment of `nbytes` and allocate all of its pages, or those of some parts.

        Args:
            nbytes: Size to reserve and map; a multiple of the page size if `later_bytes` is not 0.
            later_bytes: Size of the tail, which takes no memory yet; see `reserve`.
            own_parts: (offset, bytes) of the parts to reserve; None for all. The others are reserved by those processes
                that mainly write them, so that they lie on their NUMA nodes; until then nobody may touch them.
            name: Of the memfd, as `/proc/PID/fd` shows it.

        Raises:
            CapabilityError: Too little memory or address space is free; the text gives the needed and the free
                bytes. Or the kernel refuses to create a memfd.
        """
        segment = cls(_create_memfd(name), nbytes)
        try:
            _check_free(nbytes)
            for offset, part_bytes in [(0, nbytes)] if own_parts is None else own_parts:
                _allocate(segment.descriptor, offset, part_bytes)
            os.ftruncate(segment.descriptor, nbytes + later_bytes)
            seal(segment.descriptor)
            segment._complete(is_reserved=own_parts is None)
        except BaseException:
            segment.close()
            raise
        return segment

    @classmethod
    def adopt(
        cls, descriptor: int, nbytes: int, later_bytes: int = 0, *, is_reserved: bool = True
    ) -> Segment:
        """Map a segment received from a peer, after checking its size and seals. Takes ownership of `descriptor`.

        If it was created with `own_parts`, `is_reserved` is False: the caller reserves its own parts and, once every
        process has done so, calls `populate`.

        Raises:
            DecodeError: The descriptor is not a sealed memfd of this size; it is closed.
            CapabilityError: This process has no address space or no descriptor for the mapping; it is closed.
        """
        segment = cls(descriptor, nbytes)
        try:
            segment._check_sealed(later_bytes)
            segment._complete(is_reserved)
        except OSError as error:
            segment.close()
            raise DecodeError(f"the descriptor received is not a shared segment: {error}") from error
        except BaseException:
            segment.close()
            raise
        return segment

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate zeroed pages for `nbytes` at `offset`, on the NUMA node that the calling thread's policy prefers.

        They may be in the tail, where every process may map them afterwards, or a part that `create` left out.

        Raises:
            CapabilityError: Too little memory is free.
        """
        _check_free(nbytes)
        _allocate(self.descriptor, offset, nbytes)

    def populate(self) -> None:
        """Enter all pages into this process's page table, once all parts are reserved."""
        # This reads a byte of each page. Memory of this kind is mapped for writing too when it is read.
        len(self.memory[:: mmap.PAGESIZE])

    def map(self, offset: int, nbytes: int) -> mmap.mmap:
        """Map a reserved part of the tail. The caller owns the mapping."""
        return _mapping(self.descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset)

    def __del__(self) -> None:
        """Close the descriptor of a segment that an exception has left without an owner."""
        self.close_descriptor()

    def close(self) -> None:
        """Close the descriptor and drop the mapping, which lives on while views of it exist. Idempotent."""
        self.close_descriptor()
        if self.pages is not None:
            self.pages.close()
        # It is missing after the first `close`, and if the segment was not completed.
        vars(self).pop("memory", None)

    def close_descriptor(self) -> None:
        """Close the descriptor and leave the mapping. Idempotent."""
        # Forgotten first: a signal handler that raises behind the system call must not let it be closed again.
        # Nothing is called between looking and storing, so no handler closes it meanwhile.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def seal(descriptor: int) -> None:
    """Let nobody change the size of a memfd any more."""
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)


def is_sealed(descriptor: int) -> bool:
    """Return whether nobody can change the size of a memfd, so that no access to a mapping raises SIGBUS."""
    try:
        return fcntl.fcntl(descriptor, _F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no memfd
        return False


def _create_memfd(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise refusal("memfd_create", "creates shared memory", error) from error


def _mapping(descriptor: int, nbytes: int, flags: int, offset: int = 0) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, nbytes, flags, offset=offset)
    except OSError as error:
        refuse_if_full("fcntl", "gives a mapping a descriptor of its own", error)
        if error.errno != errno.ENOMEM:
            raise
        raise CapabilityError(
            f"a mapping of shared memory needs {nbytes} bytes of address space, which this process cannot have "
            f"(RLIMIT_AS, vm.max_map_count), {free_memory_bytes()} bytes of memory are free: {error.strerror}",
            requirement=f"{nbytes} bytes of address space",
        ) from error


def _check_free(nbytes: int) -> None:
    free = free_memory_bytes()
    if nbytes + _SPARE_BYTES > free:
        raise CapabilityError(
            f"a shared segment needs {nbytes} bytes, {free} are free, of which {_SPARE_BYTES} must stay free",
            requirement=f"{nbytes} bytes of memory",
        )


def _allocate(descriptor: int, offset: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC):
            raise
        raise CapabilityError(
            f"a shared segment needs {nbytes} bytes, {free_memory_bytes()} are free: {error.strerror}",
            requirement=f"{nbytes} bytes of memory",
        ) from error


class Hello(msgspec.Struct, frozen=True):
    """Each side introduces itself with this message, which follows its proof of the key.

    Attributes:
        member: The sender's number among the expected peers; -1 for the owner.
        process: The sender's process.
    """

    member: int
    process: ProcessIdentity


_hello_decoder = msgspec.msgpack.Decoder(Hello)

# For text that is not UTF-8, and for values nested too deep, msgspec raises Python's own errors.
_MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Visitor(NamedTuple):
    """A connection that was sent a challenge and has to prove that it knows the key."""

    peer: socket.socket
    challenge: bytes
    until: float


class Pages(Protocol):
    """The status pages that the two sides of a handover give each other; see `KeptPages`."""

    @property
    def own(self) -> int:
        """Return the descriptor of this process's page."""

    def take(self, descriptor: int) -> None:
        """Keep the other side's page."""

    def close(self) -> None:
        """Keep nothing more. Idempotent."""


class HasDescriptor(Protocol):
    """An object that can be handed over: a `Segment`, or other memory with a descriptor."""

    descriptor: int


class Handover:
    """Gives a segment to each expected peer once, and receives the peer's pidfd in return.

    A thread serves all connections concurrently until every peer has come or `close` is called, so a silent stranger
    delays no peer.
    """

    _watch: int = -1

    def __init__(
        self,
        segment: HasDescriptor,
        key: bytes,
        members: set[int],
        joined: Callable[[Hello, int], None],
        pages: Pages | None = None,
    ) -> None:
        """Listen on a new random abstract address; `start` lets the thread serve those who come.

        Args:
            segment: The object to hand over; it must stay open until `close`.
            key: The key (32 bytes) that a peer must know.
            members: The expected peers.
            joined: Called on the thread for each peer, with its introduction and its pidfd, which the callee owns.
            pages: Keeps the peers' status pages; each peer that sends its own gets that of this process.

        Raises:
            CapabilityError: The kernel refuses a descriptor.
        """
        self._segment = segment
        self._pages = pages
        self._key = key
        self._members = set(members)
        self._joined = joined
        self._own = this_process()
        self._visitors: dict[int, _Visitor] = {}
        self._poller = select.poll()
        self._stopping = False
        self._forks = fork_count()
        self._thread: DaemonThread | None = None
        # Keeps `shutdown` of the listener apart from its closing, as the number of a closed descriptor may be
        # reused. Re-entrant, so that a signal handler may also call `close`.
        self._lock = threading.RLock()
        self.address: str = f"group-coordinator-{secrets.token_hex(16)}"
        self._listener = new_socket()
        try:
            # Peers watch this process by it, from their PID namespaces too.
            self._watch = open_pidfd(os.getpid())
            self._listener.setblocking(False)
            self._listener.bind("\0" + self.address)
            self._listener.listen(_BACKLOG)
        except BaseException:
            self.close_descriptors()
            raise
        _handovers.add(weakref.ref(self, _handovers.discard))
        self._poller.register(self._listener, select.POLLIN)

    def start(self) -> None:
        """Serve from now on; the owner calls this once it has stored the object, so that it can close it.

        Raises:
            CapabilityError: This process can have no further thread.
        """
        self._thread = DaemonThread(self._serve, "group-coordinator-handover")
        try:
            start_thread(self._thread, "to hand over shared memory")
        except BaseException:
            # Ctrl-C may end the wait for the thread's start. If the thread still starts, it sees `_stopping`.
            self._stopping = True
            self._wake()
            if not self._thread.is_alive():
                self._thread = None
                self.close_descriptors()
            raise

    def __del__(self) -> None:
        """Close the descriptors of an offer that an exception has left without an owner."""
        if self._watch >= 0:
            self.close_descriptors()

    def _serve(self) -> None:
        listener = self._listener.fileno()
        while self._members and not self._stopping:
            now = time.monotonic()
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
            self.close_descriptors()

    def close_descriptors(self) -> None:
        """Stop listening without a word to anybody; for the end of the thread, and for a forked child. Idempotent."""
        self._listener.close()
        watch, self._watch = self._watch, -1
        if watch >= 0:
            os.close(watch)

    def _welcome(self) -> None:
        """Accept a connection of the same user and send it a challenge."""
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # There are no descriptors or buffers left: drop the connection that has waited longest.
                self._dismiss(next(iter(self._visitors), -1))
                time.sleep(0.01)
            # Otherwise `close` shut the listener down, or the peer has disconnected again.
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
        """Give the segment to a connection that has answered, if its proof is right."""
        try:
            self._give(self._visitors[descriptor])
        except (OSError, *_MALFORMED):
            # This is a stranger or a peer that disconnected. It gets nothing, and the others are still served.
            pass
        finally:
            self._dismiss(descriptor)

    def _dismiss(self, descriptor: int) -> None:
        visitor = self._visitors.pop(descriptor, None)
        if visitor is not None:
            self._poller.unregister(descriptor)
            visitor.peer.close()

    def _give(self, visitor: _Visitor) -> None:
        data, descriptors, _, _ = socket.recv_fds(visitor.peer, _MESSAGE_BYTES, 2)
        try:
            proof, body = data[:_CHALLENGE_BYTES], data[_CHALLENGE_BYTES:]
            if not hmac.compare_digest(proof, _proof(self._key, b"peer", visitor.challenge + body)):
                return
            hello = _hello_decoder.decode(body)
            if hello.member not in self._members or not descriptors:
                return
            offered = [self._segment.descriptor, self._watch]
            if self._pages is not None and len(descriptors) == 2:
                offered.append(self._pages.own)
            reply = msgspec.msgpack.encode(Hello(-1, self._own))
            answer = _proof(self._key, b"owner", proof + reply) + reply
            socket.send_fds(visitor.peer, [answer], offered)
            self._members.discard(hello.member)
            if self._pages is not None and len(descriptors) == 2:
                self._pages.take(descriptors.pop())
            self._joined(hello, descriptors.pop(0))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """Stop listening and end the thread. Idempotent."""
        if self._forks != fork_count():
            # This is a forked child: the thread and the peers belong to the parent.
            return
        is_nested = is_held(self._lock)
        self._stopping = True
        thread = self._thread
        if thread is None:
            with self._lock:
                self.close_descriptors()
            return
        self._wake()
        # A handler inside of the block that holds the lock must not wait: the thread needs it. The outer call waits.
        if not is_nested:
            thread.join()

    def _wake(self) -> None:
        """Shut the listener down, which wakes the thread; closing it alone would not."""
        # It may be closed: by the thread, or in a child that a handler has just forked.
        with self._lock, tolerating(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)


def _proof(key: bytes, role: bytes, data: bytes) -> bytes:
    return hmac.digest(key, role + data, "sha256")


def _limit(owner: socket.socket, deadline: float) -> socket.socket:
    """Return the socket, whose next operation ends by `deadline` of `time.monotonic()`: a time-out is that of each."""
    owner.settimeout(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
    return owner


def _connect(owner: socket.socket, address: str, deadline: float) -> None:
    """Connect to `address`, and retry while its backlog is full.

    Raises:
        TimeoutError: The backlog stayed full until `deadline` of `time.monotonic()`.
    """
    while True:
        _limit(owner, deadline)
        try:
            owner.connect("\0" + address)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError from error
            time.sleep(0.005)


def _send(owner: socket.socket, said: bytes, descriptors: Sequence[int]) -> None:
    """Send a message with descriptors.

    Raises:
        CapabilityError: The kernel has no memory for it, or too many descriptors of this user are under way.
    """
    try:
        socket.send_fds(owner, [said], descriptors)
    except OSError as error:
        if error.errno not in (errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS):
            raise
        needs = "memory, fewer descriptors of this user under way than RLIMIT_NOFILE"
        raise refusal("sendmsg", "shows the owner of shared memory this process", error, needs) from error


def take_over(
    address: str,
    key: bytes,
    member: int,
    nbytes: int,
    timeout_s: float,
    later_bytes: int = 0,
    pages: Pages | None = None,
    connecting: Callable[[socket.socket], None] | None = None,
) -> tuple[Segment, ProcessIdentity, int]:
    """Fetch the segment that a `Handover` offers, and map it.

    Args:
        address: The abstract address of the `Handover`.
        key: The shared key, 32 bytes.
        member: This process's number among the expected peers.
        nbytes: The size that the segment must have.
        timeout_s: Deadline in seconds.
        later_bytes: The size that the tail of the segment must have.
        pages: As of `take_descriptor`; closed with the segment.
        connecting: As of `take_descriptor`.

    Returns:
        (segment, identity of the owner's process, pidfd of that process). The caller owns segment and pidfd.

    Raises:
        PeerLostError: Nothing listens at the address, or the owner refused this process.
        CommTimeoutError: The owner did not answer in time.
        DecodeError: The answer did not come from the owner, or it is not a sealed segment of this size.
        CapabilityError: The kernel refuses a descriptor.
    """
    memory, identity, watch = take_descriptor(address, key, member, timeout_s, connecting, pages)
    try:
        segment = Segment.adopt(memory, nbytes, later_bytes)
    except BaseException:
        os.close(watch)
        raise
    segment.pages = pages
    return segment, identity, watch


def take_descriptor(
    address: str,
    key: bytes,
    member: int,
    timeout_s: float,
    connecting: Callable[[socket.socket], None] | None = None,
    pages: Pages | None = None,
) -> tuple[int, ProcessIdentity, int]:
    """Fetch the descriptor that a `Handover` offers, without mapping it. Raises as `take_over` does.

    Args:
        address: See `take_over`, as for the next three.
        key: The key.
        member: This process's number.
        timeout_s: Deadline in seconds.
        connecting: Gets the socket before it is connected; another thread may close it to end this call.
        pages: Keeps the owner's status page, which the owner gives for this process's own; by default neither is given.

    Returns:
        (descriptor, identity of the owner's process, pidfd of that process). The caller owns both descriptors.
    """
    deadline = time.monotonic() + timeout_s
    descriptors: list[int] = []
    own = open_pidfd(os.getpid())
    try:
        with new_socket() as owner:
            if connecting is not None:
                connecting(owner)
            _connect(owner, address, deadline)
            challenge = _limit(owner, deadline).recv(_CHALLENGE_BYTES)
            body = msgspec.msgpack.encode(Hello(member, this_process()))
            proof = _proof(key, b"peer", challenge + body)
            offered = [own] if pages is None else [own, pages.own]
            _send(_limit(owner, deadline), proof + body, offered)
            data, descriptors, flags, _ = socket.recv_fds(_limit(owner, deadline), _MESSAGE_BYTES, 3)
        reply = data[_CHALLENGE_BYTES:]
        if not data:
            raise PeerLostError(
                f"the owner of the segment refused member {member}: wrong key, or this member has it already, or the "
                "owner has just ended the offer, or has no free file descriptor"
            )
        if not hmac.compare_digest(data[:_CHALLENGE_BYTES], _proof(key, b"owner", proof + reply)):
            raise DecodeError("the process that answered does not know the key of the segment")
        if len(descriptors) < 2:
            if flags & socket.MSG_CTRUNC:
                full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                raise refusal("recvmsg", "receives shared memory", full)
            raise DecodeError("the owner of the segment sent no descriptors")
        try:
            identity = _hello_decoder.decode(reply).process
        except _MALFORMED as error:
            raise DecodeError(f"the owner of the segment sent a malformed answer: {error}") from error
        if pages is not None and len(descriptors) == 3:
            pages.take(descriptors.pop())
        memory, watch, *descriptors = descriptors
        return memory, identity, watch
    except (TimeoutError, BlockingIOError) as error:  # the latter where `timeout_s` is 0
        raise CommTimeoutError(f"the owner of the segment did not answer within {timeout_s:.1f} s") from error
    except ConnectionError as error:
        if isinstance(error, PeerLostError):
            raise
        raise PeerLostError(f"the segment is no longer offered: {error}") from error
    finally:
        os.close(own)
        for descriptor in descriptors:
            os.close(descriptor)
