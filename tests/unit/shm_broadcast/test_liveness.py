"""The kernel tells which processes live: identities, states, and the watch over a group's processes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec
import pytest

from shm_broadcast import liveness
from shm_broadcast.errors import UsageError
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, fork_count, process_state, this_process
from tests.handlers import handling_at, raising_at
from tests.waiting import wait_until

# The kernel acts at once; a busy machine may take this long.
SOON_S = 20.0


def identity_of(pid: int) -> ProcessIdentity:
    own = this_process()
    return msgspec.structs.replace(own, pid=pid, start_ticks=liveness._stat_fields(pid)[1])


@contextmanager
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that does nothing; end and reap it afterwards."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.guarantee("B14")
def test_a_watch_that_nobody_keeps_closes_its_descriptors() -> None:
    """An exception may leave one without an owner, whole or as it begins."""
    with sleeper() as process:
        before = len(os.listdir("/proc/self/fd"))
        watch: PeerWatch | None = PeerWatch(this_process(), {1: identity_of(process.pid)})
        assert len(os.listdir("/proc/self/fd")) == before + 1
        watch = None
        assert watch is None
        assert len(os.listdir("/proc/self/fd")) == before
        begun: PeerWatch | None = PeerWatch.__new__(PeerWatch)
        begun = None
        assert begun is None


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_watch_that_is_interrupted_as_it_begins_leaves_nothing_open(*, has_ended: bool) -> None:
    """A handler raises at every place of it: where a descriptor has been opened, and where one is closed again."""
    with sleeper() as process:
        own = this_process()
        # The number is in use, by another process than the one that it names.
        peer = own if has_ended else identity_of(process.pid)
        other = msgspec.structs.replace(peer, pid=process.pid)
        before = descriptors()
        made: list[PeerWatch] = []
        for step in count():
            came = raising_at(
                step,
                lambda: made.append(PeerWatch(own, {1: other, 2: other})),
                ("shm_broadcast/liveness.py",),
            )
            while made:
                made.pop().close()
            assert descriptors() == before, f"step {step}"
            if not came:
                break
        assert step > 10


def test_the_number_of_a_thread_is_that_of_no_process() -> None:
    """The kernel gives the number of a process that has ended to a thread too. It then refuses a pidfd of it."""
    numbers = list[int]()
    over = threading.Event()

    def tell() -> None:
        numbers.append(threading.get_native_id())
        over.wait()

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        wait_until(lambda: bool(numbers), "the number of the thread", timeout_s=SOON_S)
        with pytest.raises(ProcessLookupError):
            liveness.open_pidfd(numbers[0])
        own = this_process()
        watch = PeerWatch(own, {1: msgspec.structs.replace(own, pid=numbers[0])})
        assert watch.lost() == (1,)
        watch.close()
    finally:
        over.set()
        thread.join()


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be on a host without a name, and forget one that the test gives."""
    monkeypatch.setattr(liveness, "_host_id", [])


@pytest.mark.guarantee("G64")
def test_a_named_host_has_a_boot_id_of_its_own(unnamed: None) -> None:
    """It has the form of the kernel's, and is equal on all processes that give the host this name."""
    before = this_process()
    liveness.name_host(None)
    assert this_process() == before
    liveness.name_host("a")
    liveness.name_host("a")
    liveness.name_host(None)
    named = this_process()
    assert len(named.boot_id) == len(before.boot_id) == 36
    assert not named.on_same_host(before)
    assert not named.sees(before)
    assert msgspec.structs.replace(named, boot_id=before.boot_id) == before
    with pytest.raises(UsageError, match="host_id is 'b'.*on host 'a'"):
        liveness.name_host("b")
    assert this_process() == named


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- identity -------------------------------------------------------------------------------------------------


def test_an_identity_is_stable_and_travels() -> None:
    """An identity is the same each time, and survives JSON and msgpack."""
    own = this_process()
    assert own == this_process()
    assert own.pid == os.getpid()
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(own), type=ProcessIdentity) == own


