"""The harness reports what went wrong in which rank, and leaves no process behind."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import device_comm._core
import shm_broadcast._core
from tests.handlers import Interrupt, alarm
from tests.harness import RankFailureError, RankPool, run_ranks
from tests.leaks import TEMP_PREFIX, Snapshot, leaked_since
from tests.strict import WARNINGS
from tests.unit.shm_broadcast.test_signal_handlers import AlarmError, alarms
from tests.waiting import DEADLINE_S, has_ended, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
KEPT: list[Any] = []


def answer(rank: int, world_size: int, directory: Path, *args: Any) -> dict[str, Any]:
    (directory / str(rank)).touch()
    return {
        "rank": rank,
        "world_size": world_size,
        "args": args,
        "directory": str(directory),
        "pid": os.getpid(),
    }


def raise_in_rank_1(rank: int, world_size: int, directory: Path) -> None:
    print(f"rank {rank} speaks")
    if rank == 1:
        secret_number = 4000 + 242
        raise ValueError(f"rank 1 is unhappy: {secret_number}")


def hang_in_rank_1(rank: int, world_size: int, directory: Path) -> None:
    if rank == 1:
        sleep_for_ever()


def sleep_for_ever() -> None:
    time.sleep(3600)


def die_in_rank_1(rank: int, world_size: int, directory: Path, number: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), number)
    return rank


def exit_in_rank_1(rank: int, world_size: int, directory: Path) -> None:
    if rank == 1:
        os._exit(7)


def wait_for_a_signal(rank: int, world_size: int, directory: Path) -> str:
    (directory / "started").touch()
    if rank == 1:
        sleep_for_ever()
    return "lived"


def raise_while_the_other_waits(rank: int, world_size: int, directory: Path) -> None:
    waiting = directory / "waiting"
    if rank == 0:
        wait_until(waiting.exists, "the other rank is about to sleep")
        raise RuntimeError("the first failure")
    waiting.touch()
    sleep_for_ever()


def spawn_and_leave(rank: int, world_size: int, directory: Path, note: str) -> None:
    if rank == 0:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        Path(note).write_text(str(child.pid))
        os._exit(0)


def leave(rank: int, world_size: int, directory: Path, what: str) -> None:
    if what == "descriptor":
        KEPT.append(os.open(os.devnull, os.O_RDONLY))
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(6,), name="forgotten").start()
    elif what == "directory":
        tempfile.mkdtemp(prefix=TEMP_PREFIX)
    elif what == "file object":
        open(os.devnull)  # nobody closes it: that is what is tested
    elif what == "error in a thread":
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    elif what == "warning":
        warnings.warn("a warning is an error", stacklevel=1)
    elif what == "process group":
        import torch.distributed

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{directory}/s", rank=0, world_size=1
        )


def hang_at_exit(rank: int, world_size: int, directory: Path) -> None:
    import atexit

    atexit.register(sleep_for_ever)


def tell_the_interpreter(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    return {
        "torch": "torch" in sys.modules,
        "variable": os.environ.get("HARNESS_TEST"),
        "warnings": sys.warnoptions,
        "parent": os.getppid(),
    }


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_results_and_arguments_travel() -> None:
    """Each rank gets the arguments, and results come back in rank order."""
    results = run_ranks(answer, 3, 5, "text", b"\0bytes", [1, 2], {"key": None})
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert {result["world_size"] for result in results} == {3}
    assert all(result["args"] == [5, "text", b"\0bytes", [1, 2], {"key": None}] for result in results)
    assert len({result["pid"] for result in results}) == 3
    assert len({result["directory"] for result in results}) == 1
    assert not Path(results[0]["directory"]).exists()


def test_an_exception_is_shown_with_its_rank() -> None:
    """The failure holds the traceback, local variables and output of the rank that raised, and no other's."""
    with pytest.raises(RankFailureError, match="1 of 3 ranks failed") as caught:
        run_ranks(raise_in_rank_1, 3)
    assert set(caught.value.failures) == {1}
    text = str(caught.value)
    assert "ValueError: rank 1 is unhappy: 4242" in text
    assert "secret_number = 4242" in text
    assert "rank 1 speaks" in text
    assert "rank 0 speaks" not in text


