"""A stranger gets nothing from a queue's TCP port: no message, no decoding, no memory, no delay."""

import contextlib
import hmac
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from zmq.utils import z85

from shm_broadcast import codec
from shm_broadcast.endpoint import RemoteEndpoint, RemoteKeys, RemoteSettings
from shm_broadcast.errors import (
    CapabilityError,
    CommTimeoutError,
    DecodeError,
    PeerLostError,
    SettingsError,
    UsageError,
)
from shm_broadcast.handle import VERSION, QueueHandle
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.remote import ledger as remote_ledger
from shm_broadcast.remote import reader as remote_reader
from shm_broadcast.remote import wire as remote_wire
from shm_broadcast.remote import writer as remote_writer
from shm_broadcast.remote.reader import RemoteReader
from shm_broadcast.remote.wire import HEADER, Kind, pack
from shm_broadcast.remote.writer import RemoteWriter
from tests.ports import free_port, listening_addresses
from tests.queue_ranks import DEADLINE_S
from tests.remotes import HERE, remote_queue

STRANGERS = 100


@contextmanager
def leg(ranks: tuple[int, ...] = (1,)) -> Iterator[tuple[RemoteWriter, dict[int, RemoteKeys]]]:
    """Create a remote transport whose readers have not connected."""
    keys = {rank: RemoteKeys.generate() for rank in ranks}
    writer = RemoteWriter.create("steps", {rank: pair.public for rank, pair in keys.items()}, HERE)
    try:
        yield writer, keys
    finally:
        writer.close()


@contextmanager
def dialled(endpoint: RemoteEndpoint, kind: int, keys: RemoteKeys | None) -> Iterator[zmq.Socket[bytes]]:
    """Connect a bare zmq socket, with or without CURVE."""
    context: zmq.Context[Any] = zmq.Context()
    dialling = context.socket(kind)
    dialling.set(zmq.LINGER, 0)
    if keys is not None:
        dialling.set(zmq.CURVE_SERVERKEY, endpoint.server_public_key)
        dialling.set(zmq.CURVE_PUBLICKEY, keys.public)
        dialling.set(zmq.CURVE_SECRETKEY, keys.secret())
    dialling.connect(endpoint.url())
    try:
        yield dialling
    finally:
        dialling.close(0)
        context.term()


def send(writer: RemoteWriter, obj: Any) -> None:
    """Send an object as a queue does."""
    message = codec.encode(obj)
    writer.reserve(message, DEADLINE_S, lambda: writer.messages + 1)
    writer.publish()


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that collects every record that a writer in this process parses."""
    seen: list[bytes] = []

    def recording(frame: zmq.Frame) -> Any:
        seen.append(frame.bytes)
        return remote_wire.unpack(frame)

    monkeypatch.setattr(remote_writer, "unpack", recording)
    return seen


# --- strangers ------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("R8")
def test_an_unknown_key_is_refused_before_a_byte_is_decoded(
    unpacked: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger with the writer's public key and its own key pair fails the handshake."""
    with leg() as (writer, _):
        with dialled(writer.endpoint, zmq.DEALER, RemoteKeys.generate()) as stranger:
            for _ in range(20):
                stranger.send(pack(Kind.HELLO, writer.endpoint.generation, 0, 1, b"\x80"))
            send(writer, "secret")
            assert not stranger.poll(500)
        with pytest.raises(PeerLostError, match="no reader has this key"):
            RemoteReader.open(writer.endpoint, RemoteKeys.generate(), 1, "steps", timeout_s=DEADLINE_S)
        assert writer.absent() == [1]
    assert unpacked == []
    assert f"refused a connection from {HERE}" in caplog.text


@pytest.mark.guarantee("R8")
@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.SUB, zmq.REQ, zmq.PULL])
def test_who_does_not_encrypt_is_refused(unpacked: list[bytes], kind: int) -> None:
    """Without CURVE the handshake fails for every type of socket."""
    with leg() as (writer, _):
        with dialled(writer.endpoint, kind, None) as stranger:
            if kind == zmq.SUB:
                stranger.set(zmq.SUBSCRIBE, b"")
            elif kind != zmq.PULL:
                stranger.send(pack(Kind.HELLO, writer.endpoint.generation, 0, 1))
            send(writer, "secret")
            assert kind == zmq.REQ or not stranger.poll(200)
        assert writer.absent() == [1]
    assert unpacked == []


