"""The queue's transport to readers on other hosts: what arrives, how much is held for readers, deadlines."""

import os
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import ClosedError, CommTimeoutError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from tests.harness import RankPool, run_ranks
from tests.probes import requires
from tests.queue_ranks import DEADLINE_S, Marks, blob, ended_with
from tests.queues import background, segments_of
from tests.remotes import HERE, MEGABYTE, counted, remote_queue, share_queue, take_remote, until_full
from tests.unit.shm_broadcast.codec_samples import VALUES, same
from tests.waiting import sleeping_in, wait_until

# --- what arrives ---------------------------------------------------------------------------------------------


def pass_everything(rank: int, world_size: int, directory: Path) -> int:
    """Send every kind of object and arrays of 8 MB, or read them on this host or as if on another one."""
    marks = Marks(directory)
    end: Any
    if rank == 0:
        end = share_queue(marks, remote=[2, 3], local=[1])
    elif rank == 1:
        handle, key = map(bytes.fromhex, marks.wait("queue-0").split())
        end = QueueReader.open(handle, key, 1, DEADLINE_S)
    else:
        end = take_remote(marks, rank)
    with end:
        objects = [*VALUES.values()]
        for obj in objects:
            if rank == 0:
                end.enqueue(obj, DEADLINE_S)
            else:
                assert same(end.dequeue(DEADLINE_S), obj)
        for number in range(40):
            nbytes = [0, 100, 5_000, 300_000, 8_000_000][number % 5]
            if rank == 0:
                end.enqueue([number, blob(number, nbytes), torch.arange(nbytes // 8)], DEADLINE_S)
                continue
            found, data, tensor = end.dequeue(DEADLINE_S)
            assert found == number
            assert np.array_equal(data, blob(number, nbytes))
            assert torch.equal(tensor, torch.arange(nbytes // 8))
        if rank == 0:
            marks.mark("written")
            for reader in range(1, world_size):
                marks.wait(f"read-{reader}")
        else:
            marks.wait("written")
            marks.mark(f"read-{rank}")
            with pytest.raises(ClosedError):
                end.dequeue(DEADLINE_S)
        messages: int = end.statistics().messages
    assert segments_of() == []
    return messages


@pytest.mark.guarantee("R1")
def test_every_kind_of_object_reaches_local_and_remote_readers_in_order(ranks4: RankPool) -> None:
    """A reader on the writer's host and two over TCP get equal objects, each whole, once and in order."""
    counts = ranks4.run(pass_everything)
    assert counts == [len(VALUES) + 40] * 4


@pytest.mark.guarantee("R1")
def test_try_dequeue_lease_and_typed_decoding_work_as_on_one_host() -> None:
    """The other calls of a reader do the same over TCP as on a ring."""
    with remote_queue() as (writer, readers):
        reader = readers[1]
        assert reader.try_dequeue() == (False, None)
        writer.enqueue({"a": np.arange(5000)})
        with reader.loan(DEADLINE_S) as obj:
            assert obj["a"].sum() == 12497500
        writer.enqueue([1, 2])
        assert reader.dequeue(DEADLINE_S, tuple[int, int]) == (1, 2)
        writer.enqueue("last")
        found: list[tuple[bool, Any]] = []

        def take() -> bool:
            found.append(reader.try_dequeue())
            return found[-1][0]

        wait_until(take, "the last message", poll_s=0.001)
        assert found[-1] == (True, "last")
        told = reader.statistics()
        assert (told.messages, told.readers[0].behind_messages) == (3, 0)


@pytest.mark.guarantee("R1")
def test_one_reader_waits_for_rings_and_connections_at_once() -> None:
    """`dequeue_any` takes readers of both kinds, serves each, and keeps its deadline."""
    with remote_queue() as (first, ends), remote_queue(local=[5], remote=[2]) as (second, others):
        for rank in (5, 2):
            readers = [ends[1], others[rank]]
            if rank == 2:
                assert [dequeue_any(readers, DEADLINE_S) for _ in range(2)] == [(1, "b0"), (1, "b1")]
            for number in range(2):
                first.enqueue(f"a{number}")
                second.enqueue(f"b{number}")
            got = [dequeue_any(readers, DEADLINE_S) for _ in range(4)]
            assert sorted(got) == [(0, "a0"), (0, "a1"), (1, "b0"), (1, "b1")]
            with pytest.raises(CommTimeoutError):
                dequeue_any(readers, 0.1)
        with background(partial(dequeue_any, [ends[1], others[2]])) as late:
            wait_until(lambda: sleeping_in("dequeue_any"), "`dequeue_any` asleep")
            first.enqueue("late")
        assert late == [(0, "late")]
        counted(others[5], 2)
        with background(partial(dequeue_any, [ends[1], others[5]])) as ended:
            first.close()
        assert isinstance(ended[0], ClosedError)


@pytest.mark.guarantee("R6")
def test_a_remote_reader_waits_at_next_to_no_cost() -> None:
    """Together a writer and a waiting reader use a few hundredths of a core while nothing is sent."""
    with remote_queue() as (writer, readers), background(readers[1].dequeue):
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(1.5)  # the processor time of this wait is measured
        after = resource.getrusage(resource.RUSAGE_SELF)
        writer.enqueue("done")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


# --- room, deadlines ------------------------------------------------------------------------------------------


def hold_the_writer_back(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Rank 0 writes, rank 1 reads at once, and rank 2 begins late."""
    marks = Marks(directory)
    if rank == 0:
        with share_queue(marks, remote=[1, 2], high_water_bytes=MEGABYTE) as writer:
            writer.wait_until_ready(DEADLINE_S)
            sent, error = until_full(writer, blob(0, 100_000))
            behind = {reader.rank: reader.behind_bytes for reader in writer.statistics().readers}
            marks.mark("full")
            for _ in range(30):
                writer.enqueue(blob(0, 100_000), DEADLINE_S)
            writer.enqueue("end", DEADLINE_S)
            waits = writer.statistics().waits
            for reader in (1, 2):
                marks.wait(f"done-{reader}")
            return {
                "sent": sent,
                "missing": list(error.missing),
                "text": str(error),
                "behind": behind,
                "waits": waits,
            }
    with take_remote(marks, rank) as end:
        if rank == 2:
            marks.wait("full")
        count = 0
        while not isinstance(end.dequeue(DEADLINE_S), str):
            count += 1
        marks.mark(f"done-{rank}")
        return {"count": count}


@pytest.mark.guarantee("R2")
def test_a_slow_reader_blocks_the_writer_at_the_mark_and_is_named() -> None:
    """The writer stops at the high-water mark and names exactly the reader that is behind. No message is lost."""
    told, *counts = run_ranks(hold_the_writer_back, 3)
    assert told["missing"] == [2]
    assert "rank 2 (pid" in told["text"]
    assert "behind, never read" in told["text"]
    assert "rank 1" not in told["text"]
    assert 9 <= told["sent"] <= 10
    assert told["behind"][2] <= MEGABYTE
    assert told["waits"] > 1
    assert [each["count"] for each in counts] == [told["sent"] + 30] * 2


@pytest.mark.guarantee("R2")
def test_a_message_longer_than_the_mark_passes_alone() -> None:
    """A reader that has read everything gets a message of any length. Then there is no room until it is read."""
    with remote_queue(high_water_bytes=64 << 10) as (writer, readers):
        for number in range(3):
            writer.enqueue(blob(number, 3 * MEGABYTE), DEADLINE_S)
            with pytest.raises(CommTimeoutError):
                writer.enqueue("no room", 0.05)
            assert np.array_equal(readers[1].dequeue(DEADLINE_S), blob(number, 3 * MEGABYTE))


@pytest.mark.guarantee("R2")
def test_small_messages_count_what_they_cost() -> None:
    """A writer that sends empty objects stops too, because the memory that keeps them counts."""
    with remote_queue(high_water_bytes=64 << 10) as (writer, readers):
        sent, _ = until_full(writer, None, 0.05)
        assert 64 <= sent <= 128
        assert counted(readers[1], sent) == [None] * sent


@pytest.mark.guarantee("R2")
def test_all_remote_readers_share_one_copy() -> None:
    """The writer holds one copy of a message that waits for eight readers."""
    with remote_queue(remote=range(1, 9)) as (writer, _):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        writer.enqueue(blob(0, 4 * MEGABYTE), DEADLINE_S)
        ledger: Any = writer._remote._ledger  # type: ignore[attr-defined]
        parts = [part.frame for part in ledger.after(0)]
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert sum(len(frame.buffer) for frame in parts) < 4.1 * MEGABYTE
    # Eight readers of this process each hold a copy and buffers. Eight copies of the writer would exceed the limit.
    assert grown < 8 * 4 * MEGABYTE * 1.5 + 16 * MEGABYTE


@pytest.mark.guarantee("R3")
def test_a_message_goes_to_all_readers_or_to_none() -> None:
    """If a ring is full or a remote reader is behind the mark, no other reader gets the message either."""
    with remote_queue(remote=[1], local=[2], high_water_bytes=MEGABYTE) as (writer, readers):
        sent, error = until_full(writer, blob(0, 10_000), 0.05)
        assert error.missing == (2,)
        counted(readers[2], sent)
        writer.enqueue("next", DEADLINE_S)
        assert isinstance(counted(readers[1], sent + 1)[-1], str)
        assert readers[2].dequeue(DEADLINE_S) == "next"
        local = 0

        def pass_one() -> None:
            nonlocal local
            writer.enqueue(blob(0, 30_000), 0.05)
            readers[2].dequeue(DEADLINE_S)
            local += 1

        found = ended_with(pass_one)
        assert (found["kind"], found["ranks"]) == ("CommTimeoutError", [1])
        assert readers[2].try_dequeue() == (False, None)
        assert len(counted(readers[1], local)) == local


@pytest.mark.guarantee("R2")
def test_who_has_not_come_is_named() -> None:
    """`wait_until_ready` names all readers that are missing, local and remote."""
    keys = {rank: RemoteKeys.generate().public for rank in (7, 8)}
    with QueueWriter.create("steps", [3], remote_readers=keys, bind_address=HERE) as writer:
        with pytest.raises(CommTimeoutError) as caught:
            writer.wait_until_ready(0.1)
        assert caught.value.missing == (3, 7, 8)
    with QueueWriter.create("steps", remote_readers=keys, bind_address=HERE) as writer:
        with pytest.raises(CommTimeoutError, match="rank 7 .has not connected") as caught:
            writer.wait_until_ready(0.1)
        assert caught.value.missing == (7, 8)


@pytest.mark.guarantee("R2")
def test_a_late_writer_is_named_and_nothing_is_lost() -> None:
    """At its deadline `dequeue` raises with the writer's rank in `missing`. The next message arrives."""
    with remote_queue(writer=4) as (writer, readers):
        with pytest.raises(CommTimeoutError, match="rank 4, pid") as caught:
            readers[1].dequeue(0.1)
        assert caught.value.missing == (4,)
        writer.enqueue("late")
        assert readers[1].dequeue(DEADLINE_S) == "late"


@pytest.mark.guarantee("R2")
def test_a_long_wait_is_logged_with_the_awaited_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """After `warn_after_s` writer and reader each log the rank for which they wait."""
    with remote_queue(high_water_bytes=64 << 10, warn_after_s=0.05) as (writer, readers):
        with pytest.raises(CommTimeoutError):
            readers[1].dequeue(0.12)
        until_full(writer, blob(0, 30_000), 0.12)
    assert (
        "reader, rank 1, message #1): waiting for 0 s: no message from the writer (rank 0, pid" in caplog.text
    )
    assert "(writer, message #3): waiting for 0 s: no room, behind are rank 1 (pid" in caplog.text


# --- two hosts ------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[3]

# The inner `unshare` starts the second host. Each host has its own network and its own /dev/shm.
CABLE = """
set -e
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
unshare --net --mount sh -c '
    mount -t tmpfs tmpfs /dev/shm
    ip link set lo up
    : > "$1/ready"
    while [ ! -e "$1/go" ]; do sleep 0.02; done
    ip address add 10.78.0.2/24 dev far && ip link set far up
    exec "$0" -m tests.remotes "$1" 1
' "$0" "$1" &
other=$!
while [ ! -e "$1/ready" ]; do sleep 0.02; done
ip link add near type veth peer name far netns $other
ip address add 10.78.0.1/24 dev near && ip link set near up
: > "$1/go"
"$0" -m tests.remotes "$1" 0
wait $other
"""


@pytest.mark.guarantee("R1")
@requires("network_namespaces")
def test_two_hosts_without_shared_memory_share_a_queue(tmp_path: Path) -> None:
    """Objects arrive, and a death is noticed, between two network and mount namespaces that a cable joins."""
    unshare = ["unshare", "--net", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    outcome = subprocess.run(
        [*unshare, "sh", "-c", CABLE, sys.executable, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    marks = Marks(tmp_path)
    assert marks.has("writer"), outcome.stdout + outcome.stderr
    assert marks.wait("read") == "['host-1']"
    assert marks.wait("writer") == "PeerLostError [1] ['host-0']"
