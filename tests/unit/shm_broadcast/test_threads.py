"""A thread is joined and found alive as it is, also behind a wait in which a signal handler has raised."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm_broadcast import codec
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import CapabilityError
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.threads import Aside, DaemonThread, import_aside
from tests.handlers import Interrupt, raising_at, uncollected
from tests.leaks import Snapshot
from tests.remotes import HERE
from tests.waiting import wait_until


@pytest.fixture
def strike() -> Iterator[Callable[[float], None]]:
    """Return a function that lets a handler raise after a time."""

    def handler(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda after_s: signal.setitimer(signal.ITIMER_REAL, after_s) and None
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.guarantee("R14")
def test_a_start_that_is_interrupted_at_any_place_leaves_no_thread() -> None:
    """What a handler raises in the wait for its beginning arrives as it is; the thread begins and ends all the same."""
    before = len(os.listdir("/proc/self/task"))
    for step in count():
        thread = DaemonThread(lambda: None, "test")
        came = raising_at(step, thread.start, ("/threading.py", "shm_broadcast/threads.py"))
        wait_until(lambda: len(os.listdir("/proc/self/task")) <= before, f"the end of step {step}", 5.0)
        if not came:
            break
    assert step > 5


@uncollected()
@pytest.mark.guarantee("R14")
def test_an_error_of_a_handler_in_a_start_lets_the_thread_run(strike: Callable[[float], None]) -> None:
    """Python's own `start` takes an `Exception` that comes in it for a failure, and the thread then does not run."""
    is_armed, struck = False, 0

    def handler(*_: object) -> None:
        # A thread that the kernel has given the signal may tell Python of it late.
        if is_armed:
            raise ValueError("of a handler")

    signal.signal(signal.SIGALRM, handler)
    for number in range(3000):
        ran: list[int] = []
        thread = DaemonThread(partial(ran.append, number), "test")
        try:
            is_armed = True
            strike(1e-6 * (1 + number % 200))
            thread.start()
            is_armed = False
        except ValueError as error:
            is_armed = False
            assert str(error) == "of a handler"  # noqa: PT017 - it may come or not
            struck += 1
        if thread.ident is not None:
            thread.join(5.0)
            assert ran == [number]
    assert struck > 100


def test_a_thread_that_cannot_be_started_says_so() -> None:
    """The caller gets the error of Python, here of a thread that was started before."""
    thread = DaemonThread(lambda: None, "test")
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="once"):
        thread.start()


def test_a_thread_whose_join_was_interrupted_is_alive_and_joined_again(
    strike: Callable[[float], None],
) -> None:
    """Python's own thread counts as ended then, before 3.13."""
    may_end = threading.Event()
    thread = DaemonThread(may_end.wait, "test")
    thread.start()
    for _ in range(3):
        with pytest.raises(Interrupt):  # noqa: PT012 - on a busy machine the alarm may come before the wait
            strike(0.02)
            thread.join()
        assert thread.is_alive()
    thread.join(0.01)
    assert thread.is_alive()
    may_end.set()
    thread.join()
    assert not thread.is_alive()


def test_a_strike_while_a_thread_ends_arrives_as_it_is(strike: Callable[[float], None]) -> None:
    """It strikes at the time at which the thread ends, once before and once behind it."""
    for number in range(200):
        thread = DaemonThread(time.sleep, "test", (0.002,))
        thread.start()
        with suppress(Interrupt):
            strike(0.0015 + number * 5e-6)
            thread.join()
            time.sleep(0.01)
        thread.join()
        assert not thread.is_alive()


def test_a_handler_joins_a_thread_that_its_own_thread_joins() -> None:
    """Both return once it has ended."""
    thread = DaemonThread(time.sleep, "test", (0.1,))
    joined = []

    def handler(*_: object) -> None:
        thread.join()
        joined.append(thread.is_alive())

    before = signal.signal(signal.SIGALRM, handler)
    thread.start()
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    thread.join()
    signal.signal(signal.SIGALRM, before)
    assert joined == [False]


def test_a_forked_child_has_no_such_thread() -> None:
    """The wait for it ends at once."""
    may_end = threading.Event()
    thread = DaemonThread(may_end.wait, "test")
    thread.start()
    child = os.fork()
    if child == 0:
        thread.join()
        os._exit(thread.is_alive())
    assert os.waitpid(child, 0)[1] == 0
    may_end.set()
    thread.join()


def test_a_thread_is_joined_by_others_and_behind_its_start() -> None:
    """It raises what Python's own thread raises."""
    thread = DaemonThread(int, "test")
    with pytest.raises(RuntimeError, match="before it is started"):
        thread.join()
    assert not thread.is_alive()
    raised: list[BaseException] = []

    def body() -> None:
        try:
            own.join()
        except RuntimeError as error:
            raised.append(error)

    own = DaemonThread(body, "test")
    own.start()
    own.join()
    assert str(raised[0]) == "cannot join current thread"


def test_what_a_step_opens_is_kept_though_its_wait_is_interrupted(strike: Callable[[float], None]) -> None:
    """`settle` waits for the step, however often the wait for it was interrupted."""
    kept = []

    def step() -> None:
        strike(0.02)  # not before: `settle` keeps a step that has not begun from beginning
        time.sleep(0.1)
        kept.append(1)

    aside = Aside()
    with pytest.raises(Interrupt):
        aside.run(step)
    aside.settle(lambda: None)
    assert kept == [1]


