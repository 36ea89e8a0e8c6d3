"""The vLLM plugin replaces vLLM's classes in every module that holds them, or names what is missing and replaces none.

The modules here stand for vLLM: they have its names and signatures, and nothing behind them.
"""

import json
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coordinator.integrations.surface import gaps
from coordinator.integrations.vllm import register
from coordinator.integrations.vllm.group import VllmGroupCoordinator
from coordinator.integrations.vllm.message_queue import MessageQueue
from coordinator.integrations.vllm.plugin import PLACES
from shm_broadcast import codec
from shm_broadcast.errors import UsageError

Modules = dict[str, Any]

STATE = "vllm.distributed.parallel_state"
QUEUES = "vllm.distributed.device_communicators.shm_broadcast"
EXECUTOR = "vllm.v1.executor.multiproc_executor"
STATELESS = "vllm.distributed.stateless_coordinator"


def group_class() -> type:
    class GroupCoordinator:
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
            """Take what vLLM 0.32 passes."""

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
            """Take what vLLM 0.32 passes."""

        def acquire_write(self, timeout: Any = None) -> None:
            """Be used by vLLM's own class only."""

        def dequeue(self, timeout: Any = None, indefinite: Any = False) -> None:
            """Be one of the methods."""

    return MessageQueue


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """Put modules with vLLM's names in place, and take away afterwards what the plugin registered."""
    modules: Modules = {}
    for name in (STATE, QUEUES, EXECUTOR, STATELESS):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            full = ".".join(parts[:length])
            if full not in modules:
                modules[full] = types.ModuleType(full)
                modules[full].__path__ = []
                monkeypatch.setitem(sys.modules, full, modules[full])
    modules[STATE].GroupCoordinator = modules[STATELESS].GroupCoordinator = group_class()
    modules[QUEUES].MessageQueue = modules[EXECUTOR].MessageQueue = queue_class()
    monkeypatch.setenv("VLLM_PLUGINS", "another_plugin,group_coordinator")
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
    register()
    with caplog.at_level(logging.INFO, "vllm"):
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
            "takes (timeout, indefinite), not (limit)",
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


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
def test_our_classes_have_what_known_versions_call(release: str) -> None:
    """The public methods of vLLM's classes, written down from its wheels, exist with the same parameters."""
    written = json.loads(Path(__file__).with_name("vllm_surface.json").read_text())[release]
    for place in PLACES:
        assert gaps(written[place.name], place.ours, place.unused) == []


def test_a_missing_module_is_named(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that cannot be imported is named too."""
    monkeypatch.setitem(sys.modules, EXECUTOR, None)
    register()
    (line,) = caplog.messages
    assert f"module {EXECUTOR}" in line
    assert vllm[STATE].GroupCoordinator is not VllmGroupCoordinator
