"""A process writes its Python stacks when it is asked, and is asked only if it has said that it does."""

import ctypes
import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from shm_broadcast import _core
from shm_broadcast.stacks import asking
from shm_broadcast.stacks.asking import TEXT_BYTES, WITHIN_S, ask
from shm_broadcast.stacks.offered import DEFAULT_SIGNAL, HEADER_BYTES, NBYTES, handles
from tests.asked import HANGS, hanging, identity_of, said_by, written_by
from tests.waiting import wait_until

# A promise: nothing is waited for longer than this, on a busy machine too.
DELAY_S = 1.0

pytestmark = pytest.mark.slow


def asked(pid: int, **changed: object) -> str:
    """Ask one process, and check how long that takes."""
    start = time.monotonic()
    text = ask({7: identity_of(pid, **changed)})[7]
    assert time.monotonic() - start < DELAY_S
    return text


class WaitingClock:
    """Stands in for the module `time`: its time passes only in `sleep`, which returns at once."""

    def __init__(self) -> None:
        self._passed_s = 0.0

    def monotonic(self) -> float:
        return self._passed_s

    def sleep(self, seconds: float) -> None:
        self._passed_s += seconds


@pytest.mark.guarantee("S12")
@pytest.mark.parametrize("where", HANGS)
def test_the_text_names_the_function_that_hangs(where: str) -> None:
    """Asleep, in a loop, in native code that holds the GIL, or behind a lock: it is at the top of its thread."""
    with hanging(HANGS[where]) as process:
        lines = asked(process.pid).splitlines()
    assert "most recent call first" in lines[0], lines
    # A regular expression is matched by functions of its own.
    assert any(line.endswith(" in hangs_here") for line in lines[1:4]), lines


@pytest.mark.guarantee("S12")
def test_an_answer_that_comes_at_once_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process writes its stacks before the first look at its memory: they are in the text once."""
    send = asking._Question._send_signal

    def send_and_wait(question: asking._Question) -> None:
        before = question._position()
        send(question)
        wait_until(lambda: question._position() > before and not question._is_writing(), "the stacks")

    monkeypatch.setattr(asking._Question, "_send_signal", send_and_wait)
    with hanging(HANGS["sleep"]) as process:
        text = ask({7: identity_of(process.pid)}, within_s=30)[7]
    assert text.count("most recent call first") == text.count(" in hangs_here\n") == 1


@pytest.mark.guarantee("S12")
def test_other_threads_do_not_answer_for_the_main_thread() -> None:
    """Threads of Python and of C beside the main thread that hangs: the text is that of the main thread."""
    threads = (
        "def beside():\n    while True:\n        pass\n"
        "for _ in range(3):\n    threading.Thread(target=beside, daemon=True).start()\n"
    )
    with hanging(threads + HANGS["sleep"]) as process:
        for _ in range(20):
            text = asked(process.pid)
            assert " in hangs_here\n" in text
            assert text.endswith(" in <module>")


@pytest.mark.guarantee("S12")
def test_threads_that_have_made_groups_are_asked_too() -> None:
    """Two that hang and one that has ended: each of the two has its own part, behind that of the main thread."""
    code = """
def beside(ends):
    offer_stacks(NUMBER)
    made.release()
    if not ends:
        time.sleep(600)
made = threading.Semaphore(0)
for ends in (False, True, False):
    threading.Thread(target=beside, args=(ends,), daemon=True).start()
    made.acquire()
