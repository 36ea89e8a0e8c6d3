"""Messages that are decoded while they are written: what arrives is what was sent, whatever was shown before."""

import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from shm_broadcast import codec
from shm_broadcast.errors import UsageError
from shm_broadcast.queue import QueueWriter
from shm_broadcast.settings import WaitMode
from tests.harness import RankPool
from tests.queue_ranks import Meeting, offer, take
from tests.queues import PAGE, RECORD_HEADER, memory_of

LIMIT_S = 30.0
MESSAGES = 400
ATTEMPTS = 5
PUBLISHED, DRAFT = 64, 104
LINE, DRAFT_BYTES = 64, 4096


def step_of(number: int) -> Any:
    """Return a message of 0.1 to 8 KB, of builtin types; some hold tuples, sets, or bytes that travel out of band."""
    rng = random.Random(number)
    reqs = [
        {
            "id": f"req-{number}-{i}",
            "tokens": [rng.randrange(1 << rng.choice([6, 14, 40])) for _ in range(16)],
        }
        for i in range(rng.choice([1, 4, 8, 8, 60]))
    ]
    extra = rng.choice([None, None, (1, ("a", [2.5])), {3, 4}, bytearray(300), bytes(3000), "ü" * 200])
    return {"number": number, "reqs": reqs, "extra": extra} if rng.random() < 0.5 else [extra, reqs, number]


def draft_another(end: QueueWriter, message: Any) -> int:
    """Write a draft of another message of the same length, and return how much of it a reader may look at."""
    memory = memory_of(end)
    if any(reader.behind_bytes for reader in end.statistics().readers):
        return 0
    frame = codec.encode(message).to_bytes().replace(b"req-", b"REQ-")[:DRAFT_BYTES]
    lines = len(frame) // LINE * LINE
    position = struct.unpack_from("Q", memory, PUBLISHED)[0] % (len(memory) - PAGE)
    if position + RECORD_HEADER + DRAFT_BYTES > len(memory) - PAGE:
        return 0
    start = PAGE + position + RECORD_HEADER
    memory[start : start + lines] = frame[:lines]
    return lines


def pass_steps(rank: int, world_size: int, directory: Path, mode: WaitMode) -> int:
    """Send or read all messages, a little apart; return how many were decoded ahead."""
    meeting = Meeting(directory)
    end: Any = offer(meeting, range(1, world_size), 64 << 10, wait=mode) if rank == 0 else take(meeting, rank)
    with end:
        if rank == 0:
            end.wait_until_ready(LIMIT_S)
        for number in range(MESSAGES):
            if rank > 0:
                assert end.dequeue(LIMIT_S) == step_of(number)
                continue
            message, memory = step_of(number), memory_of(end)
            time.sleep(0.0005)
            if number % 7 == 5:
                with pytest.raises(UsageError, match="not carried"):
                    end.enqueue([message, object()], LIMIT_S)
            lines = draft_another(end, message) if number % 3 == 2 else 0
            if lines > 0:
                # A reader that polls looks at it at once, and finds the true message some microseconds later.
                struct.pack_into("Q", memory, DRAFT, lines)
            end.enqueue(message, LIMIT_S)
        meeting.mark(f"done-{rank}")
        for other in range(world_size):
            meeting.wait(f"done-{other}")
        return 0 if rank == 0 else int(end._ring._port.previewed)


@pytest.mark.guarantee("B1", "B23")
@pytest.mark.parametrize("mode", ["spin", "adaptive", "park"])
def test_what_is_shown_ahead_changes_no_message(ranks2: RankPool, mode: WaitMode) -> None:
    """Drafts that are given up, that are of another message or that take their time cost no message and change none."""
    # A reader that polls looks ahead, unless it never runs beside the writer, as with many others on two cores.
    seen = [0]
    while len(seen) <= ATTEMPTS and seen[-1] == 0:
        seen.append(ranks2.run(pass_steps, mode)[1])
        if mode != "spin":
            return
    assert seen[-1] > 0, seen


@pytest.mark.guarantee("B23")
def test_several_readers_look_ahead(ranks4: RankPool) -> None:
    """Each reader decides for itself, and all get the same."""
    ranks4.run(pass_steps, "adaptive")
