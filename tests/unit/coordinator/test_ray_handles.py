"""Ray carries a queue's handle with its key, and nothing is registered where there is no cluster.

The module here stands for Ray: it keeps the serialisers, and pickles an object of a registered class through them.
"""

import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coordinator.integrations.ray.carrying import carry_in_clear
from coordinator.integrations.vllm.message_queue import MessageQueue, MessageQueueHandle
from shm_broadcast.errors import DecodeError


class Ray(types.ModuleType):
    """What this project calls of Ray."""

    def __init__(self, is_initialized: bool) -> None:
        super().__init__("ray")
        self.serializers: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}
        self.is_initialized = lambda: is_initialized
        self.util = types.SimpleNamespace(register_serializer=self._register)

    def _register(
        self, cls: type, *, serializer: Callable[[Any], Any], deserializer: Callable[[Any], Any]
    ) -> None:
        self.serializers[cls] = serializer, deserializer

    def sent(self, obj: object) -> bytes:
        """Return what Ray sends: the deserialiser by its name, and what the serialiser returned."""
        take, build = self.serializers[type(obj)]
        return pickle.dumps((build, take(obj)))


def received(sent: bytes) -> Any:
    """Return the object that another process of the cluster builds."""
    build, parts = pickle.loads(sent)
    return build(parts)


@pytest.fixture
def queue() -> Iterator[MessageQueue]:
    """Return the writing end of a queue with one reader on this host."""
    made = MessageQueue(1, 1)
    yield made
    made.shutdown()


def test_a_handle_passes_between_processes_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, queue: MessageQueue, other_family: Callable[[], None]
) -> None:
    """A worker that Ray started has another secret, and still opens the queue from what Ray carried."""
    ray = Ray(is_initialized=True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    handle = queue.export_handle()
    sent = ray.sent(handle)
    assert handle.key in sent, (
        "Ray's channels carry the key as it is: the documentation asks for a private network"
    )
    other_family()
    taken = received(sent)
    assert type(taken) is MessageQueueHandle
    assert (taken.queue, taken.key) == (handle.queue, handle.key)
    reader = MessageQueue.create_from_handle(taken, 0)
    queue.wait_until_ready()
    queue.enqueue({"step": 1})
    assert reader.dequeue(timeout=30) == {"step": 1}
    reader.shutdown()


def test_only_ray_carries_the_key_in_the_clear(
    monkeypatch: pytest.MonkeyPatch, queue: MessageQueue, other_family: Callable[[], None]
) -> None:
    """In a cluster too, every other serialiser seals the key for this family."""
    monkeypatch.setitem(sys.modules, "ray", Ray(is_initialized=True))
    handle = queue.export_handle()
    pickled = pickle.dumps(handle)
    assert handle.key not in pickled
    other_family()
    with pytest.raises(DecodeError, match="another family"):
        pickle.loads(pickled)


def test_nothing_is_registered_outside_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, queue: MessageQueue
) -> None:
    """An engine imports Ray where it is installed, even if another executor runs the engine."""
    ray = Ray(is_initialized=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    queue.export_handle()
    assert ray.serializers == {}


def test_ray_is_not_imported(monkeypatch: pytest.MonkeyPatch, queue: MessageQueue) -> None:
    """Without Ray the same call does nothing, and imports nothing."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    queue.export_handle()
    assert "ray" not in sys.modules


def test_the_class_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The serialiser of one class is no serialiser of another, and both functions are the caller's."""
    ray = Ray(is_initialized=True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    carry_in_clear(complex, str, complex)
    assert ray.serializers == {complex: (str, complex)}
    assert received(ray.sent(1 + 2j)) == 1 + 2j