GARBAGE = {
    "nothing": b"",
    "noise": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zmtp 1": b"\x01\x00" * 500,
    "zmtp 3 null": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04\x19\x05READY" + bytes(19),
    "zmtp 3 curve": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x04\xc8\x05HELLO" + bytes(194),
    "endless": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x06" + b"\xff" * 8 + bytes(100_000),
}


@pytest.mark.guarantee("R8")
def test_garbage_on_the_port_costs_the_queue_nothing(unpacked: list[bytes]) -> None:
    """Bytes that are not valid ZMTP end their own connection; the reader is not affected."""
    with remote_queue() as (writer, readers), ExitStack() as stack:
        assert writer.handle.remote is not None
        known = len(unpacked)
        for data in GARBAGE.values():
            for _ in range(5):
                peer = stack.enter_context(socket.create_connection((HERE, writer.handle.remote.port)))
                with contextlib.suppress(OSError):
                    peer.sendall(data)
            writer.enqueue(data, DEADLINE_S)
            assert readers[1].dequeue(DEADLINE_S) == data
    assert len(unpacked) > known
    assert all(HEADER.unpack_from(record)[0] in (Kind.HELLO, Kind.ACK, Kind.BYE) for record in unpacked)


@pytest.mark.guarantee("R9")
def test_a_hundred_that_never_read_neither_slow_the_writer_nor_use_memory() -> None:
    """The writer keeps nothing for silent connections, subscribers without CURVE and strangers with keys."""
    with remote_queue() as (writer, readers), ExitStack() as stack:
        endpoint = writer.handle.remote
        assert endpoint is not None
        for number in range(STRANGERS):
            if number % 10:
                stack.enter_context(socket.create_connection((HERE, endpoint.port)))
            elif number % 20:
                stranger = stack.enter_context(dialled(endpoint, zmq.SUB, None))
                stranger.set(zmq.SUBSCRIBE, b"")
            else:
                stack.enter_context(dialled(endpoint, zmq.DEALER, RemoteKeys.generate()))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        message = np.zeros(1 << 20, np.uint8)
        for _ in range(200):
            # A copy for each of a hundred strangers would take 100 MiB per message, and a full socket would block.
            writer.enqueue(message, DEADLINE_S)
            assert readers[1].dequeue(DEADLINE_S).nbytes == 1 << 20
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert grown < 150 << 20
        time.sleep(0.5)  # give the strangers time to cause what they can
        assert [reader.behind_messages for reader in writer.statistics().readers] == [0]
        ledger: Any = writer._remote._ledger  # type: ignore[attr-defined]
        assert list(ledger.links) == [1]
        assert ledger.after(0) == []


@pytest.mark.guarantee("R9")
def test_who_says_nothing_is_disconnected() -> None:
    """A connection without a handshake is closed after two seconds, so it cannot hold a descriptor."""
    with leg() as (writer, _), socket.create_connection((HERE, writer.endpoint.port)) as silent:
        silent.settimeout(DEADLINE_S)
        while silent.recv(4096):
            pass


# --- known readers --------------------------------------------------------------------------------------------


@pytest.mark.guarantee("R10")
def test_a_reader_is_known_by_its_key_and_not_by_what_it_says() -> None:
    """A reader with the key of rank 1 is rank 1 to the writer, whatever it claims."""
    with leg((1, 2)) as (writer, keys):
        reader = RemoteReader.open(writer.endpoint, keys[1], 2, "steps", timeout_s=DEADLINE_S)
        assert writer.absent() == [2]
        reader.close()


@pytest.mark.guarantee("R10")
def test_each_rank_opens_once() -> None:
    """A second reader with the same key is refused, and the first is not disturbed."""
    with leg() as (writer, keys):
        reader = RemoteReader.open(writer.endpoint, keys[1], 1, "steps", timeout_s=DEADLINE_S)
        with pytest.raises(PeerLostError, match="opened the queue before"):
            RemoteReader.open(writer.endpoint, keys[1], 1, "steps", timeout_s=DEADLINE_S)
        send(writer, "still here")
        assert reader.read(DEADLINE_S, None) == "still here"
        reader.close()


