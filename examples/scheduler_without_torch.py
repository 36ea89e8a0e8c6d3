"""A scheduler that broadcasts every step to its workers, without torch: `python examples/scheduler_without_torch.py`.

The scheduler makes a queue and starts two workers. A worker needs two things to open its end: the handle, which is no
secret, and the key, which is one. Both travel through a pipe that the worker inherits.
"""

import subprocess
import sys
from dataclasses import dataclass

from shm_broadcast.codec import register_type
from shm_broadcast.errors import ClosedError
from shm_broadcast.handle import KEY_BYTES
from shm_broadcast.queue import QueueReader, QueueWriter

WORKERS = 2
STEPS = 5


@register_type
@dataclass
class Request:
    """What a scheduler hands out; a class travels once every process has registered it."""

    name: str
    tokens: list[int]


def schedule() -> None:
    """Be the scheduler."""
    with QueueWriter.create("steps", readers=range(WORKERS)) as queue:
        workers = []
        for rank in range(WORKERS):
            command = [sys.executable, __file__, str(rank)]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603 - this very file
            assert worker.stdin is not None
            worker.stdin.write(queue.key + queue.handle.to_bytes(queue.key))
            worker.stdin.close()
            workers.append(worker)
        queue.wait_until_ready(timeout_s=30.0)
        for step in range(STEPS):
            queue.enqueue({"step": step, "start": [Request(f"request-{step}", [step, step + 1])]})
    # The queue is closed: workers read what is in it, and then get a ClosedError.
    sys.exit(max(worker.wait() for worker in workers))


def work(rank: int) -> None:
    """Be a worker."""
    given = sys.stdin.buffer.read()
    key, handle = given[:KEY_BYTES], given[KEY_BYTES:]
    tokens = 0
    with QueueReader.open(handle, key, rank) as queue:
        while True:
            try:
                plan = queue.dequeue()  # sleeps until there is one; wakes when the scheduler dies
            except ClosedError:
                break
            tokens += sum(len(request.tokens) for request in plan["start"])
    # One write: where Python does not buffer, `print` writes the end of the line by itself, behind another worker's.
    sys.stdout.write(
        f"worker {rank}: {tokens} tokens in {STEPS} steps; torch imported: {'torch' in sys.modules}\n"
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        work(int(sys.argv[1]))
    else:
        schedule()