def test_a_process_whose_name_has_brackets_and_blanks_is_read_correctly() -> None:
    """A command name with brackets and blanks does not confuse /proc/PID/stat."""
    code = "import time; open('/proc/self/comm', 'w').write('a) R 1 (b'); print('named', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            before = identity_of(process.pid)
            process.stdout.readline()
            assert identity_of(process.pid) == before
            assert process_state(before) == "alive"
        finally:
            process.kill()


def test_two_processes_differ() -> None:
    """Two processes differ, also if one starts right after the other."""
    with sleeper() as one, sleeper() as other:
        assert identity_of(one.pid) != identity_of(other.pid)


@pytest.mark.parametrize(
    ("changed", "same_host", "loopback", "sees"),
    [
        ({}, True, True, True),
        ({"boot_id": "another"}, False, False, False),
        ({"network_namespace": 1}, True, False, True),
        ({"pid_namespace": 1}, True, True, False),
    ],
)
def test_what_namespaces_mean(changed: dict[str, Any], same_host: bool, loopback: bool, sees: bool) -> None:
    """The network namespace decides about loopback, the PID namespace about sight, on one kernel."""
    own = this_process()
    other = msgspec.structs.replace(own, pid=1, **changed)
    assert own.on_same_host(other) is same_host
    assert own.shares_loopback(other) is loopback
    assert own.sees(other) is sees
    assert other.sees(own) is sees


# --- states -----------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("L1")
def test_the_states_of_a_process() -> None:
    """A process is alive, stopped, alive again, dead before it is reaped, and dead once its pid is free."""
    with sleeper() as process:
        identity = identity_of(process.pid)
        assert process_state(identity) == "alive"
        process.send_signal(signal.SIGSTOP)
        wait_until(
            lambda: process_state(identity) == "stopped", 'process_state(identity) == "stopped"', SOON_S
        )
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: process_state(identity) == "alive", 'process_state(identity) == "alive"', SOON_S)
        process.kill()
        # A zombie: this process, its parent, has not waited for it yet.
        wait_until(lambda: process_state(identity) == "dead", 'process_state(identity) == "dead"', SOON_S)
        process.wait()
        assert process_state(identity) == "dead"


@pytest.mark.guarantee("L1")
def test_a_process_that_has_another_ones_pid_is_not_that_one() -> None:
    """Another start time means that the pid was reused and its former owner is dead."""
    own = this_process()
    assert process_state(msgspec.structs.replace(own, start_ticks=own.start_ticks - 1)) == "dead"


def test_forks_are_counted() -> None:
    """A child counts one fork more than its parent, and so does its own child."""
    before = fork_count()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(fork_count() - before)
        _, status = os.waitpid(grandchild, 0)
        os._exit(10 * (fork_count() - before) + os.waitstatus_to_exitcode(status))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 12
    assert fork_count() == before


# --- the watch --------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("L1")
def test_the_watch_names_who_has_ended_and_nobody_else() -> None:
    """Each rank is named from its process's end on, in ascending order; live ones never are."""
    with sleeper() as one, sleeper() as two, sleeper() as three:
        peers = {7: identity_of(one.pid), 2: identity_of(two.pid), 5: identity_of(three.pid)}
        watch = PeerWatch(this_process(), peers)
        assert watch.lost() == ()
        one.kill()
        wait_until(lambda: watch.lost() == (7,), "watch.lost() == (7,)", SOON_S)
        two.kill()
        wait_until(lambda: watch.lost() == (2, 7), "watch.lost() == (2, 7)", SOON_S)
        one.wait()
        two.wait()
        assert watch.lost() == (2, 7)
        assert watch.state(7) == "dead"
        assert watch.state(5) == "alive"
        assert all(watch.watches(rank) for rank in peers)
        watch.close()


@pytest.mark.guarantee("L1")
def test_a_child_that_lives_on_does_not_hide_the_end_of_its_parent() -> None:
    """A pidfd belongs to the process, not to its children."""
    code = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        watch = PeerWatch(this_process(), {1: identity_of(process.pid)})
        process.kill()
        wait_until(lambda: watch.lost() == (1,), "watch.lost() == (1,)", SOON_S)
        os.kill(child, 0)
        os.kill(child, signal.SIGKILL)
        watch.close()


