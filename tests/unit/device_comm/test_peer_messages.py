"""What ranks tell each other about their device memory: bounded records, or a `DecodeError`."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_comm.cuda.custom.graph_inputs import CaptureMessage
from device_comm.cuda.custom.peer_messages import (
    BufferRecord,
    OfferMessage,
    PeerExchange,
    RegionMessage,
    Remark,
    decode,
)
from shm_broadcast.errors import DecodeError
from shm_broadcast.liveness import this_process

MESSAGES = [
    OfferMessage(1 << 20, ("local", "vmm"), {"ipc": "no"}, this_process()),
    RegionMessage(nbytes=4096, handle=b"h" * 64, socket="abc", key=b"k" * 32, address=1 << 47, device=3),
    RegionMessage("no memory"),
    CaptureMessage("", (16, 0), (BufferRecord(b"h" * 64, 16, 16, 32), BufferRecord(b"a" * 8, 0, 0, 0))),
    Remark("why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_told(message: msgspec.Struct) -> None:
    """A message decodes to what was encoded; cut, longer or other messages are refused with the rank's name."""
    data = msgspec.msgpack.encode(message)
    assert PeerExchange(lambda own: [own, data], 0, [4, 7]).gather(message) == [message, message]
    for wrong in (data[:-1], data + b"\0", b"", b"\x80\x04\x95gadget"):
        with pytest.raises(DecodeError, match="rank 7"):
            decode(wrong, type(message), 7)
    with pytest.raises(DecodeError, match="1 ranks of 2"):
        PeerExchange(lambda own: [own], 0, [4, 7]).gather(message)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (OfferMessage, [-1, [], {}, None]),
        (OfferMessage, [1, ["cuda"], {}, None]),
        (RegionMessage, ["", 1, b"x" * 65]),
        (RegionMessage, ["", 1 << 60]),
        (RegionMessage, ["", 1, b"", "s" * 101]),
        (RegionMessage, ["", 1, b"", "", b"", -1]),
        (RegionMessage, ["", 1, b"", "", b"", 1 << 63]),
        (RegionMessage, ["", 1, b"", "", b"", 0, 1 << 20]),
        (RegionMessage, ["x" * 2001]),
        (CaptureMessage, ["", [1], [[b"h" * 63, 0, 1, 1]]]),
        (CaptureMessage, ["", [9], [[b"h" * 64, 8, 9, 16]]]),
        (CaptureMessage, ["", [8], [[b"h" * 64, -8, 8, 16]]]),
        (CaptureMessage, ["", [8, 8], [None]]),
        (Remark, ["", "more"]),
        (Remark, {"failure": ""}),
    ],
)
def test_what_is_out_of_bounds_is_refused(kind: type[msgspec.Struct], fields: object) -> None:
    """Sizes, lengths, offsets and kinds are checked before anything is opened."""
    with pytest.raises(DecodeError):
        decode(msgspec.msgpack.encode(fields), kind, 7)


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from([type(message) for message in MESSAGES]), st.integers(0, 200))
def test_any_bytes_give_a_message_or_an_error(data: bytes, kind: type[msgspec.Struct], cut: int) -> None:
    """Any bytes give a message or a `DecodeError`, also if they begin like a message."""
    for text in (data, msgspec.msgpack.encode(MESSAGES[len(data) % len(MESSAGES)])[:cut] + data):
        try:
            assert isinstance(decode(text, kind, 7), kind)
        except DecodeError:
            continue


@pytest.mark.parametrize("answer", [{"a": 1}, "text", None, 7])
def test_an_answer_that_is_no_bytes_is_refused(answer: object) -> None:
    """It is another call's object, which an exchange of the caller's own may return."""
    with pytest.raises(DecodeError, match="rank 9 sent an object of type"):
        decode(answer, type(MESSAGES[0]), 9)  # type: ignore[arg-type]
