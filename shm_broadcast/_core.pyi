"""Types of the native core. Every function checks its arguments and touches no memory outside them."""

from collections.abc import Callable
from typing import Any, Self, final

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

def ring_format(mapping: Buffer, readers: int, generation: int, /) -> None:
    """Lay a ring for `readers` out in a zeroed mapping. ValueError: the mapping is too small."""

def ring_facts(mapping: Buffer, /) -> tuple[int, int, int, int]:
    """Return (readers, generation, bytes of records, longest payload of one record)."""

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

LOOK_BEGIN: int
LOOK_WAITING: int
LOOK_LATE: int
LOOK_UNUSABLE: int
LOOK_REENTRANT: int
LOOK_LENT: int
LOOK_CORRUPT: int
LOOK_UNDECODABLE: int
LOOK_UNENCODABLE: int
PACER_BYTES: int

def pacer_step(state: bytearray, wait: str, now: int, has_arrived: bool, /) -> tuple[int, int]:
    """Tell a pacer, at first `PACER_BYTES` zeros, that a message has arrived, or return (spin_ns, park_ns)."""

class _Endpoint:
    """An end of a ring. One thread at a time is inside; others wait for their turn, within their deadlines.

    `look_around(reason, detail)` is called while a call waits, and from LOOK_LATE on to raise why it cannot go on. Its
    exceptions, and those of signal handlers, end the call as they are.
    """

    timeout_ns: int
    """Deadline of `exchange`; negative for none."""

    @property
    def messages(self) -> int:
        """Whole messages that were written or read."""
    @property
    def nbytes(self) -> int:
        """Bytes of their frames."""
    @property
    def tag(self) -> int:
        """The application's, of the latest whole message that was received."""
    @property
    def waits(self) -> int:
        """How many calls had to wait."""
    @property
    def waited_ns(self) -> int:
        """How long they waited in all."""
    @property
    def is_busy(self) -> bool:
        """Whether a thread is inside of a call, or has a message on loan."""
    @property
    def cause(self) -> BaseException | None:
        """What broke this end."""

    def fail(self, error: BaseException, /) -> None:
        """Break this end, unless it is broken already."""

    def close(self, refusing: Callable[[int, Any], object], /) -> None:
        """Refuse every call by `refusing` from now on; the mapping goes when the thread that is inside has left."""

class WriteEndpoint(_Endpoint):
    """The writing end of a ring."""

    def __new__(
        cls,
        mapping: Buffer,
        describe: Callable[[object], tuple[int, object, object]],
        wait: str,
        look_around: Callable[[int, Any], object],
        /,
    ) -> Self: ...
    def exchange(self, obj: Any, /) -> Any:
        """`send` within `timeout_ns` and return the object."""

    def send(self, obj: object, timeout_ns: int = -1, /) -> None:
        """Encode an object and publish all of it."""

    def write(self, header: bytes, buffers: tuple[memoryview, ...], timeout_ns: int = -1, /) -> None:
        """Publish all of an encoded message."""

    def send_now(self, obj: object, tag: int, /) -> tuple[bytes, tuple[memoryview, ...], int] | None:
        """Encode an object and publish it if it fits into one record and there is room; else return it encoded."""

    def write_now(self, header: bytes, buffers: tuple[memoryview, ...], tag: int, /) -> bool:
        """Publish an encoded message if it fits into one record and there is room; return whether it was published."""

    def write_some(
        self,
        header: bytes,
        buffers: tuple[memoryview, ...],
        done: int,
        spin_ns: int,
        park_ns: int,
        tag: int,
        /,
    ) -> int:
        """Publish a message from byte `done` on, as far as there is room, and return how far that is.

        Waits once, for at most `spin_ns` and then `park_ns`, where there is no room.
        """

class ReadEndpoint(_Endpoint):
    """The reading end of a ring."""

    def __new__(
        cls,
        mapping: Buffer,
        reader: int,
        build: Callable[[int, object, object], object],
        wait: str,
        look_around: Callable[[int, Any], object],
        /,
    ) -> Self: ...
    @property
    def is_assembling(self) -> bool:
        """Whether a message has come in part."""

    def exchange(self, ignored: object, /) -> Any:
        """`receive` within `timeout_ns`."""

    def receive(self, timeout_ns: int = -1, /) -> Any:
        """Return the next object."""

    def receive_within(self, spin_ns: int, park_ns: int, /) -> Any:
        """Return the next object, or NOTHING if none came in at most `spin_ns` and then `park_ns` for each record."""

    def lend(self, timeout_ns: int = -1, /) -> None:
        """Wait until a record is there as a whole; this thread has it on loan until `end_loan`."""

    def end_loan(self, taken_bytes: int, /) -> None:
        """End the loan, by which a message of `taken_bytes` was read, or none if that is 0."""

def fork_count() -> int:
    """Return how many forks lie between the process that loaded this module and this one."""