def test_a_stopped_peer_is_not_lost() -> None:
    """A stopped peer is not lost, as it may continue."""
    with sleeper() as process:
        watch = PeerWatch(this_process(), {1: identity_of(process.pid)})
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: watch.state(1) == "stopped", 'watch.state(1) == "stopped"', SOON_S)
        assert watch.lost() == ()
        assert watch.describe(1) == f"pid {process.pid}, stopped"
        watch.close()


def test_who_had_ended_before_the_watch_began_is_lost() -> None:
    """A process that ended earlier is lost, whether its pid is free, a zombie's or reused."""
    with sleeper() as zombie, sleeper() as gone:
        peers = {1: identity_of(zombie.pid), 2: identity_of(gone.pid)}
        peers[3] = msgspec.structs.replace(this_process(), start_ticks=1)
        zombie.kill()
        gone.kill()
        gone.wait()
        wait_until(lambda: process_state(peers[1]) == "dead", 'process_state(peers[1]) == "dead"', SOON_S)
        before = descriptors()
        watch = PeerWatch(this_process(), peers)
        wait_until(lambda: watch.lost() == (1, 2, 3), "watch.lost() == (1, 2, 3)", SOON_S)
        assert watch.state(3) == "dead"
        watch.close()
        assert descriptors() == before


@pytest.mark.guarantee("L2")
@pytest.mark.parametrize("changed", [{"boot_id": "another"}, {"pid_namespace": 1}])
def test_a_peer_that_cannot_be_seen_from_here_is_unknown(changed: dict[str, Any]) -> None:
    """A peer in another PID namespace is neither alive nor dead; the text names its host."""
    own = this_process()
    for pid in (own.pid, 2**22 - 1):
        other = msgspec.structs.replace(own, pid=pid, hostname="far", **changed)
        watch = PeerWatch(own, {4: other})
        assert watch.state(4) == "unknown"
        assert watch.lost() == ()
        assert not watch.watches(4)
        assert "far" in watch.describe(4)
        assert str(pid) in watch.describe(4)
        watch.close()


def test_a_rank_that_was_never_announced_is_unknown() -> None:
    """A rank without a known process is unknown."""
    watch = PeerWatch(this_process(), {})
    assert watch.state(9) == "unknown"
    assert not watch.watches(9)
    assert watch.describe(9) == "no process known"
    watch.close()


def test_closing_gives_every_descriptor_back() -> None:
    """Closing twice releases each descriptor once, also of peers that ended before."""
    before = descriptors()
    with sleeper() as one, sleeper() as other:
        watch = PeerWatch(this_process(), {1: identity_of(one.pid), 2: identity_of(other.pid)})
        assert descriptors() == before + 2
        one.kill()
        wait_until(lambda: watch.lost() == (1,), "watch.lost() == (1,)", SOON_S)
        # It stays open, so that a poll made before tells of the end however many looked meanwhile.
        assert descriptors() == before + 2
        watch.close()
        watch.close()
        assert descriptors() == before
        assert watch.lost() == (1,)


@pytest.mark.guarantee("R15")
def test_a_handler_inside_of_a_look_may_wait_for_threads_that_look_and_adopt() -> None:
    """A `close` in a handler waits for such threads, and they must not wait for the look that it has interrupted."""
    with sleeper() as process:
        peer = identity_of(process.pid)
        for step in count():
            watch = PeerWatch(this_process(), {1: peer})

            def look_and_adopt(watch: PeerWatch = watch) -> None:
                watch.adopt(2, peer, os.pidfd_open(process.pid))
                watch.lost()

            def wait_for_another_thread(work: Callable[[], None] = look_and_adopt) -> None:
                thread = threading.Thread(target=work, daemon=True)
                thread.start()
                thread.join(SOON_S)
                assert not thread.is_alive(), "the other thread waits for the look"

            came = handling_at(step, watch.lost, wait_for_another_thread, ("shm_broadcast/liveness.py",))
            assert watch.lost() == ()
            assert watch.watches(2) == came
            watch.close()
            if not came:
                break
    assert step > 4
