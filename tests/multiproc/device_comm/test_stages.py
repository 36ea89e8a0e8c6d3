"""Signal handlers that raise at any step of a collective: over a process group in several stages, and natively."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator import GroupBrokenError, GroupCoordinator, PeerLostError
from coordinator import group as coordinator_group
from coordinator.collectives import coalesced as coalesced_collectives
from coordinator.collectives import expert_parallel
from coordinator.host import gloo
from coordinator.queues import group_queues
from device_comm import all2all, base, checks, coalesced, process_group, stages
from device_comm.cpu import communicator, region_calls
from device_comm.cpu.several_hosts import communicator as hierarchical
from device_comm.cpu.several_hosts import leaders, levels, wires
from tests.harness import RankPool
from tests.multiproc.device_comm.test_channel_opening import Strikes, strike
from tests.unit.shm_broadcast.test_signal_handlers import AlarmError
from tests.waiting import wait_until
from tests.worlds import ApartPool, HostsPool, meet, new_group, world

# What every rank gets for a deterministic input is compared with `SUMS`.
COUNT = 3 * process_group.ONE_SHOT_BYTES // 4

Call = Callable[[GroupCoordinator], Any]


def filled(group: GroupCoordinator, elements: int = 12) -> torch.Tensor:
    """Return a tensor of ones on the first rank, twos on the second, and so on."""
    return torch.full((elements,), 1.0 + group.rank_in_group)


def scattered(group: GroupCoordinator) -> torch.Tensor | None:
    """Return on the first rank a tensor with the number of each rank, three times."""
    if group.rank_in_group:
        return None
    return torch.arange(group.world_size).repeat_interleave(3).float()


def total(group: GroupCoordinator) -> float:
    """Return what the ranks' elements add up to."""
    return sum(1.0 + rank for rank in range(group.world_size))


CALLS: dict[str, Call] = {
    # Beyond one shot, and in several pieces.
    "large all_reduce": lambda group: (
        group.all_reduce(filled(group, COUNT)).unique().tolist() == [total(group)]
    ),
    "all_gather": lambda group: group.all_gather(filled(group)).unique().numel() == group.world_size,
    "all_to_all": lambda group: group.all_to_all(filled(group)).unique().numel() == group.world_size,
    "gather": lambda group: (group.gather(filled(group), 1) is not None) == (group.rank_in_group == 1),
    "scatter": lambda group: (
        group.scatter(torch.zeros(3), scattered(group)).unique().tolist() == [group.rank_in_group]
    ),
    "broadcast": lambda group: group.broadcast(filled(group), 1).unique().tolist() == [2.0],
    "barrier": lambda group: group.barrier() is None,
    "all_gather_object": lambda group: (
        group.all_gather_object(group.rank_in_group) == list(range(group.world_size))
    ),
}

# Of the group's communicator, without the gate of the group's own methods.
CALLS |= {
    "the communicator's all_reduce": lambda group: (
        group.device_communicator.all_reduce(filled(group)).unique().tolist() == [total(group)]
    ),
    "the communicator's all_reduce_": lambda group: (
        group.device_communicator.all_reduce_(filled(group)).unique().tolist() == [total(group)]
    ),
    "the communicator's all_gather": lambda group: (
        group.device_communicator.all_gather(filled(group)).unique().numel() == group.world_size
    ),
    "the communicator's broadcast": lambda group: (
        group.device_communicator.broadcast(filled(group), 1).unique().tolist() == [2.0]
    ),
}


class CallStrikes(Strikes):
    """Strikes where functions begin and native calls return, which leaves out the returns of Python functions.

    No handler runs there, and nothing could keep what such a function has made from being lost.
    """

    @contextmanager
    def run(self) -> Iterator[None]:
        """Strike once within the block, unless its places are used up."""
        self.passed = 0

        def profile(frame: FrameType, event: str, _argument: object) -> None:
            is_place = event in ("call", "c_return") and frame.f_code.co_filename in self._files
            self.passed += is_place
            if is_place and self.passed == self.place + 1:
                self.strike()

        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.place += 1


def coalesced_sums(group: GroupCoordinator) -> bool:
    """Make one call of several tensors of two dtypes."""
    tensors = [filled(group), filled(group).double(), filled(group, 5)]
    return all(each.unique().tolist() == [total(group)] for each in group.all_reduce_coalesced(tensors))


def collected(group: GroupCoordinator) -> bool:
    """Make calls of two kinds when a block ends."""
    with group.coalescing() as calls:
        summed, gathered = calls.all_reduce(filled(group)), calls.all_gather(filled(group))
    found = summed.result().unique().tolist(), gathered.result().unique().numel()
    return bool(found == ([total(group)], group.world_size))


