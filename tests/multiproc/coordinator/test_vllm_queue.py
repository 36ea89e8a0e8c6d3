"""vLLM's verbs over our queues, between the processes that vLLM starts: an executor and its workers."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from coordinator.integrations.vllm.message_queue import MessageQueue, MessageQueueHandle
from shm_broadcast.errors import PeerLostError, UsageError
from tests.handlers import handling_at
from tests.harness import run_ranks
from tests.rank_exit import RankExit
from tests.waiting import has_ended, wait_until

SPAWN = multiprocessing.get_context("spawn")
Executor = tuple[MessageQueue, list[MessageQueue], list[int]]


def answer(requests: MessageQueue, answers: MessageQueue, rank: int) -> None:
    """Answer each request with the rank and the request, as a worker does, until the executor ends the queue."""
    requests.wait_until_ready()
    answers.wait_until_ready()
    try:
        while True:
            answers.enqueue((rank, os.getpid(), requests.dequeue(indefinite=True)))
    except RuntimeError:
        answers.shutdown()
        requests.shutdown()


def work(handle: Any, rank: int, pipe: Any) -> None:
    """Be a worker that was spawned, as vLLM's are."""
    requests = MessageQueue.create_from_handle(handle, rank)
    answers = MessageQueue(1, 1)
    pipe.send(answers.export_handle())
    answer(requests, answers, rank)


@pytest.fixture
def spawned() -> Iterator[Executor]:
    """Return (the requests' writing end, the answers' reading ends, the pids) of an executor with two workers."""
    requests = MessageQueue(2, 2, connect_ip=None)
    answers, processes = [], []
    for rank in range(2):
        ours, theirs = SPAWN.Pipe(duplex=False)
        process = SPAWN.Process(target=work, args=(requests.export_handle(), rank, theirs), daemon=True)
        process.start()
        theirs.close()
        answers.append(MessageQueue.create_from_handle(ours.recv(), 0))
        ours.close()
        processes.append(process)
    requests.wait_until_ready()
    yield requests, answers, [process.pid or 0 for process in processes]
    requests.shutdown()
    for process in processes:
        process.join(20)
        assert not process.is_alive()
        process.close()
    for end in answers:
        end.shutdown()
    # `spawn` started it; nothing of a test may be left.
    tracker: Any = resource_tracker._resource_tracker
    tracker._stop()


def work_as_rank(rank: int, world_size: int, directory: Path, folder: str, queue: bytes, key: bytes) -> None:
    """Be a worker that was forked from a process with torch, which saves its import; end as a process does."""
    requests = MessageQueue.create_from_handle(MessageQueueHandle(queue, key), rank)
    answers = MessageQueue(1, 1)
    handle = answers.export_handle()
    path = Path(folder) / f"{rank}"
    path.with_suffix(".unfinished").write_text(f"{handle.queue.hex()} {handle.key.hex()}")
    path.with_suffix(".unfinished").rename(path)
    answer(requests, answers, rank)
    raise RankExit


def with_workers(folder: Path, body: Callable[[Executor], None]) -> None:
    """Call `body` with an executor of two workers, which have ended or been killed when it returns."""
    requests = MessageQueue(2, 2, connect_ip=None)
    answers: list[MessageQueue] = []

    def execute(pids: Sequence[int]) -> None:
        for rank in range(2):
            path = folder / f"{rank}"
            wait_until(path.exists, f"the handle of worker {rank}")
            handle = MessageQueueHandle(*map(bytes.fromhex, path.read_text().split()))
            answers.append(MessageQueue.create_from_handle(handle, 0))
        requests.wait_until_ready()
        body((requests, answers, list(pids)))
        requests.shutdown()

    handle = requests.export_handle()
    try:
        run_ranks(
            *(work_as_rank, 2, str(folder), handle.queue, handle.key),
            expect_dead={0, 1},
            while_running=execute,
        )
    finally:
        for end in (requests, *answers):
            end.shutdown()


@pytest.mark.slow
def test_requests_and_answers_pass(spawned: Executor) -> None:
    """Small and large requests reach every worker, and every answer comes back, also after a read in vain."""
    requests, answers, pids = spawned
    with pytest.raises(TimeoutError):
        answers[0].dequeue(timeout=0.05)
    for request in ("load_model", {"step": 1}, b"x" * 3_000_000):
        requests.enqueue(("call", request))
        for rank, end in enumerate(answers):
            assert end.dequeue(timeout=30) == (rank, pids[rank], ("call", request))


