"""What SGLang's functions know of the groups of this process, whatever interrupts them. The groups here are none."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import parallel_state
from coordinator.graph_capture import GraphCaptureContext
from coordinator.integrations.sglang import parallel_state as state
from shm_broadcast.errors import UsageError
from tests.handlers import raising_at

PLACES = ("sglang/parallel_state.py", "/contextlib.py")


class Group:
    """A group that notes its destruction and the captures in which it takes part."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings = SimpleNamespace(destroy_timeout_s=1.0)
        self.device_communicator = SimpleNamespace(end_calls=lambda _within_s: None)
        self.destroyed = 0
        self.interrupts = 0
        self.captured: list[Any] = []

    def destroy(self) -> None:
        self.interrupts -= 1
        if self.interrupts == 0:
            raise KeyboardInterrupt
        self.destroyed += 1

    def _destroy(self, _within_s: float | None) -> None:
        self.destroyed = max(self.destroyed, 1)

    @contextmanager
    def graph_capture(
        self, context: GraphCaptureContext | None = None, stream: object = None
    ) -> Iterator[GraphCaptureContext]:
        self.captured.append((context, stream))
        yield context or GraphCaptureContext()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the groups of a process that has them."""
    made: dict[str, Any] = {
        name: Group(name) for name in ("world", "tp", "attn_cp", "pp", "pdmux_prefill_tp")
    }
    owned = [group for name, group in made.items() if name != "world"]
    monkeypatch.setattr(state, "_state", state._State(dict(made), owned))
    return made


def test_an_interrupted_block_puts_every_group_back(groups: dict[str, Any]) -> None:
    """At every place where a handler may raise: the next block can replace them again."""
    draft: Any = Group("draft")

    def block() -> None:
        with state.patch_tensor_parallel_group(draft, owns_attention=True):
            assert state.get_tp_group() is state.get_moe_tp_group() is draft

    for step in count():
        has_come = raising_at(step, block, PLACES)
        assert state.get_tp_group() is groups["tp"], step
        assert state.get_attn_cp_group() is groups["attn_cp"], step
        if not has_come:
            break
    assert step > 10


def test_groups_that_are_destroyed_in_a_block_stay_so(groups: dict[str, Any]) -> None:
    """The end of the block puts none of them back, and the getters say that there are none."""
    draft: Any = Group("draft")
    with (
        state.patch_tensor_parallel_group(draft, owns_attention=True),
        state.patch_pipeline_parallel_group(draft),
    ):
        state.destroy_model_parallel()
    for getter in (state.get_tp_group, state.get_pp_group, state.get_moe_tp_group, state.get_attn_cp_group):
        with pytest.raises(UsageError, match="there is no group"):
            getter()
    assert state.get_world_group() is groups["world"]
    assert [group.destroyed for group in groups.values()] == [0, 1, 1, 1, 1]


def test_an_interrupted_end_destroys_every_group_and_another_call_forgets_them(
    groups: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world's group, too, which is destroyed last."""
    monkeypatch.setattr(parallel_state, "destroy_distributed_environment", lambda: None)
    groups["pp"].interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        state.destroy_distributed_environment()
    assert all(group.destroyed for group in groups.values())
    assert state.get_world_group() is groups["world"]
    state.destroy_distributed_environment()
    with pytest.raises(UsageError, match="init_distributed_environment"):
        state.get_world_group()


def test_every_group_takes_part_in_a_capture(groups: dict[str, Any]) -> None:
    """In the order of their creation, each once, with one context; also one that stands in the place of another."""
    draft: Any = Group("draft")
    with state.patch_tensor_parallel_group(draft, owns_attention=True), state.graph_capture() as context:
        pass
    assert groups["world"].captured == [(None, None)]
    others = [group for group in (*groups.values(), draft) if group is not groups["world"]]
    assert [group.captured for group in others] == [[(context, None)]] * 5


def test_a_capture_without_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to call first."""
    monkeypatch.setattr(state, "_state", state._State())
    with pytest.raises(UsageError, match="init_distributed_environment"), state.graph_capture():
        pass


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ([[2, 3], [2, 3], [0, 1], [0, 1]], "rank 0 with [2, 3], rank 1 with [2, 3], rank 2"),
        ([[0, 1], [0, 1, 2], [2, 3], [2, 3]], "rank 0 with [0, 1], rank 1 with [0, 1, 2]"),
        ([[0, 1], [0, 1], [2, 3, 4], [2, 3, 4]], "rank 2 with [2, 3, 4], rank 3"),
        ([[0, 1], [0, 1], [2], []], "rank 3 with []"),
    ],
)
def test_a_custom_group_without_this_rank_is_refused_on_every_rank(
    groups: dict[str, Any], monkeypatch: pytest.MonkeyPatch, named: list[list[int]], wrong: str
) -> None:
    """All see what every rank has named; the error names those that do not fit, and nothing is created."""
    groups["world"].world_size = 4
    groups["world"].all_gather_object = lambda _own: named
    monkeypatch.setattr(state, "init_model_parallel_group", lambda *_: pytest.fail("a group was created"))
    with pytest.raises(UsageError) as caught:
        state.create_custom_parallel_group(named[0])
    assert f"not so for {wrong}" in str(caught.value)
