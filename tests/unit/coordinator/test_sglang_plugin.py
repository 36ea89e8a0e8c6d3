"""The SGLang plugin replaces SGLang's class in every module that holds it, or names what is missing and replaces none.

The modules here stand for SGLang: they have its names and signatures, and nothing behind them.
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

from coordinator.integrations.sglang import install, register
from coordinator.integrations.sglang.group import SglangGroupCoordinator
from coordinator.integrations.surface import gaps
from shm_broadcast import codec
from shm_broadcast.errors import UsageError

Modules = dict[str, Any]

STATE = "sglang.srt.distributed.parallel_state"
USER = "sglang.srt.layers.dp_attention"


def group_class() -> type:
    class GroupCoordinator:
        def __init__(
            self,
            group_ranks: Any,
            local_rank: Any,
            torch_distributed_backend: Any,
            use_pynccl: Any,
            use_mscclpp: Any,
            use_custom_allreduce: Any,
            use_torch_symm_mem_all_reduce: Any,
            use_hpu_communicator: Any,
            use_xpu_communicator: Any,
        ) -> None:
            """Take SGLang's parameters that have no default."""

        def reduce_scatterv(self, input_: Any, output: Any = None, sizes: Any = None) -> None:
            """Be one of the methods."""

        @property
        def is_first_rank(self) -> bool:
            """Be one of the properties."""
            return True

    return GroupCoordinator


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """Put modules with SGLang's names in place, and take away afterwards what the plugin registered."""
    modules: Modules = {}
    for name in (STATE, USER):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            full = ".".join(parts[:length])
            if full not in modules:
                modules[full] = types.ModuleType(full)
                modules[full].__path__ = []
                monkeypatch.setitem(sys.modules, full, modules[full])
    modules[STATE].GroupCoordinator = modules[USER].GroupCoordinator = group_class()
    modules[STATE]._register_group = lambda group: None
    monkeypatch.setenv("SGLANG_PLUGINS", "another_plugin, group_coordinator")
    yield modules
    with suppress(UsageError):
        codec.unregister_package("sglang")


def is_ours(modules: Modules) -> list[bool]:
    return [modules[name].GroupCoordinator is SglangGroupCoordinator for name in (STATE, USER)]


def test_every_module_that_holds_the_class_gets_ours(
    sglang: Modules, caplog: pytest.LogCaptureFixture
) -> None:
    """The module that defines the class and those that imported it are changed, and one line says so."""
    with caplog.at_level(logging.INFO, "sglang"):
        register()
        register()
    assert all(is_ours(sglang))
    (line,) = caplog.messages
    assert "uses its groups" in line


@pytest.mark.parametrize("plugins", [None, "", "another_plugin", "group_coordinator_2"])
def test_the_plugin_is_inert_unless_it_is_named(
    sglang: Modules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, plugins: str | None
) -> None:
    """An installed plugin does nothing until `SGLANG_PLUGINS` names it; `install` does not ask."""
    monkeypatch.delenv("SGLANG_PLUGINS")
    if plugins is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    with caplog.at_level(logging.DEBUG, "sglang"):
        register()
    assert not any(is_ours(sglang))
    assert caplog.messages == []
    install()
    assert all(is_ours(sglang))


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda modules: delattr(modules[STATE], "GroupCoordinator"), f"class GroupCoordinator in {STATE}"),
        (lambda modules: delattr(modules[STATE], "_register_group"), "function _register_group"),
        (
            lambda modules: setattr(modules[STATE].GroupCoordinator, "teleport", lambda self, dst: None),
            "SglangGroupCoordinator has no teleport",
        ),
        (
            lambda modules: setattr(
                modules[STATE].GroupCoordinator, "reduce_scatterv", lambda self, input_, rows: None
            ),
            "takes (input_, output=, sizes=), not (input_, rows)",
        ),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_replaced(
    sglang: Modules, caplog: pytest.LogCaptureFixture, break_it: Callable[[Modules], Any], text: str
) -> None:
    """An unknown version of SGLang runs as it is, and a warning says why."""
    break_it(sglang)
    register()
    (line,) = caplog.messages
    assert text in line
    assert "its own groups" in line
    assert getattr(sglang[STATE], "GroupCoordinator", None) is not SglangGroupCoordinator
    assert sglang[USER].GroupCoordinator is not SglangGroupCoordinator


def test_a_missing_module_is_named(
    sglang: Modules, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that cannot be imported is named too."""
    monkeypatch.setitem(sys.modules, STATE, None)
    register()
    (line,) = caplog.messages
    assert f"module {STATE}" in line


def test_our_class_has_what_a_known_version_calls() -> None:
    """The public methods of SGLang's class, written down from its wheel, exist with the same parameters."""
    written = json.loads(Path(__file__).with_name("sglang_surface.json").read_text())["0.5.23"]
    assert len(written["GroupCoordinator"]) > 30
    assert gaps(written["GroupCoordinator"], SglangGroupCoordinator) == []
