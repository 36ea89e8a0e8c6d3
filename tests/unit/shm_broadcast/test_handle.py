"""A handle is authenticated and versioned, and does not contain the key."""

import hmac
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast.errors import DecodeError, PeerLostError
from shm_broadcast.handle import VERSION, QueueHandle, new_key
from shm_broadcast.queue import QueueReader, QueueWriter
from tests.queues import segments_of

KEY = bytes(range(32))
HANDLE = QueueHandle(VERSION, "steps", 5, "group-coordinator-x", 69632, (0, 3), "adaptive", 60.0, 1)


def signed(body: bytes) -> bytes:
    """Return `body` with a valid code, as a process with the key would send it."""
    return hmac.digest(KEY, b"handle" + body, "sha256") + body


@pytest.mark.guarantee("B17")
def test_a_handle_survives_the_crossing() -> None:
    """Decoding the bytes gives an equal handle."""
    assert QueueHandle.from_bytes(HANDLE.to_bytes(KEY), KEY) == HANDLE


@pytest.mark.guarantee("B17")
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_found(place: int, change: int) -> None:
    """A handle with any byte changed is refused."""
    data = bytearray(HANDLE.to_bytes(KEY))
    data[place % len(data)] ^= change
    with pytest.raises(DecodeError):
        QueueHandle.from_bytes(bytes(data), KEY)


@pytest.mark.guarantee("B17")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(31),
        bytes(32),
        bytes(33),
        bytes(100_000),
        HANDLE.to_bytes(KEY)[:-1],
        HANDLE.to_bytes(KEY) + b"x",
        HANDLE.to_bytes(new_key()),
        signed(b"\x80"),
        signed(b"\xc1"),
        signed(msgspec.msgpack.encode({**msgspec.structs.asdict(HANDLE), "extra": 1})),
        signed(msgspec.msgpack.encode({**msgspec.structs.asdict(HANDLE), "wait": "sometimes"})),
        signed(msgspec.msgpack.encode(msgspec.structs.replace(HANDLE, version=VERSION + 1))),
    ],
    ids=range(13),
)
def test_what_is_no_handle_of_ours_is_refused(data: bytes) -> None:
    """Bytes that are cut, too long, foreign, malformed or of another version raise `DecodeError`."""
    with pytest.raises(DecodeError):
        QueueHandle.from_bytes(data, KEY)


@pytest.mark.guarantee("B17")
def test_a_forged_handle_is_refused_before_anything_is_mapped() -> None:
    """A reader with a changed address, size or generation neither connects nor maps."""
    with QueueWriter.create("steps", [0]) as writer:
        held = segments_of()
        for change in (
            {"address": "elsewhere"},
            {"segment_bytes": 1 << 40},
            {"generation": 1},
            {"ranks": (0, 1)},
        ):
            forged = msgspec.structs.replace(writer.handle, **change).to_bytes(new_key())
            with pytest.raises(DecodeError, match="forged"):
                QueueReader.open(forged, writer.key, 0)
        assert segments_of() == held


@pytest.mark.guarantee("B17")
def test_a_stale_handle_is_refused() -> None:
    """A handle of an earlier queue finds nothing, and the generation reveals one that leads to another ring."""
    with QueueWriter.create("steps", [0]) as old:
        stale, key = old.handle.to_bytes(old.key), old.key
    with pytest.raises(PeerLostError, match="no longer offered"):
        QueueReader.open(stale, key, 0)
    with QueueWriter.create("steps", [0], key=key) as new:
        mixed = msgspec.structs.replace(old.handle, address=new.handle.address).to_bytes(key)
        with pytest.raises(DecodeError, match="another generation"):
            QueueReader.open(mixed, key, 0)
    with QueueWriter.create("steps", [0], key=key) as new:
        resized = msgspec.structs.replace(new.handle, segment_bytes=new.handle.segment_bytes - 4096)
        with pytest.raises(DecodeError, match="not a sealed segment"):
            QueueReader.open(resized, key, 0)
    with (
        QueueWriter.create("steps", [0], key=key) as new,
        pytest.raises(DecodeError, match="another generation"),
    ):
        QueueReader.open(msgspec.structs.replace(new.handle, ranks=(0, 1)), key, 0)
    assert segments_of() == []


@pytest.mark.guarantee("B17")
def test_the_key_is_seen_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """Neither handle, repr, log, error, environment nor command line contains the key, raw or in hex."""
    with caplog.at_level(0), QueueWriter.create("steps", [0]) as writer:
        with pytest.raises(PeerLostError) as refused:
            QueueReader.open(writer.handle, new_key(), 0)
        with QueueReader.open(writer.handle, writer.key, 0) as reader:
            shown = (
                f"{writer!r} {reader!r} {writer.handle!r} {refused.value} {caplog.text} {writer.statistics()}"
            )
            shown += repr(dict(os.environ)) + Path("/proc/self/cmdline").read_text()
            assert writer.key.hex() not in shown
            assert repr(writer.key)[2:-1] not in shown
            assert writer.key not in writer.handle.to_bytes(writer.key)
    assert len(new_key()) == 32
    assert new_key() != new_key()
