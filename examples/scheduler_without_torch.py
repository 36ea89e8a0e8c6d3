"""A scheduler that broadcasts each step to its workers, without torch: `python examples/scheduler_without_torch.py`.

The scheduler creates a queue and starts two workers. To open its end, a worker needs the handle, which is public, and
the key, which is secret. Both travel through a pipe that the worker inherits.
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
    """A request in a step. Every process must register a class that is sent."""

    name: str
    tokens: list[int]


def schedule() -> None:
    """Run the scheduler."""
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
    # The queue is closed: workers read the remaining messages, and then get a ClosedError.
    sys.exit(max(worker.wait() for worker in workers))


def work(rank: int) -> None:
    """Run a worker."""
    given = sys.stdin.buffer.read()
    key, handle = given[:KEY_BYTES], given[KEY_BYTES:]
    tokens = 0
    with QueueReader.open(handle, key, rank) as queue:
        while True:
            try:
                plan = queue.dequeue()  # sleeps until a message arrives; raises if the scheduler dies
            except ClosedError:
                break
            tokens += sum(len(request.tokens) for request in plan["start"])
    # A single write: an unbuffered `print` writes the line end separately, and workers' lines would mix.
    sys.stdout.write(
        f"worker {rank}: {tokens} tokens in {STEPS} steps; torch imported: {'torch' in sys.modules}\n"
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        work(int(sys.argv[1]))
    else:
        schedule()