@pytest.mark.parametrize("fresh", [False, True])
def test_a_hang_is_shown_with_its_stack(fresh: bool) -> None:
    """At the deadline a rank that hangs is killed, and the failure shows its stack."""
    pids: list[int] = []
    with pytest.raises(RankFailureError, match="no answer within") as caught:
        run_ranks(hang_in_rank_1, 2, timeout_s=3.0 if fresh else 0.5, fresh=fresh, while_running=pids.extend)
    assert set(caught.value.failures) == {1}
    assert "sleep_for_ever" in str(caught.value)
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


def test_a_stopped_rank_is_killed() -> None:
    """A stopped rank shows no stack, and the harness kills it without waiting for one."""
    with pytest.raises(RankFailureError, match="no stacks"):
        run_ranks(die_in_rank_1, 2, int(signal.SIGSTOP), timeout_s=0.5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_shown_with_its_signal(number: signal.Signals) -> None:
    """A rank killed by a signal is a failure that names the signal, unless expected."""
    with pytest.raises(RankFailureError, match=rf"died, by signal {int(number)}") as caught:
        run_ranks(die_in_rank_1, 2, int(number))
    assert set(caught.value.failures) == {1}
    assert run_ranks(die_in_rank_1, 3, int(number), expect_dead={1}) == [0, None, 2]


def test_an_exit_status_is_shown() -> None:
    """A rank that exits without an answer is a failure that names the status."""
    with pytest.raises(RankFailureError, match="died, with exit status 7"):
        run_ranks(exit_in_rank_1, 2)


def test_a_death_that_does_not_come_is_a_failure() -> None:
    """A rank that is expected to die and returns is a failure."""
    with pytest.raises(RankFailureError, match="should have died"):
        run_ranks(answer, 2, expect_dead={1})


def test_a_test_can_kill_a_rank_from_outside() -> None:
    """`while_running` gets the process ids by rank and can kill one."""

    def kill_rank_1(pids: Sequence[int]) -> None:
        os.kill(pids[1], signal.SIGKILL)

    assert run_ranks(wait_for_a_signal, 2, expect_dead={1}, while_running=kill_rank_1) == ["lived", None]


def test_the_first_failure_ends_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one failure the ranks that wait for it are shown and killed well before the deadline."""
    monkeypatch.setattr("tests.harness.GRACE_S", 0.3)
    with pytest.raises(RankFailureError, match="of the first failure") as caught:
        run_ranks(raise_while_the_other_waits, 2, timeout_s=3600)
    assert "the first failure" in caught.value.failures[0]
    assert "sleep_for_ever" in caught.value.failures[1]


def test_a_process_that_a_rank_leaves_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that outlives its rank is killed and fails the test, even if the rank's death was expected."""
    monkeypatch.setattr("tests.harness.SURVIVOR_GRACE_S", 0.1)
    note = tmp_path / "pid"
    with pytest.raises(RankFailureError, match="survive it"):
        run_ranks(spawn_and_leave, 1, str(note), expect_dead={0})
    assert not is_alive(int(note.read_text()))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("descriptor", "descriptor .* -> /dev/null"),
        ("thread", "thread 'forgotten'"),
        ("directory", f"directory {TEMP_PREFIX}"),
        ("file object", "ResourceWarning"),
        ("error in a thread", "ZeroDivisionError"),
        ("warning", "a warning is an error"),
        ("process group", "default process group"),
    ],
)
def test_what_a_rank_leaves_is_a_failure(what: str, text: str) -> None:
    """A rank that leaves something behind or hides an error fails."""
    with pytest.raises(RankFailureError, match=text):
        run_ranks(leave, 1, what)
    for path in Path(tempfile.gettempdir()).glob(f"{TEMP_PREFIX}*"):
        path.rmdir()


