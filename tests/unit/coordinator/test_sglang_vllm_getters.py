"""`monkey_patch_vllm_parallel_state` puts our getters in vLLM's place, and vLLM's back.

The modules here stand for vLLM: they have the names of its getters, and nothing behind them.
"""

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coordinator.integrations.sglang import parallel_state as state
from shm_broadcast.errors import UsageError

GETTERS = ("get_pp_group", "get_tp_group", "get_world_group")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put modules with vLLM's names in place; return the one with the getters, each of which returns its name."""
    modules: list[Any] = []
    for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state"):
        modules.append(types.ModuleType(name))
        modules[-1].__path__ = []
        monkeypatch.setitem(sys.modules, name, modules[-1])
    for name in (*GETTERS, "get_dp_group"):
        setattr(modules[-1], name, named(name))
    yield modules[-1]
    state.monkey_patch_vllm_parallel_state(reverse=True)


def named(name: str) -> Callable[[], str]:
    return lambda: name


def answers(vllm: Any) -> list[str]:
    return [getattr(vllm, name)() for name in GETTERS]


def test_our_getters_take_the_place_of_vllms(vllm: Any) -> None:
    """The three getters are ours, also when it is called again; another getter stays vLLM's."""
    for _ in range(2):
        state.monkey_patch_vllm_parallel_state()
        for name in GETTERS:
            assert getattr(vllm, name) is getattr(state, name)
        with pytest.raises(UsageError, match="no group 'tp'"):
            vllm.get_tp_group()
        assert vllm.get_dp_group() == "get_dp_group"


def test_another_call_replaces_what_an_interrupt_has_left(vllm: Any) -> None:
    """Whether that came behind the first getter or before it."""
    state.monkey_patch_vllm_parallel_state()
    vllm.get_world_group = named("get_world_group")
    state.monkey_patch_vllm_parallel_state()
    assert vllm.get_world_group is state.get_world_group
    state.monkey_patch_vllm_parallel_state(reverse=True)
    assert answers(vllm) == list(GETTERS)


def test_reverse_puts_vllms_getters_back(vllm: Any) -> None:
    """After two patches one reverse restores vLLM's own, which a later patch replaces again."""
    state.monkey_patch_vllm_parallel_state()
    state.monkey_patch_vllm_parallel_state()
    state.monkey_patch_vllm_parallel_state(reverse=True)
    assert answers(vllm) == list(GETTERS)
    state.monkey_patch_vllm_parallel_state()
    assert vllm.get_tp_group is state.get_tp_group


def test_reverse_without_a_patch_changes_nothing(vllm: Any) -> None:
    """Getters that nobody replaced stay as they are."""
    state.monkey_patch_vllm_parallel_state(reverse=True)
    assert answers(vllm) == list(GETTERS)


def test_a_vllm_that_lacks_a_getter_keeps_the_others(vllm: Any) -> None:
    """The error names the getter, and none was replaced."""
    del vllm.get_world_group
    with pytest.raises(AttributeError, match="get_world_group"):
        state.monkey_patch_vllm_parallel_state()
    assert [vllm.get_pp_group(), vllm.get_tp_group()] == ["get_pp_group", "get_tp_group"]


@pytest.mark.parametrize("reverse", [False, True])
def test_without_vllm_nothing_happens(monkeypatch: pytest.MonkeyPatch, reverse: bool) -> None:
    """No vLLM can ask, and no getter is noted for later."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    state.monkey_patch_vllm_parallel_state(reverse=reverse)