LOADS = """
import sys
import numpy as np
from shm_broadcast import codec

struck = []

def strike(frame, event, _arg):
    if event == "call" and frame.f_code.co_name == "_path_join":
        struck.append(frame)
        raise ValueError("of a handler")

if sys.argv[1] == "decode":
    message = bytes.fromhex(sys.argv[2])
    work = lambda: codec.decode(message).tolist()
else:
    work = lambda: codec.encode(np.arange(3)).to_bytes().hex()
assert "shm_broadcast.codec.numpy_adapter" not in sys.modules
sys.setprofile(strike)
try:
    found = work()
finally:
    sys.setprofile(None)
assert not struck
print(found)
"""


@pytest.mark.guarantee("R14")
def test_a_handler_that_strikes_where_the_codec_loads_its_adapters_hides_none() -> None:
    """`importlib` takes a `ValueError` for its own at some places, and says that there is no such module."""

    def said_by(*words: str) -> str:
        command = [sys.executable, "-c", LOADS, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    assert said_by("decode", said_by("encode")) == "[0, 1, 2]"


READS_WITHIN_AN_IMPORT = """
import signal
import sys
from shm_broadcast import codec
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import UsageError
from shm_broadcast.queue import QueueReader, QueueWriter

frame, is_far, place = bytes.fromhex(sys.argv[1]), sys.argv[2] == "True", sys.argv[3]
message, keys = codec.Message(frame, (), len(frame)), RemoteKeys.generate()
far = {"remote_readers": {0: keys.public}, "bind_address": "127.0.0.1"}
writer = QueueWriter.create("steps", **far) if is_far else QueueWriter.create("steps", [0])
reader = QueueReader.open(writer.handle, writer.key, 0, remote_keys=keys)
writer.wait_until_ready(10.0)
if is_far:
    codec.encode = lambda _obj: message
    writer.enqueue(None, 10.0)
else:
    writer._ring.write(message, 10.0)
refusals = []

def lend():
    with reader.loan(10.0):
        pass

def read(_number, _frame):
    for call in (lambda: reader.dequeue(10.0), reader.try_dequeue, lend):
        try:
            call()
        except UsageError as error:
            refusals.append(str(error))

def strike(frame, event, _arg):
    code = frame.f_code
    if event == "call" and not refusals and "numpy" in sys.modules and code.co_name == place:
        if place == "find_spec" or code.co_filename.endswith("/numpy/version.py"):
            signal.raise_signal(signal.SIGUSR1)

signal.signal(signal.SIGUSR1, read)
sys.setprofile(strike)
assert "numpy" not in sys.modules
import numpy
sys.setprofile(None)
for each in refusals:
    assert "inside of an import of numpy" in each and "it needs numpy" in each, each
assert len(refusals) == 3
print(reader.dequeue(10.0).tolist())
reader.close()
writer.close()
"""


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("place", ["find_spec", "<module>"])
@pytest.mark.parametrize("is_far", [False, True])
def test_a_handler_that_needs_a_module_which_its_thread_is_importing_is_refused(
    *, is_far: bool, place: str
) -> None:
    """Its reads end, though they can have the array only after the import; the array stays the next message."""
    frame = codec.encode(np.arange(3)).to_bytes().hex()
    command = [sys.executable, "-c", READS_WITHIN_AN_IMPORT, frame, str(is_far), place]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (found.stdout.strip(), found.stderr) == ("[0, 1, 2]", "")


def map_into(found: list[Any], call: Callable[[str], object], name: str) -> None:
    """Append what a call returns."""
    found.append(call(name))


@pytest.mark.guarantee("R14")
def test_an_import_that_is_interrupted_at_any_place_hinders_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is there for the next import, which would wait for ever on a lock that was left taken."""
    monkeypatch.syspath_prepend(tmp_path)
    for step in count():
        name = f"imported_aside_{step}"
        (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(0.001)\nvalue = 1\n")
        places = (
            "importlib._bootstrap>",
            "importlib/__init__.py",
            "shm_broadcast/threads.py",
            "/threading.py",
        )
        came = raising_at(step, partial(import_aside, name), places)
        found = list[Any]()
        thread = threading.Thread(target=map_into, args=(found, import_module, name), daemon=True)
        thread.start()
        thread.join(10.0)
        assert [each.value for each in found] == [1], f"step {step}"
        del sys.modules[name]
        if not came:
            break
    assert step > 5


@pytest.mark.guarantee("B14")
@pytest.mark.parametrize("what", ["create", "create far", "open far"])
def test_an_end_whose_thread_cannot_be_started_is_not_made(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The error says what the thread is for, nothing is left open, and the next try works."""
    start, name = threading.Thread.start, f"group-coordinator-{'remote' if 'far' in what else 'handover'}"

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    keys = RemoteKeys.generate()
    near, far = {"readers": [0]}, {"remote_readers": {0: keys.public}, "bind_address": HERE}
    create: Any = partial(QueueWriter.create, "steps", **(far if "far" in what else near))
    with ExitStack() as stack:
        call = create
        if what == "open far":
            writer = stack.enter_context(create())
            call = partial(QueueReader.open, writer.handle, writer.key, 0, 20.0, remote_keys=keys)
        before = Snapshot.take().descriptors
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(
                CapabilityError, match="no thread could be started to .* new thread"
            ) as raised:
                call()
        assert raised.value.requirement == "a thread"
        # zmq closes its sockets on a thread of its own.
        wait_until(lambda: Snapshot.take().descriptors == before, "the end of what was opened")
        call().close()