def test_a_hang_at_exit_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end after its function has returned is a failure with a stack."""
    monkeypatch.setattr("tests.harness.EXIT_S", 0.5)
    with pytest.raises(RankFailureError, match="hangs while it ends") as caught:
        run_ranks(hang_at_exit, 1)
    assert "sleep_for_ever" in str(caught.value)


def abort_after_python(rank: int, world_size: int, directory: Path, with_thread: bool) -> None:
    libc = ctypes.CDLL(None)
    libc.on_exit(libc.abort, None)
    if with_thread:
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


def abort_after_a_pool() -> None:
    with RankPool(1) as pool:
        pool.run(abort_after_python, False)


def test_the_exit_functions_of_c_are_left_out_only_by_a_rank_of_one_thread() -> None:
    """`run_ranks` runs them if another thread could meet what they destroy; a pool always does."""
    ended = "had returned, but then ended by signal 6"
    run_ranks(abort_after_python, 1, False)
    with pytest.raises(RankFailureError, match=ended):
        run_ranks(abort_after_python, 1, True)
    with pytest.raises(RankFailureError, match=ended):
        abort_after_a_pool()


class AbortsAtItsEnd:
    """An object that shows by which process it is destroyed."""

    def __del__(self) -> None:
        os.abort()


def keep_until_the_exit(rank: int, world_size: int, directory: Path, where: str) -> None:
    vars(sys.modules[where])["KEPT"] = [AbortsAtItsEnd()]


def keep_in_a_pool(where: str) -> None:
    with RankPool(1) as pool:
        pool.run(keep_until_the_exit, where)


def test_the_objects_of_a_rank_are_destroyed_at_its_end() -> None:
    """`run_ranks` leaves only torch's modules as they are; a pool destroys those, too."""
    ended = "had returned, but then ended by signal 6"
    run_ranks(keep_until_the_exit, 1, "torch")
    with pytest.raises(RankFailureError, match=ended):
        run_ranks(keep_until_the_exit, 1, __name__)
    with pytest.raises(RankFailureError, match=ended):
        keep_in_a_pool("torch")


def test_our_cores_have_no_exit_functions_of_c() -> None:
    """Our native cores have no C exit functions that a rank could skip."""
    for core in (device_comm._core, shm_broadcast._core):
        path = core.__file__
        assert path is not None
        # List imported symbols only: debug information may contain the name elsewhere.
        listed = subprocess.run(
            ["nm", "--dynamic", "--undefined-only", path], capture_output=True, text=True, check=True
        ).stdout
        assert "memcpy" in listed
        assert "atexit" not in listed


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    """A lambda or a nested function raises at once."""
    with pytest.raises(ValueError, match="top level"):
        run_ranks(lambda rank, world_size, directory: None, 1)


def get_a_late_alarm(rank: int, world_size: int, directory: Path) -> str:
    """Get an alarm when the block that has set it is over."""
    for _ in range(3):
        with alarm(DEADLINE_S, lambda: None):
            pass
        signal.raise_signal(signal.SIGALRM)
    return "goes on"


def test_an_alarm_that_comes_late_disturbs_nobody(tmp_path: Path) -> None:
    """A thread of a library may have been told of it: neither a rank nor a process of pytest ends, or says an error."""
    assert [get_a_late_alarm(0, 1, tmp_path), *run_ranks(get_a_late_alarm, 1)] == ["goes on"] * 2


class Watched:
    """Something whose end calls a function, from which Python lets no exception out."""

    def __init__(self, at_end: Callable[[], object]) -> None:
        """Let its end call `at_end`."""
        weakref.finalize(self, at_end)


def end_one(at_end: Callable[[], object]) -> None:
    """Let something end that calls `at_end`, and wait."""
    Watched(at_end)
    time.sleep(DEADLINE_S)


def test_an_alarm_in_a_finalizer_strikes_a_little_later() -> None:
    """What its handler raises arrives, instead of being written to the standard error."""

    def interrupt() -> None:
        raise Interrupt

    with pytest.raises(Interrupt), alarm(2 * DEADLINE_S, interrupt):
        end_one(lambda: signal.raise_signal(signal.SIGALRM))