WRONG_RECORDS = {
    "empty": b"",
    "short": bytes(10),
    "another version": HEADER.pack(Kind.ACK, 9, 0, 0, 0),
    "unknown kind": pack(99),
    "a writer's word": pack(Kind.DATA, 1, 5, 0, b"hello"),
    "a greeting without a process": pack(Kind.HELLO, 0, 0, 1, b"\xc1" * 100),
    "a greeting of another generation": pack(Kind.HELLO, 1, 0, 1, b"\x80"),
    "an acknowledgement of what was not sent": pack(Kind.ACK, 1 << 40, 1 << 40, 1),
}


@pytest.mark.guarantee("R10")
def test_nonsense_from_a_reader_costs_the_others_nothing() -> None:
    """Invalid records are dropped; the other reader gets every message."""
    with leg((1, 2)) as (writer, keys):
        reader = RemoteReader.open(writer.endpoint, keys[1], 1, "steps", timeout_s=DEADLINE_S)
        with dialled(writer.endpoint, zmq.DEALER, keys[2]) as rogue:
            for record in WRONG_RECORDS.values():
                rogue.send(record)
                rogue.send_multipart([record] * 3)
                send(writer, "fine")
                assert reader.read(DEADLINE_S, None) == "fine"
            assert writer.absent() == [2]
            with contextlib.suppress(zmq.Again):
                # Longer than a reader's records may be: only this connection is closed.
                rogue.send(bytes(1 << 20), zmq.NOBLOCK)
            send(writer, "fine")
            assert reader.read(DEADLINE_S, None) == "fine"
        reader.close()


@pytest.mark.guarantee("R10")
@pytest.mark.parametrize(
    "words",
    [
        (pack(Kind.DATA, 1, 100, 50, bytes(50)),),
        (pack(Kind.DATA, 1, 10, 0, bytes(50)),),
        (pack(Kind.DATA, 1, 1 << 62, 0, bytes(50)), pack(Kind.DATA, 2, 1 << 62, 51, bytes(50))),
        (pack(Kind.DATA, 1, 0, 0),),
        (pack(Kind.HELLO),),
        (bytes(31),),
        (bytes(100),),
        (pack(Kind.WELCOME, 5, 0, 7, b"\x80"),),
    ],
    ids=range(8),
)
def test_nonsense_from_the_writer_is_a_decode_error(words: tuple[bytes, ...]) -> None:
    """Invalid parts and records are refused; a claimed length allocates no memory."""
    inbox = remote_ledger.Inbox()
    reader = object.__new__(remote_reader.RemoteReader)
    state: Any = reader
    state._inbox, state._has_ended, state._incarnation = inbox, False, 7
    state._endpoint = msgspec.structs.replace(ENDPOINT, generation=6)

    def hear() -> None:
        for word in words:
            frame = zmq.Frame(word)
            reader._hear(remote_wire.unpack(frame))

    with pytest.raises(DecodeError):
        hear()
    assert len(inbox) == 0


# --- the address ----------------------------------------------------------------------------------------------


@pytest.mark.guarantee("R11")
@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "::",
        "*",
        "",
        "localhost",
        "lo",
        "224.0.0.1",
        "255.255.255.255",
        "::ffff:0.0.0.0",
        "127.0.0.1:80",
        "127.1",
        "tcp://127.0.0.1",
        "198.51.100.7",
    ],
)
def test_only_one_address_of_this_host_can_be_bound(address: str) -> None:
    """A wildcard, name, multicast group or foreign address raises UsageError, and nothing listens."""
    before = listening_addresses()
    with pytest.raises(UsageError):
        RemoteWriter.create("steps", {1: RemoteKeys.generate().public}, address)
    with pytest.raises(UsageError):
        QueueWriter.create(
            "steps", [2], remote_readers={1: RemoteKeys.generate().public}, bind_address=address
        )
    assert listening_addresses() == before


