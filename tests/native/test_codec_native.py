"""The codec's native core checks its arguments and leaks no memory."""

import ctypes
import gc
import struct
import tracemalloc
from typing import Any

import pytest

from shm_broadcast import _core
from shm_broadcast.codec import decode, encode
from shm_broadcast.errors import DecodeError, UsageError
from tests.unit.shm_broadcast.codec_samples import VALUES


def refuse(_obj: object) -> tuple[int, object, object]:
    """Refuse every object."""
    raise ValueError("refused")


@pytest.mark.parametrize("name", ["encode", "decode", "write_frame", "window", "copy_into"])
def test_the_number_of_arguments_is_checked(name: str) -> None:
    """A function called with another number of arguments raises TypeError."""
    for arguments in ((), (1,), (1, 2, 3, 4)):
        with pytest.raises(TypeError):
            getattr(_core, name)(*arguments)


@pytest.mark.parametrize(
    "description",
    [
        None,
        (),
        (16, None),
        [16, None, b""],
        (1, None, b""),
        (15, None, b""),
        (128, None, b""),
        (-1, 0, 0),
        ("a", 0, 0),
        (1 << 80, 0, 0),
        (64, None, "text"),
        (16, type, 1),
    ],
    ids=repr,
)
def test_a_bad_description_is_an_error(description: Any) -> None:
    """A fallback that returns nonsense makes encode raise."""
    count = 0

    def describe(_obj: object) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            raise ValueError("refused")
        return description

    with pytest.raises((TypeError, ValueError, OverflowError, BufferError)):
        _core.encode(object(), describe)


def test_a_fallback_that_returns_its_argument_ends_at_the_depth_limit() -> None:
    """A fallback that returns the same object again and again makes encode raise at the depth limit."""
    with pytest.raises(RecursionError):
        _core.encode(object(), lambda obj: (0, None, obj))


def test_spans_are_checked() -> None:
    """Addresses and lengths that name no memory are refused."""
    for address, nbytes in ((0, 1), (-1, -1), (1, -1), (1 << 70, 1), (1, 1 << 70)):
        with pytest.raises((ValueError, OverflowError)):
            _core.window(None, address, nbytes)
    with pytest.raises(ValueError, match="do not fill"):
        _core.copy_into(1, 5, b"four")
    assert bytes(memoryview(_core.window(None, 0, 0))) == b""
    with pytest.raises(TypeError):
        _core.Window()


def test_a_window_keeps_its_owner() -> None:
    """A window keeps its owner alive, and with it the buffer that the window shows."""
    owner = bytearray(b"0123456789" * 10)
    exported = memoryview(owner)
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    window = _core.window(exported, address, len(owner))
    del exported
    gc.collect()
    assert len(window) == 100
    assert bytes(memoryview(window)[:10]) == b"0123456789"
    with pytest.raises(BufferError):
        owner.append(0)


@pytest.mark.parametrize("kind", ["good", "refused by encode", "refused by decode"])
def test_nothing_is_leaked(kind: str) -> None:
    """Neither a success nor a failure leaks memory."""
    frame = encode(VALUES).to_bytes()
    last = 31 + struct.unpack_from("<Q", frame, 16)[0]
    broken = frame[:last] + b"\xc1" + frame[last + 1 :]

    def once() -> None:
        if kind == "good":
            decode(encode(VALUES).to_bytes())
        elif kind == "refused by encode":
            with pytest.raises(UsageError):
                encode({"a": [({"b": (1, [VALUES["bytes"], object()])},)]})
        else:
            with pytest.raises(DecodeError):
                decode(broken)

    for _ in range(3):
        once()
    gc.collect()
    tracemalloc.start()
    try:
        once()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            once()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 4000
