"""What is fuzzed: decoders with valid messages to begin with, and the errors with which they may refuse an input."""

import array
import itertools
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, Self

import msgspec
import numpy as np
import torch
import zmq

from shm_broadcast import _core, codec, handle, segment
from shm_broadcast.codec import decode, encode, frame_length
from shm_broadcast.codec.wire_format import Code
from shm_broadcast.endpoint import RemoteEndpoint, RemoteSettings
from shm_broadcast.errors import DecodeError, PeerLostError
from shm_broadcast.handle import QueueHandle
from shm_broadcast.liveness import this_process
from shm_broadcast.remote import reader, wire, writer
from shm_broadcast.remote.ledger import Inbox, Ledger
from shm_broadcast.remote.news import News
from shm_broadcast.remote.wire import Kind, pack
from shm_broadcast.segment import Handover, Hello
from tests.fuzz import package_samples
from tests.fuzz.package_samples import NAME, Custom, Found, Full, Labels, Level
from tests.fuzz.shared_memory_targets import block_of, board_target, channels_target, region_target
from tests.fuzz.target import Target
from tests.hostile_frames import array as array_frame
from tests.hostile_frames import frame_of, hook, packed
from tests.unit.shm_broadcast.codec_samples import VALUES, Bits

__all__ = ["TARGETS"]

KEY = bytes(range(32))
FIRST_PLACE = 256
"""Bytes of the header of a ring for one reader; its records begin on the next page."""
RING_BYTES = 4 * 4096


# --- frames of the codec --------------------------------------------------------------------------------------