def routed(group: GroupCoordinator) -> bool:
    """Send tokens to the ranks of their experts."""
    ids = torch.tensor([[0, 1], [1, 0]])
    sent: Any = group.dispatch(torch.ones(2, 8), torch.ones(2, 2), ids, experts=2)
    return bool(tuple(sent.hidden_states.shape) == (2 * group.world_size, 8))


def enabled(group: GroupCoordinator) -> bool:
    """Broadcast through a queue of the group from now on."""
    group.enable_broadcaster()
    return bool(group.broadcast_object(group.rank_in_group, 0) == 0)


# Calls that are made of several others.
SEVERAL: dict[str, Call] = {
    "all_gatherv": lambda group: (
        [len(each) for each in group.all_gatherv([filled(group), filled(group, 5)], sizes=None)] == [24, 10]
    ),
    "all_gatherv with a gradient": lambda group: all(
        each.requires_grad
        for each in group.all_gatherv([filled(group).requires_grad_(), filled(group, 5).requires_grad_()])
    ),
    "all_reduce_coalesced": coalesced_sums,
    "coalescing": collected,
    "dispatch": lambda group: len(group.dispatch(filled(group, 6).view(2, 3), filled(group, 2))) == 2,
    "dispatch with experts": routed,
    "create_mq_broadcaster": lambda group: group.create_mq_broadcaster(0) is not None,
    "create_single_reader_mq_broadcasters": lambda group: (
        len(group.create_single_reader_mq_broadcasters(0)[1]) in (0, group.world_size)
    ),
    "enable_broadcaster": enabled,
}
CALLS |= SEVERAL


def numbers(group: GroupCoordinator) -> str:
    """Return how many collectives this rank has begun on both planes."""
    shared: Any = group._parts.communicator.context.shared
    native = (shared.device.core.number, shared.host.core.number) if shared is not None else ()
    return repr((group._health._numbers, native))


def struck_call(group: GroupCoordinator, call: Call, strikes: Strikes) -> str:
    """Make the call with a strike in it; return what this rank regards as its outcome."""
    before = numbers(group)
    struck: AlarmError | None = None
    try:
        with strikes.run():
            assert call(group)
    except AlarmError as error:
        struck = error
    if group._health.is_broken:
        with pytest.raises(GroupBrokenError) as broken:
            call(group)
        assert broken.value.__cause__ is struck
        return "broken"
    if struck is not None and numbers(group) == before:
        # Nothing has begun, so the call can be made again.
        assert call(group)
    return "over" if strikes.is_over else "whole"


def awaited_call(group: GroupCoordinator, call: Call, struck: int) -> str:
    """Make the call on a rank whose peer is struck; return "whole", or "broken" if the peer's handler ended it."""
    start = time.monotonic()
    lost: PeerLostError | None = None
    try:
        assert call(group)
    except PeerLostError as error:
        lost = error
    if lost is None:
        return "whole"
    assert f"interrupted: rank {struck}" in str(lost)
    assert "AlarmError" in str(lost)
    assert time.monotonic() - start < 10.0
    return "broken"


def struck_at_any_step(
    rank: int,
    world_size: int,
    directory: Path,
    name: str,
    modules: list[str],
    struck: int = 0,
    late_s: float = 0.0,
    at_calls: bool = False,
) -> int:
    """Strike one rank at the next step in each round; the others make the call `late_s` seconds later."""
    known: dict[str, ModuleType] = {
        each.__name__: each
        for each in (
            *(process_group, hierarchical, levels, leaders, wires, gloo, communicator, region_calls, stages),
            *(
                base,
                checks,
                coalesced,
                all2all,
                expert_parallel,
                coalesced_collectives,
                group_queues,
                coordinator_group,
            ),
        )
    }
    kind = CallStrikes if at_calls else Strikes
    strikes = kind(strike, *(known[each] for each in modules))
    call, ranks = CALLS[name], range(world_size)
    outcome, number, broken = "", 0, 0
    with (
        world(rank, world_size, directory) as everyone,
        mock.patch.object(levels, "PIECE_BYTES", COUNT * 2),
    ):
        while outcome != "over":
            told = directory / f"outcome-{number}"
            with new_group(everyone, f"g{number}") as group:
                # A rank whose creation still connects would find the group broken.
                meet(rank, ranks, directory, f"created-{number}")
                if rank == struck:
                    outcome = struck_call(group, call, strikes)
                    told.with_suffix(".part").write_text(outcome)
                    told.with_suffix(".part").rename(told)
                else:
                    time.sleep(late_s)
                    own = awaited_call(group, call, struck)
                    wait_until(told.exists, "the struck rank")
                    outcome = told.read_text()
                    if outcome == "broken" and own == "whole":
                        # This rank has done its part before, and learns of it by its next call.
                        own = awaited_call(group, lambda group: group.barrier() is None, struck)
                    assert (own == "broken") == (outcome == "broken"), (own, outcome, number)
                if outcome != "broken":
                    # A call that was left in silence would be in the way of the next, or pair with it.
                    assert call(group)
                broken += outcome == "broken"
                meet(rank, ranks, directory, f"seen-{number}")
            number += 1
    return broken


