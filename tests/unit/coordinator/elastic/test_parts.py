"""What one process does in an agreement on members when something of its own goes wrong."""

from collections.abc import Callable, Collection
from contextlib import closing
from typing import Never

import pytest
import torch.distributed as dist

from coordinator.bootstrap.world import Line, World
from coordinator.elastic.ending import NOTHING, Ending
from coordinator.elastic.layouts import LayoutRule, Placement, drop_replicas
from coordinator.elastic.part import Note, Part, Recipe
from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from shm_broadcast.errors import CapabilityError, CommTimeoutError
from shm_broadcast.liveness import PeerWatch, this_process
from tests.handlers import handling_at

LAYOUT = ParallelLayout(data=2)
HERE = (__file__,)


def part(
    watch: PeerWatch, rule: LayoutRule = drop_replicas, ending: Ending = NOTHING
) -> Part[ParallelGroups]:
    """Return the part of member 0 of two."""

    def refuse(own: World, recipe: Recipe, layout: ParallelLayout, create_timeout_s: float) -> Never:
        raise CapabilityError(f"no groups for {layout}")

    line = Line(dist.HashStore(), 0, 0, (0, 1), (0, 1), 2)
    recipe = Recipe(LAYOUT, (), has_queues=False, has_token_group=False, backend="gloo")
    note = Note(this_process(), {}, {}, 0, 0, founders=2, rank=0, recipe=recipe)
    return Part(line, note, watch, refuse, ending, 1.0, rule=rule)


def interrupted(call: Callable[[], object], error: Exception) -> None:
    """Assert that `error` arrives unchanged if a signal handler raises it in a function of this module."""

    def strike() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        handling_at(0, call, strike, HERE)
    assert raised.value is error


def test_an_error_of_a_handler_in_a_layout_rule_is_no_failure_of_the_rule() -> None:
    """The rule is not wrong: the member is interrupted, and the others go on. All ranks refused for it."""

    def rule(layout: ParallelLayout, alive: Collection[int]) -> Placement:
        return drop_replicas(layout, alive)

    with closing(PeerWatch(this_process(), {})) as watch:
        own = part(watch, rule)
        interrupted(lambda: own.choose((0, 1)), RuntimeError("a handler's"))
        assert own.rule_error is None


def test_an_error_of_a_handler_in_a_look_at_the_device_is_no_failure_of_the_device() -> None:
    """The member counted itself among the dead, and went on in no later call either."""

    def check() -> None:
        """Find the device in order."""

    def quiesce(within_s: float) -> None:
        """Find the device at rest."""

    with closing(PeerWatch(this_process(), {})) as watch:
        own = part(watch, ending=NOTHING._replace(check=check, quiesce=quiesce))
        interrupted(own.check_device, CommTimeoutError("a handler's"))
        assert own.unfit is None
        interrupted(own.tear_down, CommTimeoutError("a handler's"))
        assert own.unfit is None
