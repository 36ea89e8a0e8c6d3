"""Types of the native core. Every function checks its arguments and touches no memory outside them."""

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, final

from typing_extensions import Buffer

_Returned = TypeVar("_Returned")
_Call = TypeVar("_Call")
_Work = TypeVar("_Work")

MAX_DEPTH: int
ALIGNMENT: int
FIRST_HOOK_CODE: int
FIRST_DATA_CODE: int

@final
class Window:
    """Exports bytes at an address, which an owner keeps alive, as a flat, writable buffer."""

    @property
    def exclusive(self) -> bool:
        """Whether nothing else uses this memory."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def encode(
    obj: object, fallback: Callable[[object], tuple[int, object, object]], /
) -> tuple[bytes, tuple[memoryview, ...], int]:
    """Return (header, buffers, bytes of the frame); `fallback` describes objects that are not of a builtin type."""

def decode(frame: Buffer, hook: Callable[[int, object, object], object], copies: bool, /) -> object:
    """Return the object of `frame`; `hook` builds objects that are not of a builtin type.

    If `copies` is true, the core and not `hook` builds arrays and tensors of the dtypes that it knows. Raises
    ValueError if the frame is not valid.
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
    """Teach the core torch's dtypes, each as (name, dtype, capsule of a tensor of it). None of them may be complex."""

def write_frame(target: Buffer, header: bytes, buffers: tuple[memoryview, ...], /) -> int:
    """Lay out a frame at the start of `target`; return its size in bytes. Raises ValueError if it does not fit."""

def window(owner: object, address: int, nbytes: int, /) -> Window:
    """Return a window on `nbytes` at `address`, which `owner` keeps valid."""

def copy_into(address: int, nbytes: int, source: Buffer, /) -> None:
    """Copy all of `source`, which must have `nbytes`, to `address`."""

@final
class BlockPool:
    """A user of the process's pool of large blocks. The pool is emptied when its last user closes.

    Fresh memory costs a page fault per 4 KiB, which takes longer than the work that is done on it. At most 8 blocks,
    64 MiB in all, wait for their next use. Blocks of 2 MiB or more lie in huge pages if the system has them.
    """

    def take(self, nbytes: int, /) -> Window:
        """Return a window on uninitialised memory that nothing else uses. The last view of it gives it back."""
    def close(self) -> None:
        """Stop using the pool; blocks that were taken stay valid. Idempotent."""

def ring_format(mapping: Buffer, readers: int, generation: int, /) -> None:
    """Lay out a ring for `readers` in a zeroed mapping. Raises ValueError if the mapping is too small."""

def ring_facts(mapping: Buffer, /) -> tuple[int, int, int, int]:
    """Return (readers, generation, bytes of records, longest payload of one record)."""

def ring_wait(mapping: Buffer, reader: int, spin_ns: int, park_ns: int, /) -> int:
    """Wait for a record; return 1 if there is one, 2 if none will come, and 0 if the time is up."""

def ring_wait_any(
    mappings: tuple[Buffer, ...], readers: tuple[int, ...], spin_ns: int, park_ns: int, waited_ns: int, /
) -> bool:
    """Wait until one of up to 128 rings has a record or has ended, or the time is up; return whether one has.

    `waited_ns` is for how long the caller has waited before: without futex_waitv long waits look less often.
    """

def ring_take(mapping: Buffer, reader: int, /) -> tuple[Window, int, int, int]:
    """Return (payload, flags, number of the message, its length) of the next record, which stays in the ring."""

def ring_release(mapping: Buffer, reader: int, /) -> None:
    """Give the next record back to the writer; its payload must not be used any more."""

def ring_end(mapping: Buffer, reader: int, /) -> None:
    """Leave as `reader`, or close as the writer with -1. Wakes all waiting threads."""

def ring_signal(mapping: Buffer, reader: int, eventfd: int, nanoseconds: int, stop: Buffer, /) -> None:
    """Make the eventfd of `ReadEndpoint.set_signal` readable whenever a message comes, for at most this time.

    Ends early once the first byte of `stop` is set and `ring_stir` was called then.
    """

def ring_stir(mapping: Buffer, /) -> None:
    """Wake every thread that sleeps until something is published, and those in `ring_signal`."""

def bell_listen(
    bell: Buffer, look: Callable[[], tuple[ReadEndpoint, ...] | None], spin_ns: int, park_ns: int, /
) -> bool:
    """Call `look`. Unless it returns None, wait for the bell, for one of these endpoints, or until the time is up.

    Returns:
        Whether `look` returned None. What happens after `look` has looked ends the wait: messages of writers
        that have this bell, and what other threads do with endpoints that have it.
    """

def bell_sound(bell: Buffer, /) -> None:
    """Wake the threads that listen to the bell."""

def ring_attach(mapping: Buffer, reader: int, /) -> None:
    """Mark `reader` as attached."""