@pytest.mark.guarantee("D10")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "scatter",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gather", "all_to_all")),
    ],
)
def test_a_strike_between_the_stages_over_a_process_group_is_told(ranks2: RankPool, name: str) -> None:
    """The struck call has not begun, is complete, or has broken the group: never do calls pair wrongly."""
    found = ApartPool(ranks2).run(
        struck_at_any_step, name, [process_group.__name__, stages.__name__], timeout_s=200.0
    )
    assert min(found) > 5


@pytest.mark.guarantee("D10")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["barrier", "all_gather_object"])
def test_a_strike_between_the_stages_of_objects_over_gloo_is_told(ranks2: RankPool, name: str) -> None:
    """As over a process group, on the plane of objects."""
    found = ApartPool(ranks2).run(struck_at_any_step, name, [gloo.__name__, stages.__name__], timeout_s=200.0)
    assert min(found) > 5


@pytest.mark.guarantee("D10")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "struck"),
    [
        pytest.param("large all_reduce", 0, marks=pytest.mark.thorough),
        pytest.param("large all_reduce", 1, marks=pytest.mark.thorough),
        pytest.param("all_gather", 0, marks=pytest.mark.thorough),
        ("broadcast", 0),
    ],
)
def test_a_strike_between_the_stages_over_several_hosts_is_told(
    ranks3: RankPool, name: str, struck: int
) -> None:
    """Also to the ranks that wait for the leader of their host, and to those behind another leader."""
    pool = HostsPool(ranks3, ["A", "A", "B"])
    found = pool.run(
        struck_at_any_step,
        name,
        [hierarchical.__name__, levels.__name__, stages.__name__],
        struck,
        timeout_s=200.0,
    )
    assert min(found) > 5


@pytest.mark.thorough
@pytest.mark.guarantee("D10")
@pytest.mark.slow
def test_a_strike_between_the_messages_of_leaders_is_told(ranks3: RankPool) -> None:
    """As in the rest of a call: headers and data are queued one after the other, and move in parts."""
    pool = HostsPool(ranks3, ["A", "A", "B"])
    found = pool.run(struck_at_any_step, "all_gather", [leaders.__name__, wires.__name__], timeout_s=200.0)
    assert min(found) > 5


@pytest.mark.guarantee("D10")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in CALLS
            if "communicator" in name and "all_reduce_" not in name
        ),
        "the communicator's all_reduce_",
        "barrier",
    ],
)
def test_a_strike_between_a_native_call_and_its_wait_is_told(ranks2: RankPool, name: str) -> None:
    """Also in a call of the communicator; the other rank comes when the first native slice, 50 ms, is over."""
    modules = [communicator.__name__, region_calls.__name__]
    found = ranks2.run(struck_at_any_step, name, modules, 0, 0.1, timeout_s=200.0)
    assert min(found) > 5


SAMPLE = ("all_gatherv", "all_gatherv with a gradient", "create_single_reader_mq_broadcasters")
# Where the calls run that are made of several others.
COMPOSING = [
    base,
    checks,
    coalesced,
    all2all,
    expert_parallel,
    coalesced_collectives,
    group_queues,
    coordinator_group,
    stages,
]


@pytest.mark.guarantee("D10")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *SAMPLE,
        *(pytest.param(name, marks=pytest.mark.thorough) for name in SEVERAL if name not in SAMPLE),
    ],
)
def test_a_strike_between_the_calls_of_which_one_is_made_is_told(ranks2: RankPool, name: str) -> None:
    """No rank waits in the second of them, and the next call of the struck rank does not meet it."""
    found = ranks2.run(
        *(struck_at_any_step, name, [module.__name__ for module in COMPOSING], 0, 0.1, True),
        timeout_s=200.0,
    )
    assert min(found) > 5
