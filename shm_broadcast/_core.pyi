"""Types of the native core. Every function checks its arguments and touches no memory outside them."""

from collections.abc import Callable
from typing import Any, NoReturn, Self, final

from typing_extensions import Buffer

MAX_DEPTH: int
MAX_SAME_HASH: int
INLINE_LIMIT: int
ALIGNMENT: int
FIRST_HOOK_CODE: int
FIRST_DATA_CODE: int

@final
class Window:
    """Bytes at an address, kept alive by an owner; exports a flat, writable buffer."""

    @property
    def exclusive(self) -> bool:
        """Whether nothing else uses this memory."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def encode(
    obj: object, fallback: Callable[[object], tuple[int, object, object]], /
) -> tuple[bytes, tuple[memoryview, ...], int]:
    """Return (header, buffers, bytes of the frame); `fallback` describes what is no builtin type."""

def decode(frame: Buffer, hook: Callable[[int, object, object], object], copies: bool, /) -> object:
    """Return the object of `frame`; `hook` builds what is no builtin type. ValueError: no valid frame.

    If it `copies`, arrays and tensors of the dtypes that the core knows are built by the core, not by `hook`.
    """

def numpy_dtypes(array_type: type, dtypes: tuple[tuple[str, str, object, int], ...], /) -> None:
    """Teach the core numpy's dtypes, each as (format of the buffer protocol, name, dtype, bytes of an element)."""

def torch_dtypes(
    tensor_type: type,
    to_dlpack: Callable[[Any], object],
    from_dlpack: Callable[[Any], Any],
    dtypes: tuple[tuple[str, object, object], ...],
    /,
) -> None:
    """Teach the core torch's dtypes, each as (name, dtype, capsule of a tensor of it); none of them complex."""

def write_frame(target: Buffer, header: bytes, buffers: tuple[memoryview, ...], /) -> int:
    """Lay out a frame at the start of `target`; return its bytes. ValueError: it does not fit."""

def window(owner: object, address: int, nbytes: int, /) -> Window:
    """Return a window on `nbytes` at `address`, which `owner` keeps valid."""

def copy_into(address: int, nbytes: int, source: Buffer, /) -> None:
    """Copy all of `source`, which must have `nbytes`, to `address`."""

@final
class BlockPool:
    """A user of the process's pool of large blocks, which is emptied when the last one closes.

    Fresh memory costs a page fault per 4 KiB, more than what is done with it. At most 8 blocks, 64 MiB in all, wait
    for their next use, in huge pages from 2 MiB on where the system has them.
    """

    def take(self, nbytes: int, /) -> Window:
        """Return a window on memory of any content that nothing else uses; it is given back with the last view."""
    def close(self) -> None:
        """Use the pool no more; blocks that were taken stay valid. Idempotent."""

RING_STREAMED: int

def ring_format(mapping: Buffer, readers: int, generation: int, /) -> None:
    """Lay a ring for `readers` out in a zeroed mapping. ValueError: the mapping is too small."""

def ring_facts(mapping: Buffer, /) -> tuple[int, int, int, int]:
    """Return (readers, generation, bytes of records, longest payload of one record)."""

def ring_write(
    mapping: Buffer,
    header: bytes,
    buffers: tuple[memoryview, ...],
    done: int,
    spin_ns: int,
    park_ns: int,
    tag: int = 0,
    /,
) -> int:
    """Publish the frame from byte `done` on, as far as there is room, and return how far that is.

    Waits once, for at most `spin_ns` and then `park_ns`, where there is no room.
    """

def ring_wait(mapping: Buffer, reader: int, spin_ns: int, park_ns: int, /) -> int:
    """Wait for a record: 1 when there is one, 2 when none will come, 0 when the time is up."""

def ring_wait_any(
    mappings: tuple[Buffer, ...], readers: tuple[int, ...], spin_ns: int, park_ns: int, /
) -> None:
    """Wait until one of up to 128 rings has a record or has ended, or the time is up."""

def ring_take(mapping: Buffer, reader: int, /) -> tuple[Window, int, int, int]:
    """Return (payload, flags, number of the message, its length) of the next record, which stays where it is."""

def ring_release(mapping: Buffer, reader: int, /) -> None:
    """Give the next record back to the writer; its payload must not be used any more."""

def ring_end(mapping: Buffer, reader: int, /) -> None:
    """Leave as `reader`, or close as the writer with -1; wakes whoever waits."""

def ring_attach(mapping: Buffer, reader: int, /) -> None:
    """Say that `reader` is there."""

def ring_state(mapping: Buffer, /) -> tuple[int, int, int, int, tuple[tuple[int, int, int, int, int], ...]]:
    """Return (published bytes, messages, time of the last in ns, closed, readers).

    For each reader: (consumed bytes, messages, time of the last release in ns, parked, state).
    """

NOTHING: object

class RingCorrupt(Exception):  # noqa: N818 - not an error of ours: `InternalError` is raised for it
    """The ring's own words make no sense: nothing behind them can be found."""

class _Port:
    messages: int
    nbytes: int
    waited_ns: int
    tag: int
    """Of the next message that is sent, or of the latest whole one that was received: the application's."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is copying or waiting without the GIL."""
    @property
    def arrived_ns(self) -> int:
        """When the last wait ended with a record, on CLOCK_MONOTONIC."""

    def hold(self, flag: bool, /) -> None:
        """Let nothing pass while the flag is set."""

    def close(self) -> None:
        """Let nothing pass any more, and the mapping go when the call that is under way has ended."""

class WritePort(_Port):
    """The writing end of a ring for what is short and fits at once."""

    def __new__(
        cls, mapping: Buffer, describe: Callable[[object], tuple[int, object, object]], /
    ) -> Self: ...
    def send(self, obj: object, /) -> bool:
        """Encode and publish an object; False, with nothing changed, leaves it to the general way."""

    def direct(self, source: int, general: Callable[..., Any], /) -> None:
        """Serve a group in which the writer has rank `source`. Once; ValueError behind that, and when closed."""

    def broadcast_object(
        self,
        obj: Any = None,
        src: int = 0,
        *,
        timeout_s: float | None = None,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """`send` and return the object; all but ordinary calls and what `send` leaves are made by `general`."""

class ReadPort(_Port):
    """The reading end of a ring."""

    def __new__(
        cls, mapping: Buffer, reader: int, build: Callable[[int, object, object], object], /
    ) -> Self: ...
    @property
    def is_assembling(self) -> bool:
        """Whether a message has come in part."""
    def receive(self, spin_ns: int, park_ns: int, /) -> Any:
        """Return the next object, or NOTHING: none came in time, or this end cannot be used.

        Waits for at most `spin_ns` and then `park_ns` for each record, and lets signal handlers run. RingCorrupt: the ring is unusable. Any
        other exception is the decoder's: the message is gone, the next one can be read.
        """

    def direct(
        self,
        source: int,
        general: Callable[..., Any],
        next_stage: Callable[[bool], tuple[int, int]],
        refuse: Callable[[Exception], NoReturn],
        /,
    ) -> None:
        """Serve a group in which the writer has rank `source`. Once; ValueError behind that, and when closed.

        `next_stage(has_waited)` says before each wait how to, as for `receive`. What it raises, or `receive` does,
        goes to `refuse` if it is an Exception.
        """

    def broadcast_object(
        self,
        obj: Any = None,
        src: int = 0,
        *,
        timeout_s: float | None = None,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """`receive` until there is an object; all but ordinary calls are made by `general`."""

def fork_count() -> int:
    """Return how many forks lie between the process that loaded this module and this one."""