def ring_state(mapping: Buffer, /) -> tuple[int, int, int, int, tuple[tuple[int, int, int, int, int], ...]]:
    """Return (published bytes, messages, time of the last publication in ns, closed, readers).

    Each reader is (consumed bytes, messages, time of the last release in ns, parked, state).
    """

NOTHING: Any

class MappingError(ValueError):
    """A mapping holds no ring, or no record where one should be. Only the functions of rings raise it."""

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
    """Tell a pacer that a message has arrived, or return (spin_ns, park_ns). `state` begins as `PACER_BYTES` zeros."""

class _Endpoint:
    """An endpoint of a ring. One thread at a time is inside; others wait for their turn, within their deadlines.

    `look_around(reason, detail)` is called while a call waits. From LOOK_LATE on it must raise an error that says why
    the call cannot go on. Its exceptions, and those of signal handlers, end the call unchanged. With LOOK_UNDECODABLE
    it returns what takes the message's place, which is raised if it is an exception, or None to raise `detail` and keep
    the message.
    """

    timeout_ns: int
    """Deadline of `exchange`; negative for none."""
    tag: int
    """The application's tag: in a reader of the latest message that was received, in a writer of what it sends."""

    @property
    def messages(self) -> int:
        """Number of whole messages that were written or read."""
    @property
    def nbytes(self) -> int:
        """Total size of their frames in bytes."""
    @property
    def waits(self) -> int:
        """How many calls had to wait."""
    @property
    def waited_ns(self) -> int:
        """How long these calls waited in all."""
    @property
    def is_busy(self) -> bool:
        """Whether a thread is inside a call or has a message on loan."""
    @property
    def cause(self) -> BaseException | None:
        """The error that broke this endpoint, or None."""

    def fail(self, error: BaseException, /) -> None:
        """Mark this endpoint as broken by `error`, unless it is broken already."""

    def close(self, refusing: Callable[[int, Any], object], /) -> None:
        """Refuse every call with `refusing` from now on. The mapping is released when the owner has left.

        Once a writer's `close` has returned, nothing more is published, and what was published is counted: it
        waits until another thread has copied its record into the ring, and that copy waits for nobody.
        """

class WriteEndpoint(_Endpoint):
    """The endpoint of the writer of a ring.

    Attributes:
        refused_nested: Set by whoever refuses a call that a signal handler makes inside of a write of the same thread.
            The refusal, if the handler lets it through, then does not cut the message.
    """

    refused_nested: bool

    def __new__(
        cls,
        mapping: Buffer,
        describe: Callable[[object], tuple[int, object, object]],
        wait: str,
        look_around: Callable[[int, Any], object],
        bell: Buffer | None = None,
        /,
    ) -> Self: ...
    def exchange(self, obj: Any, /) -> Any:
        """Call `send` with the deadline `timeout_ns` and return the object."""

    def send(self, obj: object, timeout_ns: int = -1, /) -> None:
        """Encode an object and publish all of it."""

    def write(self, header: bytes, buffers: tuple[memoryview, ...], timeout_ns: int = -1, /) -> None:
        """Publish all of an encoded message."""

    def send_now(self, obj: object, tag: int, /) -> tuple[bytes, tuple[memoryview, ...], int] | None:
        """Encode an object. Publish it if it fits into one record and there is room; otherwise return it encoded."""

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
        """Publish a message from byte `done` on while there is room; return how many of its bytes are published.

        If there is no room, waits for it once for at most `spin_ns` and then `park_ns`.
        """

class ReadEndpoint(_Endpoint):
    """The endpoint of one reader of a ring."""

    def __new__(
        cls,
        mapping: Buffer,
        reader: int,
        build: Callable[[int, object, object], object],
        wait: str,
        look_around: Callable[[int, Any], object],
        bell: Buffer | None = None,
        /,
    ) -> Self: ...
    lent_bytes: int
    """Length of the message on loan, which counts as read when the loan is let go; 0 if none counts."""

    @property
    def message(self) -> Any:
        """The next message that was fetched, or `NOTHING`; reading it takes it out, and writing it puts it back.

        Unlike the result of a call an attribute is stored or returned before a signal handler can run.
        """
    @message.setter
    def message(self, message: Any, /) -> None: ...
    @property
    def has_message(self) -> bool:
        """Whether a message was fetched and not taken out."""
    @property
    def has_news(self) -> bool:
        """Whether a read would find something: a message or more of it, or that none will come.

        It refuses, as a read does, a thread that is inside of a call already.
        """
    @property
    def is_assembling(self) -> bool:
        """Whether only a part of a message has come."""

    def exchange(self, ignored: object, /) -> Any:
        """Call `fetch` with the deadline `timeout_ns`; return NOTHING."""

    def receive(self, timeout_ns: int = -1, /) -> Any:
        """Return the next object."""

    def receive_within(self, spin_ns: int, park_ns: int, /) -> Any:
        """Return the next object, or NOTHING if none came in at most `spin_ns` and then `park_ns`.

        The wait for a turn is a part of that. If more of a message comes at once, a call goes on with it for up to
        50 ms.
        """

    def fetch(self, timeout_ns: int = -1, until_ns: int = -1, /) -> None:
        """Wait for the next object, which `message` takes out, unless one was fetched already.

        A time-out that began before this call ends at `until_ns` of `time.monotonic_ns`.
        """

    def fetch_within(self, spin_ns: int, park_ns: int, /) -> None:
        """Fetch the next object if it comes within these times, as `receive_within` returns it."""

    def set_signal(self, eventfd: int, /) -> None:
        """Keep the eventfd readable while a message is there. A thread must run `ring_signal` from now on.

        The endpoint duplicates the descriptor, and closes its own in `close`.
        """

    def lend(self, timeout_ns: int = -1, /) -> object:
        """Wait until a record is complete. This thread then has it on loan until it lets the result go.

        A `LoanBlock` that holds the result lets it go when it ends.
        """

