"""The vLLM plugin replaces vLLM's classes in every module that holds them, or names what is missing and replaces none.

The modules here stand for vLLM: they have its names and signatures, and nothing behind them.
"""

import dataclasses
import json
import logging
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coordinator.integrations.surface import gaps, lacking
from coordinator.integrations.vllm import announcement, plugin, register
from coordinator.integrations.vllm.group import VllmGroupCoordinator
from coordinator.integrations.vllm.message_queue import MessageQueue
from coordinator.integrations.vllm.plugin import HANDLE, NEEDS, PLACES
from shm_broadcast import codec
from shm_broadcast.errors import UsageError

Modules = dict[str, Any]

STATE = "vllm.distributed.parallel_state"
QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
EXECUTOR = "vllm.v1.executor.multiproc_executor"
STATELESS = "vllm.distributed.stateless_coordinator"
CONFIG = "vllm.config"

FROZEN = json.loads(Path(__file__).with_name("vllm_surface.json").read_text())


def group_class() -> type:
    class GroupCoordinator:
        rank: int

        def __init__(
            self,
            group_ranks: Any,
            local_rank: Any,
            torch_distributed_backend: Any,
            use_device_communicator: Any,
            use_message_queue_broadcaster: Any = False,
            group_name: Any = None,
            use_all2all: Any = False,
        ) -> None:
            """Take what vLLM 0.32 passes, and set two of its attributes."""
            self.device_index: int = local_rank
            self.rank, self._private = 0, use_all2all

        def all_reduce(self, input_: Any) -> None:
            """Be one of the methods."""

        @property
        def is_first_rank(self) -> bool:
            """Be one of the properties."""
            return True

    return GroupCoordinator


def queue_class() -> type:
    class MessageQueue:
        def __init__(
            self,
            n_reader: Any,
            n_local_reader: Any,
            local_reader_ranks: Any = None,
            max_chunk_bytes: Any = 1,
            max_chunks: Any = 10,
            connect_ip: Any = None,
            enable_shm_tensor_arena: Any = False,
        ) -> None:
            """Take what vLLM 0.32 passes, and set what it sets."""
            self.n_local_reader = n_local_reader
            self.shutting_down = False

        def acquire_write(self, timeout: Any = None) -> None:
            """Be used by vLLM's own class only."""

        def dequeue(self, timeout: Any = None, indefinite: Any = False) -> None:
            """Be one of the methods."""

    return MessageQueue


def handle_class() -> type:
    @dataclasses.dataclass
    class Handle:
        local_reader_ranks: list[int]
        remote_subscribe_addr: str | None = None
        buffer_handle: object = None

    return Handle


def config_class() -> type:
    @dataclasses.dataclass
    class ParallelConfig:
        enable_expert_parallel: bool
        enable_elastic_ep: bool = False

        @property
        def local_world_size(self) -> int:
            """Be a property, as in vLLM."""
            return 1

        nnodes_within_dp = local_world_size

    return ParallelConfig


def worker_class() -> type:
    class WorkerProc:
        def __init__(self, queue: Any) -> None:
            """Answer over `queue`."""
            self.queue = queue

        def enqueue_output(self, output: Any) -> None:
            """Send a failure for an exception, as vLLM does."""
            self.queue.enqueue(
                ("failure", str(output)) if isinstance(output, Exception) else ("success", output)
            )

    return WorkerProc


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """Put modules with vLLM's names in place, and take away afterwards what the plugin registered."""
    modules: Modules = {}
    for name in (STATE, QUEUES, EXECUTOR, STATELESS, CONFIG):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            full = ".".join(parts[:length])
            if full not in modules:
                modules[full] = types.ModuleType(full)
                modules[full].__path__ = []
                monkeypatch.setitem(sys.modules, full, modules[full])
    modules[EXECUTOR].WorkerProc = worker_class()
    modules[STATE].GroupCoordinator = modules[STATELESS].GroupCoordinator = group_class()
    modules[QUEUES].MessageQueue = modules[EXECUTOR].MessageQueue = queue_class()
    modules[QUEUES].Handle = handle_class()
    modules[STATE].get_dp_group = modules[STATE].get_pcp_group = lambda: None
    modules[CONFIG].get_current_vllm_config_or_none = lambda: None
    modules[CONFIG].ParallelConfig = config_class()
    modules[CONFIG].VllmConfig = types.SimpleNamespace(parallel_config=None)
    monkeypatch.setenv("VLLM_PLUGINS", "another_plugin,group_coordinator")
    monkeypatch.setattr(plugin, "_vllm_version", lambda: "0.32.0")
    for name in ("release", "pid"):
        monkeypatch.setattr(announcement._said, name, None)
    yield modules
    with suppress(UsageError):
        codec.unregister_package("vllm")