def test_alarms_in_a_finalizer_do_not_strike() -> None:
    """Of alarms that come again and again, the first one behind the finalizer strikes."""
    counts: list[int] = []

    def outlast_alarms() -> None:
        handler.is_armed = True
        end = time.monotonic() + 0.01
        while time.monotonic() < end:
            counts.append(handler.count)

    with alarms(0.0002) as handler, pytest.raises(AlarmError):
        end_one(outlast_alarms)
    assert set(counts) == {0}
    assert handler.count == 1


def test_a_fresh_rank_is_a_new_interpreter() -> None:
    """A fresh rank has imported nothing and starts with its environment; in both kinds warnings are errors."""
    (forked,) = run_ranks(tell_the_interpreter, 1, environ={"HARNESS_TEST": "forked"})
    (fresh,) = run_ranks(tell_the_interpreter, 1, environ={"HARNESS_TEST": "fresh"}, fresh=True)
    assert (forked["torch"], forked["variable"], forked["warnings"]) == (True, "forked", [*WARNINGS])
    assert (fresh["torch"], fresh["variable"], fresh["warnings"]) == (False, "fresh", [*WARNINGS])


def test_a_pool_keeps_its_processes(ranks2: RankPool) -> None:
    """A pool runs many functions in the same processes, each with a new directory."""
    first = ranks2.run(answer, 1)
    second = ranks2.run(answer, 2)
    assert [result["pid"] for result in first] == [result["pid"] for result in second] == ranks2.pids
    assert first[0]["directory"] != second[0]["directory"]


def compile_something(rank: int, world_size: int, directory: Path) -> None:
    """Call a function compiled by torch."""
    import torch

    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2.0


def test_a_function_that_compiles_fails_in_processes_that_others_use() -> None:
    """The frame evaluator stays in them, and changes where signal handlers run."""
    with RankPool(1) as pool, pytest.raises(RankFailureError, match="torch.compile has run"):
        pool.run(compile_something)
    with RankPool(1, compiles=True) as pool:
        pool.run(compile_something)
    run_ranks(compile_something, 1)


def test_a_pool_is_rebuilt_after_a_failure() -> None:
    """A failure ends all processes of the pool, and the next function runs in new ones."""
    with RankPool(2) as pool:
        pool.run(answer)
        before = pool.pids
        with pytest.raises(RankFailureError, match="sleep_for_ever"):
            pool.run(hang_in_rank_1, timeout_s=0.3)
        assert pool.pids == []
        assert not any(is_alive(pid) for pid in before)
        pool.run(answer)
        assert not set(before) & set(pool.pids)


def test_no_rank_survives_the_death_of_the_test_process() -> None:
    """Ranks die at once when the process that runs the tests is killed."""
    code = """
import os, signal
from tests.harness import RankPool
from tests.unit.project.test_harness import hang_in_rank_1
def die(pids):
    print(*pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
RankPool(2).run(hang_in_rank_1, while_running=die)
"""
    dead = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert dead.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in dead.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: all(map(has_ended, pids)), f"the end of processes {pids}", 20.0)


def test_leaks_of_this_process_are_found() -> None:
    """A snapshot finds a descriptor, a thread and a child, and forgets them once they are gone."""
    before = Snapshot.take()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="still here")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    leaks = "\n".join(leaked_since(before))
    assert f"descriptor {descriptor} -> /dev/null" in leaks
    assert "'still here'" in leaks
    assert f"child {child.pid}" in leaks
    done.set()
    thread.join()
    os.close(descriptor)
    child.communicate(b"\n")
    assert leaked_since(before) == []


def test_a_native_thread_that_is_left_is_found() -> None:
    """Python does not list it: here that of a context of ZeroMQ. torch's pools, which stay, are none."""
    import torch  # a fresh rank imports this module
    import zmq

    before = Snapshot.take()
    total = torch.ones(1 << 22).sum()
    with zmq.Context() as context, context.socket(zmq.PUB):
        leaks = "\n".join(leaked_since(before))
        assert "native thread" in leaks
        assert "ZMQbg" in leaks
    assert total == 1 << 22
    assert leaked_since(before) == []