"""
    with hanging(code + HANGS["sleep"]) as process:
        parts = asked(process.pid).split("\n\n")
    assert [part.count(" in hangs_here\n") for part in parts] == [1, 0, 0], parts
    assert [part.count(" in beside\n") for part in parts] == [0, 1, 1], parts


@pytest.mark.guarantee("S12")
def test_a_process_that_keeps_its_page_in_a_file_answers(tmp_path: Path) -> None:
    """It still has the page open that it had before, which announces no signal."""
    recorded = (
        "from pathlib import Path\n"
        "from shm_broadcast.status.page import record_own_page\n"
        "from shm_broadcast.status.record_file import new_run\n"
        "before = own_page()\n"
        f"record_own_page(Path({str(tmp_path / 'record')!r}), new_run(), 0)\n"
        "offer_stacks(NUMBER)"
    )
    with hanging(HANGS["sleep"], recorded) as process:
        assert " in hangs_here\n" in asked(process.pid)


@pytest.mark.guarantee("S12")
def test_a_process_whose_name_was_cut_within_a_character_answers() -> None:
    """The kernel keeps 15 bytes of a name, and tells them as they are."""
    named = "ctypes.CDLL(None).prctl(15, 'ループする工程'.encode(), 0, 0, 0)\n"
    with hanging(named + HANGS["sleep"], offers=named + "offer_stacks(NUMBER)") as process:
        assert " in hangs_here\n" in asked(process.pid)


@pytest.mark.guarantee("S15")
@pytest.mark.parametrize("thread", ["str(os.getppid())", "'9' * 200"])
def test_a_thread_of_another_process_is_not_signalled(thread: str) -> None:
    """The memory names a thread that is another process by now, or cannot be: only the main thread answers."""
    code = f"os.pwrite(place, ({thread}).encode().ljust({HEADER_BYTES}), 0)\n"
    find = (
        "place = next(int(name) for name in os.listdir('/proc/self/fd')[:-1]"
        " if 'stacks' in os.readlink(f'/proc/self/fd/{name}'))\n"
    )
    with hanging(find + code + HANGS["sleep"]) as process:
        assert asked(process.pid).count("most recent call first") == 1


@pytest.mark.guarantee("S13")
def test_a_text_holds_no_value() -> None:
    """Arguments and variables are not in it."""
    code = "def hangs_here(password='swordfish'):\n    other = 'swordfish'\n    ready()\n    time.sleep(600)"
    with hanging(code) as process:
        assert "swordfish" not in asked(process.pid)


@pytest.mark.guarantee("S14")
def test_a_stopped_process_says_so_and_gets_no_signal() -> None:
    """It is not waited for; once it goes on it has written nothing, and answers the next time."""
    with hanging(HANGS["sleep"]) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: " T " in Path(f"/proc/{process.pid}/stat").read_text(), "the stop")
        assert "stopped" in asked(process.pid)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: " T " not in Path(f"/proc/{process.pid}/stat").read_text(), "the end of it")
        assert written_by(process.pid) == 0
        assert "hangs_here" in asked(process.pid)


@pytest.mark.guarantee("S14")
def test_a_dead_process_says_so() -> None:
    """Killed and not waited for, and gone."""
    with hanging(HANGS["sleep"]) as process:
        identity = identity_of(process.pid)
        process.kill()
        wait_until(lambda: " Z " in Path(f"/proc/{process.pid}/stat").read_text(), "the end")
        assert ask({7: identity})[7] == f"no stacks of pid {process.pid}: it is dead"
    assert "dead" in ask({7: identity})[7]


@pytest.mark.guarantee("S14")
def test_a_process_that_dies_while_it_is_asked_says_so() -> None:
    """It blocks the signal until it is killed."""
    blocks = f"signal.pthread_sigmask(signal.SIG_BLOCK, [{DEFAULT_SIGNAL}])\n"
    with hanging(blocks + HANGS["sleep"]) as process:
        identity = identity_of(process.pid)
        killing = threading.Timer(0.1, process.kill)
        killing.start()
        assert "dead" in ask({7: identity}, within_s=30.0)[7]
        killing.join()


@pytest.mark.guarantee("S14")
def test_who_blocks_the_signal_is_given_up_in_time() -> None:
    """All threads block it: the text says so."""
    blocks = f"signal.pthread_sigmask(signal.SIG_BLOCK, [{DEFAULT_SIGNAL}])\n"
    with hanging(blocks + HANGS["sleep"]) as process:
        start = time.monotonic()
        assert f"did not answer within {WITHIN_S} s" in asked(process.pid)
        assert time.monotonic() - start >= WITHIN_S


@pytest.mark.guarantee("S14")
def test_nobody_is_waited_for_longer_than_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that runs only while it waits, so that a busy machine cannot add to the time: 0.5 s and one look."""
    clock = WaitingClock()
    monkeypatch.setattr(asking, "time", clock)
    blocks = f"signal.pthread_sigmask(signal.SIG_BLOCK, [{DEFAULT_SIGNAL}])\n"
    with hanging(blocks + HANGS["sleep"]) as process:
        text = ask({7: identity_of(process.pid)})[7]
    assert "did not answer within 0.5 s" in text
    assert 0.5 <= clock.monotonic() <= 0.5 + asking._LOOK_S * 1.01


@pytest.mark.guarantee("S15")
def test_a_reused_pid_is_not_signalled() -> None:
    """Another process with the number of one that has ended: its start differs."""
    with hanging(HANGS["sleep"]) as process:
        begun = identity_of(process.pid).start_ticks
        assert "dead" in asked(process.pid, start_ticks=begun - 1)
        assert written_by(process.pid) == 0


