"""Collectives that a signal handler makes between two parts of a call that is made of several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch

from coordinator import GroupCoordinator, UsageError
from coordinator.host import plane
from device_comm import derived_reductions
from device_comm.stages import Turns
from tests.handlers import handling_where
from tests.harness import RankPool
from tests.multiproc.device_comm.test_stages import COMPOSING, SEVERAL, numbers
from tests.worlds import ApartPool, new_group, world

PLACES = {each.__file__ for each in (*COMPOSING, derived_reductions, plane)}
WIDE = 1 << 17  # elements, which are beyond one shot


def flags(group: GroupCoordinator) -> bool:
    """Combine bits, which a reduction and a gather do."""
    mine = torch.full((WIDE,), 1 << group.rank_in_group)
    found: list[int] = group.all_reduce(mine, cast("Any", "bor")).unique().tolist()
    return found == [(1 << group.world_size) - 1]


CALLS: dict[str, Callable[[GroupCoordinator], Any]] = {
    **{name: call for name, call in SEVERAL.items() if name != "enable_broadcaster"},
    "large objects": lambda group: len(group.all_gather_object(bytes(1 << 16))) == group.world_size,
    "bits": flags,
}


def between_parts(call: Callable[[], object], group: GroupCoordinator, handler: Callable[[], None]) -> None:
    """Make the call and run `handler`, as of a signal, at the first place behind the first collective in it."""
    before = numbers(group)

    def is_between(frame: FrameType) -> bool:
        is_behind = frame.f_code.co_filename in PLACES and numbers(group) != before
        return is_behind and not any(map(is_busy, group._health.planes.values()))

    assert handling_where(is_between, call, handler)


def is_busy(found: object) -> bool:
    """Return whether a plane refuses a handler's call for a collective that is under way."""
    return isinstance(found, Turns) and bool(found._claims)


def interrupted(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let a handler of rank 0 make right and wrong calls between the parts; go on in order on all ranks."""
    tensor = torch.ones(12)
    # What is called, and the name that the refusal gives it.
    inner: dict[str, tuple[str, Callable[[GroupCoordinator], object]]] = {
        "right": ("all_reduce", lambda group: group.all_reduce(tensor, timeout_s=3.0)),
        "wrong": ("all_reduce", lambda group: group.all_reduce(cast("Any", "no tensor"))),
        "a wrong output": (
            "all_gather_into_tensor",
            lambda group: group.all_gather_into_tensor(tensor, tensor),
        ),
        "queued": ("all_reduce", lambda group: group.all_reduce(tensor, async_op=True)),
        "several": (
            "all_reduce_coalesced",
            lambda group: group.all_reduce_coalesced([tensor, tensor.double()]),
        ),
        "in a block": ("all_reduce_coalesced", SEVERAL["coalescing"]),
        "objects": ("all_gather_object", lambda group: group.all_gather_object(1, timeout_s=3.0)),
        "objects for one": ("gather_object", lambda group: group.gather_object(rank, 1)),
        "a tensor dict": (
            "broadcast_tensor_dict",
            lambda group: group.broadcast_tensor_dict({"a": tensor}, 0),
        ),
        "barrier": ("barrier", lambda group: group.barrier(3.0)),
    }
    refused: dict[str, str] = {}
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:

        def handler() -> None:
            for what, (_, make) in inner.items():
                try:
                    make(group)
                except UsageError as error:
                    refused[what] = str(error)

        def call() -> None:
            assert CALLS[name](group)

        if rank == 0:
            between_parts(call, group, handler)
            assert refused.keys() == inner.keys()
            assert all("on the same thread" in text for text in refused.values()), refused
            for what, (refused_name, _) in inner.items():
                assert refused[what].startswith(f"{refused_name} "), refused
        else:
            call()
        for step in range(3):
            assert group.all_reduce(torch.tensor(float(step))).item() == world_size * step
        assert group.broadcast_object(rank, 0) == 0
        for step in range(2):
            found = group.gather_object((rank, step), 1)
            assert found == ([(each, step) for each in range(world_size)] if rank == 1 else None)
        assert group.all_gather_object(rank) == list(range(world_size))


SAMPLE = ("all_reduce_coalesced", "dispatch", "all_gatherv", "large objects")


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize(
    ("name", "apart"),
    [
        pytest.param(name, apart, marks=() if name in SAMPLE else pytest.mark.thorough)
        for name in CALLS
        for apart in (False, True)
        if name != "bits" and not (apart and name == "large objects")  # which are one collective there
    ],
)
def test_a_collective_between_the_parts_of_another_is_refused(
    ranks2: RankPool, name: str, apart: bool
) -> None:
    """It has no number, also if it is wrong or queued: the other ranks would take it for the next part."""
    (ApartPool(ranks2) if apart else ranks2).run(interrupted, name, timeout_s=60.0)


@pytest.mark.guarantee("D10")
@pytest.mark.thorough
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host each"])
def test_a_collective_between_the_parts_of_a_derived_reduction_is_refused(
    ranks3: RankPool, apart: bool
) -> None:
    """As inside of the calls that are visibly made of several."""
    (ApartPool(ranks3) if apart else ranks3).run(interrupted, "bits", timeout_s=60.0)