def codec_target() -> Target:
    """Return the decoder of frames: the native core, and the adapters that build what it does not."""
    values = [
        *VALUES.values(),
        {"step": 1, "t": (1, {2}), "a": np.arange(3), "x": torch.ones(700), "b": b"z" * 3000},
    ]
    arrays = [
        np.zeros(3, [("a", "i4"), ("b", "U3")]),
        torch.ones(2, 3),
        np.float32(1),
        torch.Size([1]),
        torch.bfloat16,
        np.dtype([("a", "i4"), ("b", "U3")]),
        np.str_("text"),
    ]
    # What is out of band makes long frames; each alone is still short.
    long = [
        np.arange(300),
        torch.arange(300.0),
        torch.ones(1100, dtype=torch.bfloat16),
        b"z" * 2100,
        bytearray(2100),
    ]
    more = [torch.device("cpu"), torch.device("cuda", 1), torch.float16, array.array("d", [1.0, 2.0])]
    more += [np.zeros(0, [("a", "i4")]), np.ones(700, np.complex64), torch.ones(300, dtype=torch.complex64)]
    more += [torch.ones(2, 200, dtype=torch.complex64), torch.empty(0, 3, dtype=torch.complex64)]
    error = ValueError("text")
    error.add_note("note")
    package = package_samples.__name__
    codec.register_package(package)
    more += [np.zeros(2, [("a", "i4", (2, 3))]), error, Labels({"a": 1}), Custom(1), Found(1, [])]
    more += [Bits(64), Full(3)]  # alone, so that changes meet their values
    frames = [encode(value).to_bytes() for value in (*values, *arrays, *long, *more)]
    # What the encoder never writes, but a peer could.
    frames += [
        *(frame_of(hook(code, meta, b"\xc0")) for code, meta in ((50, "cuda:1"), (Code.DEQUE, "no length"))),
        frame_of(array_frame("V0", [2], b"")),
        frame_of(array_frame("<i4", [], b"abcd")),
        frame_of(array_frame("<i4", [1] * 70, b"abcd")),
        frame_of(array_frame("<i4", [1 << 40, 1 << 40], b"abcd")),
        *(frame_of(hook(40, None, packed(tree))) for tree in (["fields", [], 1 << 40, False], ["other"])),
        *(frame_of(hook(Code.ENUM, "full", packed(value))) for value in (5000, -1)),
        frame_of(hook(Code.ZONE_INFO, None, packed("../etc/passwd"))),
        frame_of(hook(Code.REGISTERED, NAME, packed("no number"))),
        *(
            frame_of(hook(Code.REGISTERED, name, packed({"number": 1, "items": []})))
            for name in (
                f"{package}.{Level.__qualname__}",
                *(f"{package}:{each}" for each in ("Found", "Labels", "Opaque", "Custom", "Missing")),
                f"{package}.missing:Found",
                "elsewhere:Found",
            )
        ),
    ]
    frames = [frame for frame in frames if len(frame) < 6000]
    count = len(frames)
    # As in a process that has met no time zone.
    codec._builders.pop(Code.ZONE_INFO, None)

    def run(data: memoryview, number: int) -> None:
        if len(data) % 8 == 0:
            frame_length(data[:16])
        # Both ways for each seed, mended or not, and into a type now and then.
        decode(data, dict if number // count % 8 == 5 else None, copy=number // count // 4 % 2 == 0)

    def mended(data: bytes, number: int) -> bytes:
        """Let the prefix match the length in three of four inputs; the tree and the table then decide."""
        if number // count % 4 == 1 or len(data) < 32:
            return data
        return b"GCBC\x01\0\0\0" + len(data).to_bytes(8, "little") + data[16:]

    results = ("accepted", "DecodeError")
    close = partial(codec.unregister_package, package)
    return Target("codec", frames, run, (DecodeError,), mended, is_view=True, results=results, close=close)


# --- the handle of a queue ------------------------------------------------------------------------------------


def handle_target() -> Target:
    """Return the decoder of handles; the changed body is signed again, as only the key's owner could.

    A quicker digest stands in for that of OpenSSL, which takes more time than the decoder.
    """
    settings = RemoteSettings()
    public = bytes(range(1, 33))
    far = RemoteEndpoint(1, "10.0.0.1", 4000, public, 7, (2, 3), settings)
    near = QueueHandle(
        handle.VERSION, "steps", 7, "group-coordinator-x", 1 << 20, (1, 2), "adaptive", 60.0, 0
    )
    handles = [
        near,
        msgspec.structs.replace(near, remote=far, ranks=()),
        msgspec.structs.replace(far, address="::1"),
    ]
    bodies = [msgspec.msgpack.encode(each) for each in handles[:2]]
    bodies.append(msgspec.msgpack.encode(msgspec.structs.replace(near, remote=handles[2])))

    def digest(key: bytes, message: bytes, name: str) -> bytes:
        return blake2b(message, key=key, digest_size=32).digest()

    before = vars(handle)["hmac"]
    vars(handle)["hmac"] = SimpleNamespace(digest=digest, compare_digest=before.compare_digest)

    def signed(body: bytes, number: int) -> bytes:
        return (digest(KEY, b"handle" + body, "") if number % 16 else bytes(32)) + body

    return Target(
        "handle",
        bodies,
        lambda data, number: QueueHandle.from_bytes(data, KEY),
        (DecodeError,),
        signed,
        close=lambda: vars(handle).update(hmac=before),
        stand_ins=(digest,),
        results=("accepted", "DecodeError"),
    )


# --- the handover of a segment --------------------------------------------------------------------------------


class _Peer:
    """One end of a connection, which holds datagrams, or an error, and some descriptors, and takes whatever is sent."""

    def __init__(self, *data: bytes | OSError, descriptors: Sequence[int] = ()) -> None:
        self._data = list(data)
        self._descriptors = descriptors

    def recv(self, size: int) -> bytes:
        data = self._data.pop(0)
        if isinstance(data, OSError):
            raise data
        return data[:size]

    def recvmsg(self, size: int, *_: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        rights = struct.pack(f"{len(self._descriptors)}i", *self._descriptors)
        return self.recv(size), [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], 0, None

    def sendmsg(self, buffers: Sequence[bytes], *_: object) -> int:
        return sum(map(len, buffers))

    def close(self) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        pass

    def connect(self, address: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Descriptors:
    """Stands for the descriptors of this process: what asks the kernel takes ten times as long as what decodes."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._numbers = itertools.count(1 << 30)  # no descriptor of this process has such a number

    def open(self, *_: object) -> int:
        number = next(self._numbers)
        self._open.add(number)
        return number

    def close(self, number: int) -> None:
        if number not in self._open:
            raise AssertionError("a descriptor is closed that is not open")
        self._open.discard(number)

    def check_closed(self) -> None:
        if self._open:
            raise AssertionError(f"{len(self._open)} descriptors were left open")


def handover_target() -> Target:
    """Return both ends of a handover: the owner reads a peer's introduction, the peer the owner's answer.

    What asks the kernel, and the digest of OpenSSL, are replaced until `close`.
    """
    identity, descriptors = this_process(), _Descriptors()
    hellos = [msgspec.msgpack.encode(Hello(member, identity)) for member in (1, 2, -1)]
    owner: Any = Handover.__new__(Handover)
    owner._key, owner._own, owner._watch = KEY, identity, -1
    owner._segment = SimpleNamespace(descriptor=-1)
    owner._poller = SimpleNamespace(unregister=_ignore)
    owner._joined = lambda hello, descriptor: descriptors.close(descriptor)
    owner._pages = kept = SimpleNamespace(own=-1, take=descriptors.close)
    challenge = bytes(32)
    there: list[_Peer] = []
    met: Counter[str] = Counter()
    ends: dict[int, bytes | OSError] = {0: b"", 25: ConnectionResetError()}

    def new_socket() -> _Peer:
        return there.pop()

    replaced: dict[str, Callable[..., Any]] = {
        "_proof": lambda key, role, data: blake2b(role + data, key=key, digest_size=32).digest(),
        "this_process": lambda: identity,
        "open_pidfd": descriptors.open,
        "new_socket": new_socket,
    }
    before = {name: vars(segment)[name] for name in (*replaced, "os")}
    vars(segment).update(
        replaced, os=SimpleNamespace(close=descriptors.close, getpid=os.getpid, strerror=os.strerror)
    )
    proof = segment._proof(KEY, b"peer", challenge + hellos[0])

    def peer_says(body: bytes, number: int, count: int) -> None:
        owner._members = {1, 2}
        said = segment._proof(KEY, b"peer", challenge + body) if number % 16 else bytes(32)
        given = [descriptors.open() for _ in range(count)]
        visitor: Any = _Peer(said + body, descriptors=given)
        owner._visitors = {0: segment._Visitor(visitor, challenge, 0.0)}
        owner._answer(0)

    def owner_says(body: bytes, number: int, count: int) -> None:
        answer = segment._proof(KEY, b"owner", proof + body) if number % 16 else bytes(32)
        last = ends.get(number % 50, answer + body)
        given = [descriptors.open() for _ in range((2, 1, 3)[count] if number % 50 not in ends else 0)]
        there.append(_Peer(challenge, last, descriptors=given))
        try:
            memory, _, watch = segment.take_descriptor("address", KEY, 1, 1.0, _ignore, kept)
        finally:
            if there:
                raise AssertionError("the owner's answer was not read")
        met["taken"] += 1
        descriptors.close(memory)
        descriptors.close(watch)

    def run(data: bytes, number: int) -> None:
        # Each seed meets each number of descriptors on both ways.
        says, count = owner_says if number % 2 == 0 else peer_says, number // 6 % 3
        try:
            says(data, number // 2, count)
        finally:
            descriptors.check_closed()

    return Target(
        "handover",
        hellos,
        run,
        (DecodeError, PeerLostError),
        close=lambda: vars(segment).update(before),
        stand_ins=(
            *replaced.values(),
            descriptors.close,
            owner._joined,
            _Peer.recv,
            _Peer.recvmsg,
            _Peer.sendmsg,
        ),
        results=("accepted", "DecodeError", "PeerLostError", "taken"),
        met=met,
    )


def _ignore(*_: object) -> None:
    pass


# --- records between hosts ------------------------------------------------------------------------------------


class _Socket:
    """A zmq socket that takes everything, and has nothing."""

    def send(self, *_: object, **__: object) -> None:
        pass

    def disconnect(self, url: str) -> None:
        pass


def remote_target() -> Target:
    """Return both ends of a remote queue: what the reader hears from the writer, and the writer from readers."""
    identity = msgspec.msgpack.encode(this_process())
    body = encode({"step": 1, "data": bytes(100)}).to_bytes()
    half = len(body) // 2
    records = [
        pack(Kind.WELCOME, 7, 0, 5, identity),
        pack(Kind.REFUSED, 7, 0, 5, b"no"),
        pack(Kind.DATA, 1, len(body), 0, body),
        pack(Kind.DATA, 1, len(body), 0, body[:half]),
        pack(Kind.DATA, 2, len(body), half, body[half:]),
        pack(Kind.BEAT, 3, 1),
        pack(Kind.END, 1),
        pack(Kind.HELLO, 7, 0, 5, identity),
        pack(Kind.HELLO, 7, 1, 5, identity),
        pack(Kind.ACK, 0, 1, 5),
        pack(Kind.ACK, 1, 2, 5),
        pack(Kind.AGAIN, 0, 1, 5),
        pack(Kind.BYE, 0, 0, 5),
    ]
    endpoint = RemoteEndpoint(1, "10.0.0.1", 4000, bytes(range(1, 33)), 7, (1, 2), RemoteSettings())
    readers, writers = _reader(endpoint), _writer(endpoint)

    def run(data: bytes, number: int) -> None:
        if number % 512 == 0:  # what was heard before changes what is expected
            readers.begin()
            writers.begin(is_ended=number % 1024 == 0)
        record = wire.unpack(zmq.Frame(data))
        if number % 2:
            readers.hear(record)
        else:
            writers.hear(record)

    return Target(
        "remote",
        records,
        run,
        (DecodeError,),
        series=512,
        stand_ins=(_Socket.send, codec.decode),
        results=("accepted", "DecodeError"),
    )


def _reader(endpoint: RemoteEndpoint) -> Any:
    end: Any = reader.RemoteReader.__new__(reader.RemoteReader)
    end._endpoint, end._dealer, end._incarnation, end._is_off = endpoint, _Socket(), 5, False
    end._identity, end._writer, end.name, end.role = b"", 0, "q", "reader"

    def begin() -> None:
        end._inbox, end._has_ended, end._failure, end._is_awaited = Inbox(), False, None, False
        end._writer_process, end._unacknowledged, end._broken_at, end._is_off = None, 0, None, False

    def hear(record: wire.Record) -> None:
        end._hear(record)
        while end._inbox:
            arrived = end._inbox.first()
            end._inbox.take_out()
            codec.decode(arrived.frame)

    begin()
    return SimpleNamespace(begin=begin, hear=hear)


def _writer(endpoint: RemoteEndpoint) -> Any:
    end: Any = writer.RemoteWriter.__new__(writer.RemoteWriter)
    end.endpoint, end._router, end._identity, end.name = endpoint, _Socket(), b"", "q"
    end._news = News()
    end._is_cut, end._send = False, end._router.send
    messages = [encode({"step": number}) for number in range(3)]

    def begin(*, is_ended: bool) -> None:
        end._ledger = Ledger((1, 2), 1 << 20)
        for message in messages:
            end._ledger.add(end._ledger.cut(message))
        end._is_ended = is_ended

    def hear(record: wire.Record) -> None:
        for rank, link in end._ledger.links.items():
            end._hear(link, b"route %d" % rank, record)

    begin(is_ended=True)
    return SimpleNamespace(begin=begin, hear=hear)


# --- the header and the records of a ring ---------------------------------------------------------------------


class RefusedError(Exception):
    """An endpoint has asked its owner what to raise."""


def _look_around(reason: int, detail: object) -> None:
    if reason >= _core.LOOK_LATE:
        raise RefusedError(reason)


def _kept(memory: bytearray) -> bytes:
    """Return the header and the records of a ring, without what is empty between and behind them."""
    filled = min(RING_BYTES - 4096, 512 + len(memory[4096:].rstrip(b"\0")))
    return bytes(memory[:FIRST_PLACE] + memory[4096 : 4096 + filled])


def _claim_too_much(memory: bytearray) -> None:
    """Let the long message of a ring, a frame with one buffer, claim more memory than there is."""
    frame = 4096 + 64
    (tree,) = struct.unpack_from("<Q", memory, frame + 16)
    table = 32 + (tree + 7) // 8 * 8
    nbytes = 1 << 62
    total = (table + 8 + 63) // 64 * 64 + nbytes
    struct.pack_into("<Q", memory, frame + 8, total)
    struct.pack_into("<Q", memory, frame + table, nbytes | memory[frame + table + 7] << 56)
    at = 4096
    while at < RING_BYTES and (payload := struct.unpack_from("<Q", memory, at)[0]):
        struct.pack_into("<Q", memory, at + 24, total)
        at += 64 + (payload + 63) // 64 * 64


def ring_target() -> Target:
    """Return the readers and the writer of a ring whose header and records are changed."""
    seeds = []
    arrays = {"a": np.arange(600), "b": bytearray(2500), "c": b"x" * 2200, "d": [1] * 3000}
    for objects in ((), (b"x",), (b"x" * 100, b"x" * 3000), (arrays,), ([bytes(9000)] * 2,), (b"x" * 7000,)):
        memory = bytearray(RING_BYTES)
        _core.ring_format(memory, 1, 7)
        _core.ring_attach(memory, 0)
        end = _core.WriteEndpoint(memory, codec.describe, "park", _look_around)
        for each in objects:
            with suppress(RefusedError):
                end.send(each, 0)
        seeds.append(_kept(memory))
    _claim_too_much(memory)
    seeds.append(_kept(memory))
    calls = ("waited", "taken", "received", "sent at once", "sent")
    refusals = {call: f"{call}: refused" for call in calls}
    met: Counter[str] = Counter()

    def tried(name: str, call: Callable[..., object], *arguments: object) -> None:
        """Make a call that may be refused, and go on with the same memory."""
        try:
            call(*arguments)
        except (ValueError, RefusedError):
            name = refusals[name]
        met[name] += 1

    block, zeros = block_of(RING_BYTES), bytes(RING_BYTES)

    def run(data: bytes, number: int) -> None:
        block[:] = zeros
        block[:FIRST_PLACE] = data[:FIRST_PLACE]
        block[4096 : 4096 + len(data) - FIRST_PLACE] = data[FIRST_PLACE:]
        _core.ring_facts(block)
        _core.ring_state(block)
        tried("waited", _core.ring_wait, block, 0, 0, 0)
        tried("taken", _core.ring_take, block, 0)
        receive = _core.ReadEndpoint(block, 0, codec.build_owned, "park", _look_around).receive_within
        for _ in range(3):
            tried("received", receive, 0, 0)
        back = _core.WriteEndpoint(block, codec.describe, "park", _look_around)
        tried("sent at once", back.send_now, {"x": 1}, 0)
        tried("sent", back.send, b"y" * 3000, 0)

    # A header that `ring_wait` would refuse has been refused by `ring_facts` before.
    ends = [*calls, *(refusal for call, refusal in refusals.items() if call != "waited")]
    return Target(
        "ring",
        seeds,
        run,
        (ValueError, RefusedError),
        is_fixed=True,
        stand_ins=(_look_around,),
        results=("accepted", "MappingError", *ends),
        met=met,
    )


TARGETS: dict[str, Callable[[], Target]] = {
    "codec": codec_target,
    "handle": handle_target,
    "handover": handover_target,
    "remote": remote_target,
    "ring": ring_target,
    "region": region_target,
    "board": board_target,
    "channels": channels_target,
}
"""By name: each makes its target anew."""