@pytest.mark.guarantee("R11")
@pytest.mark.parametrize("address", [HERE, "127.0.0.9", "::1"])
def test_it_listens_on_that_address_alone(address: str) -> None:
    """The process has one new listener, on the given address."""
    before = listening_addresses()
    keys = RemoteKeys.generate()
    writer = RemoteWriter.create("steps", {1: keys.public}, address)
    try:
        assert sorted({*listening_addresses()} - {*before}) == [address]
        reader = RemoteReader.open(writer.endpoint, keys, 1, "steps", timeout_s=DEADLINE_S)
        reader.close()
    finally:
        writer.close()
    assert listening_addresses() == before


@pytest.mark.guarantee("R11")
def test_a_range_of_ports_is_kept() -> None:
    """Only ports of the range are used; if all are taken, `create` raises CapabilityError."""
    port = free_port()
    keys = RemoteKeys.generate()
    writer = RemoteWriter.create("steps", {1: keys.public}, HERE, (port, port))
    try:
        assert writer.endpoint.port == port
        with pytest.raises(CapabilityError, match=str(port)):
            RemoteWriter.create("steps", {1: keys.public}, HERE, (port, port))
    finally:
        writer.close()
    for wrong in ((0, 5), (9, 8), (1, 70000)):
        with pytest.raises(UsageError):
            RemoteWriter.create("steps", {1: keys.public}, HERE, wrong)


# --- keys, handles --------------------------------------------------------------------------------------------

ENDPOINT = RemoteEndpoint(1, HERE, 9, b"k" * 32, 5, (1,), RemoteSettings())


@pytest.mark.guarantee("R8")
def test_a_writer_that_does_not_hold_the_key_is_refused() -> None:
    """A handle with another server key raises DecodeError, not a time-out."""
    with leg() as (writer, keys):
        other = msgspec.structs.replace(writer.endpoint, server_public_key=RemoteKeys.generate().public)
        with pytest.raises(DecodeError, match="does not hold the handle.s key"):
            RemoteReader.open(other, keys[1], 1, "steps", timeout_s=DEADLINE_S)
        assert writer.absent() == [1]


@pytest.mark.guarantee("R8")
def test_another_generation_is_refused() -> None:
    """A handle of another generation is refused even if all keys are right."""
    with leg() as (writer, keys):
        old = msgspec.structs.replace(writer.endpoint, generation=writer.endpoint.generation ^ 1)
        with pytest.raises(DecodeError, match="another generation"):
            RemoteReader.open(old, keys[1], 1, "steps", timeout_s=DEADLINE_S)
        assert writer.absent() == [1]


@pytest.mark.guarantee("R8")
def test_every_queue_has_a_key_of_its_own() -> None:
    """Two queues to the same readers have different server keys."""
    pair = RemoteKeys.generate()
    writers = [RemoteWriter.create("steps", {1: pair.public}, HERE) for _ in range(2)]
    assert len({writer.endpoint.server_public_key for writer in writers}) == 2
    for writer in writers:
        writer.close()