@pytest.mark.guarantee("G52")
@pytest.mark.slow
def test_a_killed_worker_is_named_at_once(tmp_path: Path) -> None:
    """The error of the read that waits for it names its process."""

    def body(executor: Executor) -> None:
        _, answers, pids = executor
        start = time.monotonic()
        threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL)).start()
        with pytest.raises(PeerLostError, match=str(pids[1])):
            answers[1].dequeue()
        # The engine's promise is two seconds, which a busy machine must not miss either.
        assert time.monotonic() - start < 2

    with_workers(tmp_path, body)


@pytest.mark.parametrize("indefinite", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_long_wait_is_reported_unless_it_is_indefinite(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, indefinite: bool, rank: int
) -> None:
    """Rank 0 reads shared memory, rank 1 a connection."""
    monkeypatch.setenv("GROUP_COORDINATOR_BROADCAST__WARN_AFTER_S", "0.05")
    requests = MessageQueue(2, 1, connect_ip="127.0.0.1")
    readers = [MessageQueue.create_from_handle(requests.export_handle(), each) for each in (0, 1)]
    requests.wait_until_ready()
    caplog.clear()
    with pytest.raises(TimeoutError):
        readers[rank].dequeue(timeout=0.4, indefinite=indefinite)
    assert bool(caplog.messages) is not indefinite
    for end in (requests, *readers):
        end.shutdown()


def test_shutdown_wakes_a_waiting_read() -> None:
    """It is called from a thread that watches the parent process."""
    requests = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(requests.export_handle(), 0)
    threading.Timer(0.1, reader.shutdown).start()
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(indefinite=True)
    assert reader.shutting_down
    requests.shutdown()
    with pytest.raises(RuntimeError, match="cancelled"):
        requests.enqueue(1)


@pytest.mark.guarantee("G52")
@pytest.mark.slow
def test_a_queue_that_ends_because_another_worker_died_names_that_worker(tmp_path: Path) -> None:
    """The executor waits for rank 0, rank 1 dies, and rank 0 is told to end: the error names rank 1."""

    def body(executor: Executor) -> None:
        requests, answers, pids = executor
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: has_ended(pids[1]), "the death of rank 1")
        requests.shutdown()
        with pytest.raises(PeerLostError, match=f"pid {pids[1]}"):
            answers[0].dequeue(timeout=30)

    with_workers(tmp_path, body)


