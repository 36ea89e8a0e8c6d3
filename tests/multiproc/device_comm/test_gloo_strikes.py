"""Signal handlers that raise inside of calls over Gloo, also a second time while the first exception is dealt with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import GroupBrokenError, GroupCoordinator, PeerLostError
from tests.handlers import Interrupt, raising_at, raising_twice_at
from tests.harness import RankPool
from tests.multiproc.device_comm.test_stages import numbers
from tests.worlds import ApartPool, HostsPool, meet, new_group, world

# More than the places of any of the calls.
STEPS = 900
# No wait of these tests may take so long, on any machine.
HANG_S = 20.0
FILES = (
    *(f"coordinator/{name}.py" for name in ("calls", "host/gloo", "collectives/point_to_point")),
    "contextlib.py",
    *(
        f"device_comm/{name}.py"
        for name in ("base", "handles", "health", "movable", "process_group", "stages", "works")
    ),
)
# Where the stages of a collective run, and where what has ended one is dealt with.
STAGES = (
    "coordinator/host/gloo.py",
    *(f"device_comm/cpu/several_hosts/{name}.py" for name in ("levels", "leaders", "wires")),
    *(f"device_comm/{name}.py" for name in ("process_group", "stages", "works")),
)
CLEANING = tuple(f"device_comm/{name}.py" for name in ("process_group", "health", "stages"))


def told(error: GroupBrokenError | PeerLostError, struck: int) -> bool:
    """Return True if `error` tells that a handler of the rank `struck` has broken the group; raise it if not."""
    if isinstance(error.__cause__, Interrupt) or f"interrupted: rank {struck}" in str(error):
        return True
    raise error


Receive = Callable[[GroupCoordinator, int], Callable[[], torch.Tensor]]


def received(group: GroupCoordinator, tag: int) -> Callable[[], torch.Tensor]:
    """Receive; return what gives the tensor."""
    tensor = group.recv((4,), torch.float32, 0, tag=tag, timeout_s=HANG_S)
    return lambda: tensor


def started(group: GroupCoordinator, tag: int) -> Callable[[], torch.Tensor]:
    """Start to receive; return what waits for the tensor."""
    into = torch.zeros(4)
    handle = group.irecv(into, 0, tag=tag, timeout_s=HANG_S)

    def waited() -> torch.Tensor:
        handle.wait()
        return into

    return waited


RECEIVES: dict[str, Receive] = {"recv": received, "irecv": started}


def struck_receive(rank: int, world_size: int, directory: Path, name: str, tag: int) -> None:
    """Receive once for each place of the call, at which a handler of rank 1 raises."""
    with world(rank, world_size, directory) as everyone:
        group, is_over = new_group(everyone, "g"), False
        for step in count():
            assert step < STEPS, "the call has more places"
            results, is_broken = list[Callable[[], torch.Tensor]](), False

            def take() -> None:
                results.append(RECEIVES[name](group, tag))  # noqa: B023 - called within the same round

            try:
                if rank == 0:
                    group.send(torch.full((4,), float(step)), 1, tag=tag, timeout_s=HANG_S)
                else:
                    is_over = not raising_at(step, take, FILES)
                    if not results:
                        take()
                    assert [float(result()[0]) for result in results] == [step]
            except (GroupBrokenError, PeerLostError) as error:
                is_broken = told(error, 1)
            states = everyone.all_gather_object((is_broken, is_over))
            if states[1][0]:
                if not is_broken:
                    with pytest.raises((PeerLostError, GroupBrokenError)):
                        group.barrier()
                group.destroy()
                group = new_group(everyone, f"g{step}")
                everyone.barrier()
            if states[1][1]:
                break
        group.destroy()


@pytest.mark.guarantee("D10")
@pytest.mark.slow
@pytest.mark.parametrize("name", RECEIVES)
@pytest.mark.parametrize("tag", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_strike_in_a_receive_over_gloo_loses_no_message(ranks2: RankPool, tag: int, name: str) -> None:
    """The next call receives the message, or the group is broken on both ranks with that reason."""
    ApartPool(ranks2).run(struck_receive, name, tag, timeout_s=240.0)


# All pairs of places take up to three minutes; the suite takes a ninth of them.
strides = pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.thorough)])

CALLS: dict[str, Callable[[GroupCoordinator], Any]] = {
    "barrier": lambda group: group.barrier(HANG_S),
    "all_reduce": lambda group: group.all_reduce(torch.ones(4), timeout_s=HANG_S),
}


def struck_twice(rank: int, world_size: int, directory: Path, name: str, stride: int) -> int:
    """Make a call for each pair of places at which a handler of rank 0 raises twice; return how often it did.

    Of the pairs every one of `stride` is taken, from the first on.
    """
    call, step, second, twice = CALLS[name], 0, 0, 0
    with world(rank, world_size, directory) as everyone:
        for number in count():
            assert step < STEPS, "the call has more places"
            group = new_group(everyone, f"g{number}")
            meet(rank, range(world_size), directory, f"created {number}")
            come, is_broken = (True, True), False
            try:
                if rank == 0:
                    before = numbers(group)
                    come = raising_twice_at(step, second, lambda: call(group), STAGES, CLEANING)  # noqa: B023
                    if come[0] and numbers(group) == before:
                        call(group)
                    group._health.check_usable("the next call")
                    assert not come[0] or numbers(group) != before
                else:
                    call(group)
            except (GroupBrokenError, PeerLostError) as error:
                is_broken = told(error, 0)
            states = everyone.all_gather_object((is_broken, come))
            if states[0][0] and not is_broken:
                with pytest.raises((PeerLostError, GroupBrokenError)):
                    group.barrier()
            assert states[0][0] or not any(broken for broken, _ in states)
            group.destroy()
            came, came_again = states[0][1]
            if not came:
                return twice
            twice += came_again
            step, second = (step, second + stride) if came_again else (step + 1, (step + 1) % stride)
    raise AssertionError("not reached")


@pytest.mark.guarantee("D10")
@pytest.mark.slow
@strides
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.thorough) if each == "all_reduce" else each for each in CALLS],
)
def test_a_second_strike_in_a_collective_over_gloo_is_told(ranks2: RankPool, name: str, stride: int) -> None:
    """A handler that raises again while the group is being broken leaves it broken on both ranks."""
    assert ApartPool(ranks2).run(struck_twice, name, stride, timeout_s=600.0)[0] > 5


@pytest.mark.guarantee("D10")
@pytest.mark.thorough
@pytest.mark.long
@strides
def test_a_second_strike_in_a_collective_over_several_hosts_is_told(ranks3: RankPool, stride: int) -> None:
    """As over Gloo alone, also to the other ranks of the host."""
    assert HostsPool(ranks3, ["A", "A", "B"]).run(struck_twice, "all_reduce", stride, timeout_s=600.0)[0] > 5