class LoanBlock:
    """The base of a block in which a message is on loan; the subclass begins it."""

    hold: Any
    """What the block holds until it ends, such as a result of `lend`, or None."""

    def __exit__(self, *exc_info: object) -> None:
        """Let go what the block holds; raise if that is a loan and the ring was overwritten.

        Native, so that no signal handler raises at the end of the block before this has happened.
        """

def undisturbed(call: Callable[[], _Returned], /) -> _Returned:
    """Return what `call` returns. The kernel gives this thread no signals meanwhile, except for those of its faults."""

def fork_count() -> int:
    """Return how many forks lie between the process that loaded this module and this one."""

def status_format(
    mapping: Buffer,
    pid: int,
    start_ticks: int,
    pid_namespace: int,
    time_namespace: int,
    boot_id: bytes,
    hostname: bytes,
    /,
) -> None:
    """Make a status page of zeroed memory; see `status/layout.py`."""

def status_copy(mapping: Buffer, /) -> bytes:
    """Return a copy of a status page, of which each record is consistent by itself; one that is torn says so.

    Raises:
        ValueError: The mapping has another size.
    """

def own_descriptor(descriptor: int, /) -> object:
    """Return an object that closes the descriptor when it is collected, where no signal handler can prevent it."""

def own_duplicate(descriptor: int, /) -> tuple[object, int]:
    """Return (an object that closes a duplicate when it is collected, the number of the duplicate)."""

def read_file(path: str, /) -> bytes:
    """Return the content of a file. No signal handler can raise between its opening and its closing."""

def keep_errno(number: int, /) -> None:
    """Let the C handler of a signal leave `errno` as it was. Raise `ValueError` if there is none with one argument."""

def status_nowhere() -> StatusLane:
    """Return a lane that is shown to nobody."""

class StatusLane:
    """A lane of this process's page: the calls that one plane of a group makes, one at a time."""

    def begin(self, kind: int, number: int, nbytes: int, peer: int, /) -> None:
        """Show a call that begins, and computes."""

    def set_state(self, state: int, /) -> None:
        """Show a `LaneState`."""

    def asleep(
        self,
        wait: Callable[[_Call, _Work, float | None], None],
        call: _Call,
        work: _Work,
        timeout_s: float | None,
        /,
    ) -> None:
        """Call `wait(call, work, timeout_s)`, and show meanwhile that the call in the lane sleeps."""

    def end(self, outcome: int, /) -> None:
        """Count and record the call that was begun last, with an `Outcome`."""

    def close(self) -> None:
        """Show nothing more."""

    def capsule(self) -> object:
        """Return the lane for another native module."""

class StatusWaits:
    """The lanes in which one plane of a group shows waits that several threads may be in at once."""

    def __new__(cls, make: Callable[[], StatusLane], places: dict[int, int], /) -> Self:
        """Use a lane of `make()` where all others show a wait. `places` has the place of each global rank."""

    def show(
        self,
        kind: int,
        number: int,
        ranks: Sequence[int] | None,
        wait: Callable[[_Call, _Work, float | None], None],
        call: _Call,
        work: _Work,
        timeout_s: float | None,
        /,
    ) -> None:
        """Call `wait(call, work, timeout_s)`, and show meanwhile that this rank waits for the first of `ranks`."""

class StatusPage:
    """The page that this process writes."""

    def __new__(cls, mapping: Buffer, /) -> Self:
        """Use what `status_format` made."""

    def lane(self, group: int, plane: bytes, algorithm: bytes, /) -> StatusLane | None:
        """Return a new lane of the group in a place; None if there is no room."""

    def write(self, is_queue: bool, place: int, body: bytes, /) -> None:
        """Write the record of a queue, or of a group; see `layout.pack_record`."""

    def set_words(self, rank: int, world_size: int, stack_signal: int, refused: int, /) -> None:
        """Write the words of the header that change."""

    def release(self, group: int, /) -> None:
        """Free the lanes of the group in a place, and their counters."""