def test_a_reader_on_another_host_gets_its_keys_from_the_handle() -> None:
    """Rank 1 connects over TCP, as a worker of another node, though it is in this process."""
    requests = MessageQueue(2, 1, connect_ip="127.0.0.1")
    handle = requests.export_handle()
    assert handle.local_reader_ranks == [0]
    assert handle.remote_reader_ranks == [1]
    assert handle.remote_subscribe_addr is not None
    readers = [MessageQueue.create_from_handle(handle, rank) for rank in (0, -1)]
    requests.wait_until_ready()
    requests.enqueue({"step": 1})
    assert [reader.dequeue(timeout=30) for reader in readers] == [{"step": 1}] * 2
    for end in (requests, *readers):
        end.shutdown()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"n_reader": 1, "n_local_reader": 2}, "1 readers, of which 2 are local"),
        ({"n_reader": 2, "n_local_reader": 2, "local_reader_ranks": [0]}, "with ranks"),
        ({"n_reader": 2, "n_local_reader": 1}, "pass connect_ip"),
        ({"n_reader": 2, "n_local_reader": 1, "connect_ip": "0.0.0.0"}, "all interfaces"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(arguments: dict[str, Any], text: str) -> None:
    """The constructor names what does not fit."""
    with pytest.raises(UsageError, match=text):
        MessageQueue(**arguments)


def test_each_end_has_its_own_verbs() -> None:
    """The wrong verb is refused, and so is a handle that is not ours."""
    requests = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(requests.export_handle(), 0)
    with pytest.raises(UsageError, match="only a reading end"):
        requests.dequeue()
    with pytest.raises(UsageError, match="only the writing end"):
        reader.enqueue(1)
    with pytest.raises(UsageError, match="every process"):
        MessageQueue.create_from_handle({"not": "a handle"}, 0)  # type: ignore[arg-type]
    assert requests.broadcast_object([1]) == reader.broadcast_object() == [1]
    reader.shutdown()
    requests.shutdown()


@pytest.mark.slow
def test_a_worker_that_ends_in_order_is_not_lost(tmp_path: Path) -> None:
    """A worker that has closed its queue before it ended is no reason for an error."""

    def body(executor: Executor) -> None:
        requests, answers, pids = executor
        requests.shutdown()
        wait_until(lambda: all(map(has_ended, pids)), "the end of both workers")
        assert [end.lost_writer() for end in answers] == [None, None]
        with pytest.raises(RuntimeError, match="cancelled"):
            answers[0].dequeue(timeout=30)

    with_workers(tmp_path, body)


def test_a_forked_child_does_not_answer_for_a_parent_that_died() -> None:
    """A child that was forked after the queue was made keeps no copy of the socket that hands it out."""
    program = """
import os, sys, time
from coordinator.integrations.vllm.message_queue import MessageQueue
queue = MessageQueue(1, 1)
handle = queue.export_handle()
sys.stdout.write(handle.queue.hex() + " " + handle.key.hex() + " ")
sys.stdout.flush()
child = os.fork()
if child == 0:
    os.close(1), os.close(2)  # the pipes of the test must end with the parent
    time.sleep(60)
    os._exit(0)
sys.stdout.write(str(child) + "\\n")
sys.stdout.flush()
os._exit(0)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    queue, key, child = run.stdout.split()
    start = time.monotonic()
    try:
        with pytest.raises(PeerLostError):
            MessageQueue.create_from_handle(MessageQueueHandle(bytes.fromhex(queue), bytes.fromhex(key)), 0)
    finally:
        os.kill(int(child), signal.SIGKILL)
    # Without an answer it would take the settings' `create_timeout_s`, 300 s.
    assert time.monotonic() - start < 30


def test_a_forked_child_knows_its_own_ends_only() -> None:
    """Why a queue was closed is asked of each reading end of the process, and the parent's belong to the parent."""
    program = """
import os
from coordinator.integrations.vllm import message_queue
from coordinator.integrations.vllm.message_queue import MessageQueue
def opened():
    queue = MessageQueue(1, 1)
    return queue, MessageQueue.create_from_handle(queue.export_handle(), 0)
parents = opened()
child = os.fork()
if child == 0:
    writer, reader = opened()
    reader.shutdown()
    try:
        reader.dequeue()
    except RuntimeError:
        os._exit(len(message_queue._reading) - 1)
    os._exit(9)
assert len(message_queue._reading) == 1
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_handler_may_ask_why_a_queue_was_closed_at_any_place() -> None:
    """Also while the call that it interrupts asks, or another end is opened."""
    requests = MessageQueue(2, 2)
    handle = requests.export_handle()
    reader = MessageQueue.create_from_handle(handle, 0)
    reader.shutdown()

    def ask() -> None:
        with pytest.raises(RuntimeError, match="cancelled"):
            reader.dequeue()

    def step_through() -> None:
        for step in count():
            if not handling_at(step, ask, ask, ("vllm/message_queue.py", "/_weakrefset.py")):
                steps.append(step)
                return

    steps = list[int]()
    thread = threading.Thread(target=step_through, daemon=True)
    thread.start()
    thread.join(30.0)
    assert steps, "a handler waits for the call that it has interrupted"
    assert steps[0] > 2
    requests.shutdown()


def test_two_threads_may_close_an_end_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The thread that watches the parent and the worker itself do so; nothing is reported."""
    for _ in range(50):
        requests = MessageQueue(1, 1)
        reader = MessageQueue.create_from_handle(requests.export_handle(), 0)
        gate = threading.Barrier(4)

        def close(end: MessageQueue, gate: threading.Barrier = gate) -> None:
            gate.wait()
            end.shutdown()

        threads = [threading.Thread(target=close, args=(end,)) for end in (requests, reader) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert caplog.messages == []
