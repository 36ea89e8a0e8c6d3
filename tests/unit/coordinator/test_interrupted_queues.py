"""A signal handler raises at any place while a group creates a queue: closing the group leaves nothing of it open."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from coordinator.host.plane import HostPlane
from coordinator.queues.group_queues import GroupQueues, QueueKeys, QueueOffer, QueueRankInfo
from coordinator.settings import CoordinatorSettings
from coordinator.testing.fake_planes import SilentStatusStore
from device_comm.health import GroupHealth
from shm_broadcast.liveness import PeerWatch, this_process
from shm_broadcast.queue import QueueWriter
from shm_broadcast.settings import BroadcastSettings
from tests.handlers import raising_at, uncollected
from tests.leaks import Snapshot, leaked_since

FILES = ("coordinator/queues/group_queues.py", "shm_broadcast/queue.py", "shm_broadcast/threads.py")
LOOPBACK = "127.0.0.1"
SMALL = BroadcastSettings(ring_bytes=1 << 16)


@dataclass
class OtherRank:
    """Stand for a group of two, whose second rank writes or reads a queue, on the same host or on another one."""

    is_far: bool
    writers: list[QueueWriter] = field(default_factory=list)
    told: Mapping[int, bytes] = field(default_factory=dict)

    def all_gather_object(self, obj: Any, _timeout_s: float) -> list[Any]:
        """Return what this rank says, and what the other one answers."""
        match obj:
            case QueueRankInfo():
                return [obj, msgspec.structs.replace(obj, host_id="far") if self.is_far else obj]
            case QueueKeys():
                self.told = obj.public
                return [obj, QueueKeys({0: bytes(range(32))})]
            case QueueOffer(handle=b""):
                return [obj, self._offer()]
            case QueueOffer():
                return [obj, QueueOffer()]
        return [obj, ""]

    def _offer(self) -> QueueOffer:
        readers: dict[str, Any] = {"readers": [0]}
        if self.is_far:
            readers = {"remote_readers": {0: self.told[1]}, "bind_address": LOOPBACK}
        writer = QueueWriter.create("other", settings=SMALL, writer=1, **readers)
        self.writers.append(writer)
        return QueueOffer(writer.handle.to_bytes(writer.key), writer.key)

    def close(self) -> None:
        """Close what the other rank writes."""
        for writer in self.writers:
            writer.close(0.0)


def create(other: OtherRank, writer: int, step: int) -> bool:
    """Create a queue, raise at a place, close the group's queues; return whether that place came."""
    health = GroupHealth("struck:0", 0, (0, 1), PeerWatch(this_process(), {}), SilentStatusStore())
    settings = CoordinatorSettings.resolve({}, broadcast=SMALL)
    host: HostPlane = other  # type: ignore[assignment] # queues only gather
    queues = GroupQueues(host, health, settings, LOOPBACK)
    try:
        return raising_at(step, lambda: queues.broadcast(writer, is_blocking=False), FILES)
    finally:
        queues.close(0.0)
        other.close()


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("is_far", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize("writer", [0, 1], ids=["writing", "reading"])
def test_a_queue_whose_creation_is_interrupted_anywhere_leaves_nothing(writer: int, *, is_far: bool) -> None:
    """Neither the thread that hands over the ring, nor memory, nor a connection."""
    create(OtherRank(is_far), writer, -1)
    step, comes = 0, True
    with uncollected():
        while comes:
            before = Snapshot.take()
            comes = create(OtherRank(is_far), writer, step)
            assert leaked_since(before) == [], step
            step += 1
    assert step > 40