def stock_of(modules: Modules) -> list[tuple[type, type]]:
    return [
        (modules[STATE].GroupCoordinator, VllmGroupCoordinator),
        (modules[STATELESS].GroupCoordinator, VllmGroupCoordinator),
        (modules[QUEUES].MessageQueue, MessageQueue),
        (modules[EXECUTOR].MessageQueue, MessageQueue),
    ]


def is_ours(modules: Modules) -> list[bool]:
    return [found is ours for found, ours in stock_of(modules)]


@pytest.mark.guarantee("G50")
def test_every_module_that_holds_a_class_gets_ours(vllm: Modules, caplog: pytest.LogCaptureFixture) -> None:
    """The module that defines a class and those that imported it are changed, and one line says so."""
    with caplog.at_level(logging.INFO, "vllm"):
        register()
    assert all(is_ours(vllm))
    (line,) = caplog.messages
    assert "uses its groups and queues" in line


def test_a_second_call_changes_nothing_and_says_nothing(
    vllm: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    """A plugin may be loaded more than once."""
    with caplog.at_level(logging.INFO, "vllm"):
        register()
        assert len(caplog.messages) == 1
        register()
    assert all(is_ours(vllm))
    assert len(caplog.messages) == 1


class Lines(logging.Handler):
    """Keep what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def child(connection: Any) -> None:
    """Be a worker that vLLM forked: it loads no plugin again, and makes queues."""
    lines = Lines()
    announcement.logger.addHandler(lines)
    announcement.logger.setLevel(logging.INFO)
    for _ in range(2):
        MessageQueue(1, 1).shutdown()
    connection.send((os.getpid(), lines.found))


def test_a_forked_process_says_once_that_it_uses_ours(
    vllm: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    """It does when it makes its first queue. The process that has spoken stays silent."""
    with caplog.at_level(logging.INFO, "vllm"):
        register()
        MessageQueue(1, 1).shutdown()
    assert len(caplog.messages) == 1
    context = multiprocessing.get_context("fork")
    ours, its = context.Pipe()
    with ours, its:
        process = context.Process(target=child, args=(its,))
        process.start()
        assert ours.poll(20)
        pid, lines = ours.recv()
        process.join(20)
        process.close()
    (line,) = lines
    assert f"process {pid} of vLLM 0.32.0 uses its groups and queues" in line


def test_a_process_whose_log_is_configured_later_says_so_then(
    vllm: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM's client loads its plugins before it configures its log: the line waits for the first queue."""
    with caplog.at_level(logging.WARNING, "vllm"):
        register()
    with caplog.at_level(logging.INFO, "vllm"):
        for _ in range(2):
            MessageQueue(1, 1).shutdown()
    (line,) = caplog.messages
    assert f"process {os.getpid()} of vLLM" in line


def test_a_forked_process_in_which_it_is_loaded_again_says_so(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the plugin is called in a forked process, that process says what it inherited."""
    register()
    monkeypatch.setattr(announcement._said, "pid", os.getppid())
    with caplog.at_level(logging.INFO, "vllm"):
        register()
        register()
    (line,) = caplog.messages
    assert f"process {os.getpid()} of vLLM" in line


def test_a_queue_says_nothing_where_nothing_was_replaced(
    vllm: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the plugin our queue is one class among others."""
    with caplog.at_level(logging.INFO, "vllm"):
        MessageQueue(1, 1).shutdown()
    assert caplog.messages == []


@pytest.mark.parametrize("release", ["0.34.0", "1.32.0", "0.3", "of an unknown version"])
def test_another_version_that_fits_is_used_with_a_warning(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: str
) -> None:
    """Nobody has run it. The warning names the version and those that are known, and says how to do without."""
    monkeypatch.setattr(plugin, "_vllm_version", lambda: release)
    register()
    assert all(is_ours(vllm))
    (line,) = caplog.messages
    assert f"not verified with this version of vLLM, {release}, but with 0.32 and 0.33" in line
    assert "VLLM_PLUGINS" in line


@pytest.mark.parametrize("release", ["0.32.0", "0.32.4+cpu", "0.33.0", "0.33.1rc1"])
def test_a_known_version_is_used_without_a_warning(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: str
) -> None:
    """Its corrections are taken for what they correct."""
    monkeypatch.setattr(plugin, "_vllm_version", lambda: release)
    register()
    assert all(is_ours(vllm))
    assert caplog.messages == []


@pytest.mark.parametrize("plugins", [None, "", "another_plugin", "group_coordinator_2"])
def test_it_is_inert_unless_it_is_named(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, plugins: str | None
) -> None:
    """An installed plugin does nothing until `VLLM_PLUGINS` names it."""
    monkeypatch.delenv("VLLM_PLUGINS")
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    with caplog.at_level(logging.DEBUG, "vllm"):
        register()
    assert not any(is_ours(vllm))
    assert caplog.messages == []


def with_attributes(cls: type, **declared: Any) -> None:
    """Declare further attributes for the objects of a class, as its annotations do."""
    cls.__annotations__ = {**cls.__annotations__, **declared}


def sets_topology(self: Any) -> None:
    """Be a method that gives its object a further attribute."""
    self.topology = 1
    self._private = 2


@pytest.mark.guarantee("G50")
@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda modules: delattr(modules[QUEUES], "MessageQueue"), f"class MessageQueue in {QUEUES}"),
        (
            lambda modules: setattr(modules[STATE].GroupCoordinator, "teleport", lambda self, dst: None),
            "VllmGroupCoordinator has no teleport",
        ),
        (
            lambda modules: setattr(modules[QUEUES].MessageQueue, "dequeue", lambda self, limit=None: None),
            "takes (timeout=, indefinite=), not (limit=)",
        ),
        # Earlier versions of vLLM have it in the second place.
        (
            lambda modules: setattr(
                modules[QUEUES].MessageQueue,
                "dequeue",
                lambda self, timeout=None, cancel=None, indefinite=False: None,
            ),
            "takes (timeout=, indefinite=), not (timeout=, cancel=, indefinite=)",
        ),
        (
            lambda modules: setattr(
                modules[QUEUES].MessageQueue,
                "dequeue",
                lambda self, timeout=None, indefinite=False, *, cancel=None: None,
            ),
            "takes (timeout=, indefinite=), not (timeout=, indefinite=, *cancel=)",
        ),
        # Equal methods, and attributes that other modules may read.
        (
            lambda modules: with_attributes(modules[STATE].GroupCoordinator, topology=int),
            "VllmGroupCoordinator has no attribute topology",
        ),
        (
            lambda modules: setattr(modules[STATE].GroupCoordinator, "_join", sets_topology),
            "VllmGroupCoordinator has no attribute topology",
        ),
        (
            lambda modules: setattr(modules[QUEUES].MessageQueue, "_connect", sets_topology),
            "MessageQueue has no attribute topology",
        ),
        (
            lambda modules: with_attributes(modules[QUEUES].Handle, topology=int),
            "MessageQueueHandle has no attribute topology",
        ),
        (lambda modules: delattr(modules[QUEUES], "Handle"), f"class Handle in {QUEUES}"),
        # What the plugin itself calls and reads.
        (lambda modules: delattr(modules[STATE], "get_dp_group"), f"get_dp_group in {STATE}"),
        (
            lambda modules: setattr(modules[STATE], "get_pcp_group", lambda kind: kind),
            "get_pcp_group takes (kind), not ()",
        ),
        (lambda modules: setattr(modules[STATE], "get_pcp_group", 1), "get_pcp_group is no function"),
        (
            lambda modules: delattr(modules[CONFIG], "get_current_vllm_config_or_none"),
            f"get_current_vllm_config_or_none in {CONFIG}",
        ),
        (
            lambda modules: delattr(modules[CONFIG].ParallelConfig, "nnodes_within_dp"),
            f"ParallelConfig.nnodes_within_dp in {CONFIG}",
        ),
        (
            lambda modules: delattr(modules[EXECUTOR].WorkerProc, "enqueue_output"),
            f"WorkerProc.enqueue_output in {EXECUTOR}",
        ),
        (
            lambda modules: setattr(
                modules[EXECUTOR].WorkerProc, "enqueue_output", lambda self, output, rank: None
            ),
            "WorkerProc.enqueue_output takes (output, rank), not (output)",
        ),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_replaced(
    vllm: Modules, caplog: pytest.LogCaptureFixture, break_it: Callable[[Modules], Any], text: str
) -> None:
    """An unknown version of vLLM runs as it is, and a warning says why."""
    break_it(vllm)
    before = [getattr(vllm[name], "GroupCoordinator", None) for name in (STATE, STATELESS)]
    register()
    (line,) = caplog.messages
    assert text in line
    assert "its own groups and queues" in line
    assert [getattr(vllm[name], "GroupCoordinator", None) for name in (STATE, STATELESS)] == before
    assert vllm[EXECUTOR].MessageQueue is not MessageQueue


@pytest.mark.parametrize("release", FROZEN)
def test_our_classes_have_what_known_versions_call(release: str) -> None:
    """The public methods of vLLM's classes, written down from its wheels, exist with the same parameters."""
    written = FROZEN[release]
    for place in PLACES:
        assert gaps(written[place.name], place.ours, place.unused) == []


@pytest.mark.parametrize("release", FROZEN)
@pytest.mark.parametrize("place", [*PLACES, HANDLE], ids=lambda place: place.name)
def test_our_objects_have_what_known_versions_read(release: str, place: Any) -> None:
    """What vLLM's classes set, and what its other modules read of groups, queues and handles, is there."""
    written = FROZEN[release]
    assert lacking(written["sets"][place.name], place.ours, place.unused) == []
    reads = written["reads"][place.name]
    assert reads, "the other modules use groups, queues and handles"
    assert lacking(reads, place.ours) == []
    assert place.unused.isdisjoint(reads)


@pytest.mark.parametrize("release", FROZEN)
@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.name)
def test_known_versions_have_what_the_plugin_uses(release: str, need: Any) -> None:
    """What the plugin calls and reads of vLLM is written down too, with its parameters."""
    parameters = FROZEN[release]["needs"][need.name]
    assert parameters == (None if need.parameters is None else list(need.parameters))


def test_an_output_that_cannot_be_carried_is_answered(vllm: Modules) -> None:
    """The executor gets a failure with the reason, instead of no answer at all."""
    register()
    queue = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    worker = vllm[EXECUTOR].WorkerProc(queue)
    worker.enqueue_output([1, 2])
    worker.enqueue_output(threading.Lock())
    assert reader.dequeue(timeout=30) == ("success", [1, 2])
    status, text = reader.dequeue(timeout=30)
    assert status == "failure"
    assert "_thread.lock" in text
    queue.shutdown()
    with pytest.raises(RuntimeError, match="cancelled"):
        worker.enqueue_output(1)
    reader.shutdown()


def test_a_missing_module_is_named(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that cannot be imported is named too."""
    monkeypatch.setitem(sys.modules, EXECUTOR, None)
    register()
    (line,) = caplog.messages
    assert f"module {EXECUTOR}" in line
    assert vllm[STATE].GroupCoordinator is not VllmGroupCoordinator