@pytest.mark.guarantee("S15")
@pytest.mark.parametrize(
    ("offers", "text"),
    [
        ("", "no status page"),
        ("own_page()", "announces no signal"),
        ("offer_stacks(0); own_page()", "announces no signal"),
        ("own_page().set_stack_signal(NUMBER)", "closed the memory"),
        ("own_page().set_stack_signal(signal.SIGTERM)", "no status page"),
        ("offer_stacks(NUMBER); faulthandler.unregister(NUMBER)", "nothing handles it"),
    ],
)
def test_who_does_not_handle_the_signal_does_not_get_it(offers: str, text: str) -> None:
    """Without a page, a word in it, memory, or a handler: the signal would end the process, and does not."""
    with hanging(HANGS["sleep"], offers) as process:
        assert text in asked(process.pid)
        time.sleep(0.05)
        assert process.poll() is None


@pytest.mark.guarantee("S15")
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"boot_id": "another", "hostname": "far"}, "on host far, and only processes of this host"),
        ({"pid_namespace": 1}, "another PID namespace"),
    ],
)
def test_who_is_elsewhere_is_not_asked(changed: dict[str, object], text: str) -> None:
    """On another host, or with another meaning of its number."""
    with hanging(HANGS["sleep"]) as process:
        assert text in asked(process.pid, **changed)
        assert written_by(process.pid) == 0


@pytest.mark.guarantee("S15")
def test_another_user_is_told_that_it_may_not_ask() -> None:
    """A child without rights asks a process whose memory it may not read."""
    said = said_by(
        """
from shm_broadcast.liveness import this_process
from shm_broadcast.stacks.asking import ask
offer_stacks(NUMBER)
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: only a tracer with rights may look
parent = this_process()
child = os.fork()
if child == 0:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    print(ask({7: parent})[7], flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    )
    assert "lets this process not look" in said


@pytest.mark.guarantee("S16")
@pytest.mark.parametrize(
    "handler",
    [
        "signal.signal(NUMBER, lambda *_: None)",
        "faulthandler.register(NUMBER)",
        "libc = ctypes.CDLL(None)\nlibc.signal(NUMBER, ctypes.cast(libc.abs, ctypes.c_void_p))",
    ],
)
def test_a_handler_that_exists_is_kept(handler: str) -> None:
    """In Python, in faulthandler or in C: the offer is refused with what to do, and the handler goes on."""
    said = said_by(
        f"""
{handler}
try:
    offer_stacks(NUMBER)
except ValueError as error:
    print(type(error).__name__, error)
os.kill(os.getpid(), NUMBER)
print(offered_signal())
"""
    )
    assert said.startswith(f"UsageError stack_signal is {DEFAULT_SIGNAL}, but this process has a handler")
    assert "GROUP_COORDINATOR_STACK_SIGNAL" in said
    assert said.endswith("\n0")


@pytest.mark.guarantee("S16")
def test_groups_of_one_process_name_one_signal() -> None:
    """The same again or 0 are taken, another is refused; there is one memory."""
    said = said_by(
        """
for number in (0, NUMBER, NUMBER, 0, NUMBER + 1):
    try:
        offer_stacks(number)
    except ValueError as error:
        print(error, end=" ")
names = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1]]
print(sum("stacks" in name for name in names), offered_signal() == NUMBER)
"""
    )
    assert f"writes its stacks on signal {DEFAULT_SIGNAL}" in said
    assert said.endswith("1 True")


@pytest.mark.guarantee("S17")
def test_a_forked_child_does_not_write_its_parents_memory() -> None:
    """It has no handler and no memory; the signal does the default there, and its own offer has its own."""
    said = said_by(
        """
from shm_broadcast.stacks.offered import handles
offer_stacks(NUMBER)
for step in ("signal", "offer"):
    child = os.fork()
    if child == 0:
        print(handles(os.getpid(), NUMBER), offered_signal(), flush=True)
        if step == "offer":
            offer_stacks(NUMBER)
        os.kill(os.getpid(), NUMBER)
        links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1]]
        os._exit(sum("stacks" in link for link in links))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