@pytest.mark.guarantee("R12")
def test_no_secret_is_shown(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """No repr, handle, log or error contains a secret key in any encoding."""
    caplog.set_level(logging.DEBUG)
    made: list[RemoteKeys] = []

    def recording(public: bytes, secret: bytes) -> RemoteKeys:
        made.append(RemoteKeys(public, secret))
        return made[-1]

    monkeypatch.setattr(RemoteKeys, "generate", lambda: recording(*map(z85.decode, zmq.curve_keypair())))
    with remote_queue() as (writer, readers):
        shown = [repr(writer), repr(readers[1]), repr(writer._remote), repr(readers[1]._ring), repr(made)]
        shown += [repr(writer.handle), repr(writer.handle.to_bytes(writer.key))]
        with pytest.raises(CommTimeoutError) as caught:
            readers[1].dequeue(0.05)
    shown += [
        str(caught.value),
        caplog.text,
        Path("/proc/self/environ").read_text(),
        Path("/proc/self/cmdline").read_text(),
    ]
    assert len(made) == 2
    for pair in made:
        secret = pair.secret()
        spellings = [repr(secret)[2:-1], secret.hex(), z85.encode(secret).decode()]
        assert not [text for text in shown for spelling in spellings if spelling in text]
        with pytest.raises(UsageError):
            pair.__reduce_ex__(4)
        with pytest.raises(UsageError):
            codec.encode(pair)


@pytest.mark.guarantee("R12")
@pytest.mark.parametrize("key", [b"", bytes(32), b"x" * 31, b"x" * 40, "x" * 32, None])
def test_what_is_no_key_is_refused_without_being_shown(key: Any) -> None:
    """A key must have 32 bytes; the error does not repeat the value."""
    with pytest.raises(UsageError) as caught:
        RemoteWriter.create("steps", {1: key}, HERE)
    assert "x" * 8 not in str(caught.value)


@pytest.mark.guarantee("R8")
def test_readers_have_keys_of_their_own() -> None:
    """Two ranks with one key are refused, because they could not be told apart."""
    key = RemoteKeys.generate().public
    with pytest.raises(UsageError, match="a different key for each"):
        RemoteWriter.create("steps", {1: key, 2: key}, HERE)


@pytest.mark.guarantee("R8")
@pytest.mark.parametrize(
    "change",
    [
        {"address": "0.0.0.0"},
        {"address": "example.com"},
        {"address": "10.0.0.1:22/../x"},
        {"port": 0},
        {"port": 1 << 16},
        {"version": 2},
        {"server_public_key": b"short"},
        {"server_public_key": bytes(32)},
        {"settings": {"high_water_bytes": -1}},
        {"settings": {"heartbeat_s": 0.0}},
        {"settings": {"lost_after_s": 0.1}},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_forged_endpoint_is_refused_before_anybody_is_called(change: dict[str, Any]) -> None:
    """The endpoint in a handle is checked even if the handle's key is right."""
    key = bytes(range(32))
    handle = QueueHandle(VERSION, "steps", 5, "", 0, (), "adaptive", 60.0, 0, ENDPOINT)
    assert QueueHandle.from_bytes(handle.to_bytes(key), key) == handle
    fields = msgspec.to_builtins(handle, builtin_types=(bytes,))
    fields["remote"].update(change)
    body = msgspec.msgpack.encode(fields)
    forged = hmac.digest(key, b"handle" + body, "sha256") + body
    with pytest.raises(DecodeError):
        QueueReader.open(forged, key, 1, remote_keys=RemoteKeys.generate())


@pytest.mark.guarantee("R8")
def test_a_remote_rank_needs_its_keys() -> None:
    """A reader without a key pair, or with an unlisted rank, is refused at once."""
    with QueueWriter.create(
        "steps", [2], remote_readers={1: RemoteKeys.generate().public}, bind_address=HERE
    ) as writer:
        with pytest.raises(UsageError, match="remote_keys"):
            QueueReader.open(writer.handle, writer.key, 1)
        with pytest.raises(UsageError, match="no reader"):
            QueueReader.open(writer.handle, writer.key, 3, remote_keys=RemoteKeys.generate())
    for wrong in ({"remote_readers": {1: b"k" * 32}}, {"bind_address": HERE}):
        with pytest.raises(UsageError, match="together"):
            QueueWriter.create("steps", [2], **wrong)
    with pytest.raises(UsageError, match="each once"):
        QueueWriter.create("steps", [1], remote_readers={1: b"k" * 32}, bind_address=HERE)


@pytest.mark.guarantee("R12")
@pytest.mark.parametrize(
    "wrong",
    [{"high_water_bytes": 1}, {"high_water_bytes": 1.5}, {"heartbeat_s": -1}, {"lost_after_s": 0.3}],
    ids=str,
)
def test_no_setting_turns_protection_off(wrong: dict[str, Any]) -> None:
    """The settings are three bounded numbers; none of them disables encryption or keys."""
    assert {*RemoteSettings.__struct_fields__} == {"high_water_bytes", "heartbeat_s", "lost_after_s"}
    with pytest.raises(SettingsError):
        RemoteSettings(**wrong)