place = [name for name in os.listdir("/proc/self/fd")[:-1] if "stacks" in os.readlink(f"/proc/self/fd/{name}")]
print(open(f"/proc/self/fdinfo/{place[0]}").read().split()[1])
"""
    )
    assert said.split() == ["False", "0", str(-DEFAULT_SIGNAL), "False", "0", "1", str(HEADER_BYTES)]


@pytest.mark.guarantee("S17")
def test_no_late_signal_ends_a_process_that_ends() -> None:
    """One that comes until the last moment: the exit status is that of the program."""
    for _ in range(5):
        with hanging("def hangs_here():\n    ready()\n    sys.exit(5)") as process:
            while process.poll() is None:
                os.kill(process.pid, DEFAULT_SIGNAL)
                time.sleep(0.0005)  # signals of this kind queue up
            assert process.returncode == 5


@pytest.mark.guarantee("S18")
def test_the_memory_is_bounded_and_the_next_group_empties_it() -> None:
    """Full, it says so and takes no more; when the process offers again, there is room."""
    again = "signal.signal(signal.SIGUSR1, lambda *_: (offer_stacks(NUMBER), ready()))\n"
    # A hundred frames fill it sooner.
    deep = "def hangs_here(depth=90):\n    hangs_here(depth - 1) if depth else (ready(), time.sleep(600))"
    with hanging(again + deep) as process:
        assert process.stdout is not None
        texts = [asked(process.pid)]
        while "most recent call" in texts[-1]:
            texts.append(asked(process.pid))
        assert "its next group empties that memory again" in texts[-1]
        # Nothing was cut, and the memory has room for one more, so that no write has failed.
        assert all(text.endswith(" in <module>") for text in texts[:-1])
        assert NBYTES // 2 < written_by(process.pid) < NBYTES - 2 * len(texts[0])
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "ready\n"
        assert "hangs_here" in asked(process.pid)
        assert written_by(process.pid) < NBYTES // 2


@pytest.mark.guarantee("S18")
def test_a_long_text_is_cut() -> None:
    """A hundred frames with long names."""
    name = "f" * 400
    deep = f"def {name}(depth):\n    {name}(depth - 1) if depth else (ready(), time.sleep(600))\n"
    with hanging(f"{deep}def hangs_here():\n    {name}(100)") as process:
        text = asked(process.pid)
    assert text.endswith("\n(cut)")
    assert len(text) <= TEXT_BYTES + len("\n(cut)")


@pytest.mark.guarantee("S18")
def test_several_that_ask_at_once_get_whole_texts() -> None:
    """Four threads, ten times each: whoever asks holds the memory's lock."""
    with hanging(HANGS["sleep"]) as process:
        identity, texts = identity_of(process.pid), list[str]()

        def ask_often() -> None:
            texts.extend(ask({7: identity}, within_s=30.0)[7] for _ in range(10))

        threads = [threading.Thread(target=ask_often) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(texts) == 40
    assert all(text.startswith("Stack (most") and text.endswith(" in <module>") for text in texts), texts


@pytest.mark.guarantee("S18")
def test_a_child_that_is_forked_meanwhile_keeps_nobody_from_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives on with the memory open that its parent has locked to ask."""
    children, send = list[int](), asking._Question._send_signal

    def fork_and_send(question: asking._Question) -> None:
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        children.append(child)
        send(question)

    with hanging(HANGS["sleep"]) as process:
        monkeypatch.setattr(asking._Question, "_send_signal", fork_and_send)
        try:
            assert " in hangs_here\n" in ask({7: identity_of(process.pid)}, within_s=30)[7]
            monkeypatch.undo()
            assert " in hangs_here\n" in ask({7: identity_of(process.pid)}, within_s=30)[7]
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def test_this_machine_tells_which_signals_are_handled() -> None:
    """The kernel's mask, for a signal with and without a handler."""
    assert handles(os.getpid(), signal.SIGINT)
    assert not handles(os.getpid(), DEFAULT_SIGNAL + 1)


def test_a_handler_leaves_the_reason_of_a_failed_call() -> None:
    """The handler, `close` with the signal's number as its descriptor, fails; the interrupted code keeps its errno."""
    number = int(signal.SIGRTMIN) + 20
    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    with pytest.raises(ValueError, match="no plain handler"):
        _core.keep_errno(number)
    libc.signal(number, ctypes.cast(libc.close, ctypes.c_void_p))
    try:
        for wraps in (False, True, True):
            if wraps:
                _core.keep_errno(number)
            ctypes.set_errno(77)
            libc["raise"](number)
            assert ctypes.get_errno() == (77 if wraps else errno.EBADF)
    finally:
        libc.signal(number, 0)
    for wrong in (0, -1, 1000, 1 << 80):
        with pytest.raises((ValueError, OverflowError)):
            _core.keep_errno(wrong)
