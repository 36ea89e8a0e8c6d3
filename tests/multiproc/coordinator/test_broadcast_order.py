"""Object broadcasts are handed out in the calls to which they belong, also if a rank calls another or refuses one."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import DisagreementError, GroupCoordinator, UsageError
from tests.handlers import handling_at
from tests.harness import RankPool, run_ranks
from tests.worlds import FarPool, new_group, outcome_of, run_far, world

DEPTH = 256
"""How many levels an object may have."""

Broadcast = Callable[[GroupCoordinator, Any, int], Any]

BROADCASTS: dict[str, Broadcast] = {
    "broadcast_object": lambda group, value, src: group.broadcast_object(value, src),
    "with a deadline": lambda group, value, src: group.broadcast_object(value, src, timeout_s=20.0),
    "with a type": lambda group, value, src: group.broadcast_object(value, src, type=list[int]),
    "broadcast_object_list": lambda group, value, src: group.broadcast_object_list(list(value), src),
    "broadcast_tensor_dict": lambda group, value, src: (
        group.broadcast_tensor_dict({"x": torch.tensor(value)}, src) or {}
    )["x"].tolist(),
}


def other_source(rank: int, world_size: int, directory: Path, name: str, queue: bool, slips: int) -> None:
    """Let rank 1 name itself as the source of one or more calls of rank 0."""
    broadcast = BROADCASTS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if queue:
            group.enable_broadcaster()
        for step in range(12):
            src = 1 if rank == 1 and 3 <= step < 3 + slips else 0
            value = [step, rank]
            # Of the call that they made differently neither waits for the other. Rank 1, which has sent, finds out in
            # the next one, where rank 0's message of the earlier call is the first.
            if rank == 1 and step == 3 + slips:
                with pytest.raises(DisagreementError, match=r"broadcast_object #\d+ .* its broadcast #4"):
                    broadcast(group, value, src)
            else:
                assert broadcast(group, value, src) == [step, src], step
        # The others find rank 1's messages, which nobody awaited, when they first listen to it, and drop them.
        if rank != 1:
            with pytest.raises(DisagreementError, match="rank 1 sent the object of its broadcast #4"):
                broadcast(group, [0, 0], 1)
        else:
            broadcast(group, [0, 0], 1)
        assert broadcast(group, [7, rank], 1) == [7, 1]
        assert broadcast(group, [8, rank], 0) == [8, 0]


@pytest.mark.guarantee("D67")
@pytest.mark.parametrize("slips", [1, 3])
@pytest.mark.parametrize("queue", [False, True])
@pytest.mark.parametrize("name", BROADCASTS)
def test_no_object_of_another_call_is_handed_out(
    ranks2: RankPool, name: str, queue: bool, slips: int
) -> None:
    """The rank that reads a message of an earlier call raises; its next call, and all later ones, have their own."""
    ranks2.run(other_source, name, queue, slips)


def refuse(rank: int, world_size: int, directory: Path, queue: bool) -> None:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if queue:
            group.enable_broadcaster()
        for step in range(10):
            if step == 2:
                if rank == 0:
                    with pytest.raises(UsageError, match=r'obj\["a"\] is a .*function'):
                        group.broadcast_object({"a": lambda: None})
                else:
                    with pytest.raises(DisagreementError, match=r'refused broadcast_object: .*obj\["a"\]'):
                        group.broadcast_object()
            elif step == 5 and rank == 1:
                with pytest.raises(UsageError, match="src"):
                    group.broadcast_object(None, 9)
            elif step == 7 and rank == 0:
                with pytest.raises(UsageError, match="src"):
                    group.broadcast_object_list(["x"], -4)
            elif step == 7:
                # Rank 0 named a source that does not exist, so only the number of its next call tells.
                with pytest.raises(DisagreementError, match="broadcast #9"):
                    group.broadcast_object_list([""])
            elif step == 8 and rank == 0:
                with pytest.raises(UsageError, match="must be a list"):
                    group.broadcast_object_list(("x",), 0)  # type: ignore[arg-type]
            elif step == 8:
                # The message that came too early in the last step is the one of this step.
                with pytest.raises(
                    DisagreementError, match="refused broadcast_object_list: .*must be a list"
                ) as caught:
                    group.broadcast_object_list([""])
                assert "must be a list" in caught.value.views[0]
            elif step == 9 and rank == 0:
                with pytest.raises(UsageError, match=r'obj\["a"\]'):
                    group.broadcast_tensor_dict({"a": lambda: None})
            elif step == 9:
                with pytest.raises(DisagreementError, match="rank 0 refused broadcast_tensor_dict: "):
                    group.broadcast_tensor_dict()
            else:
                assert group.broadcast_object([step, rank]) == [step, 0]
        # Whatever can be sent alone is sent, or refused on both ranks.
        deep: list[Any] = []
        for _ in range(DEPTH - 1):
            deep = [deep]
        found = outcome_of(lambda: group.broadcast_object(deep))
        assert found["kind"] in ("NoneType", "UsageError" if rank == 0 else "DisagreementError"), found
        assert group.broadcast_flag(rank == 0) is True


@pytest.mark.guarantee("D67")
@pytest.mark.parametrize("queue", [False, True])
def test_a_refused_broadcast_is_told_and_the_next_one_works(ranks2: RankPool, queue: bool) -> None:
    """If the source refuses, the others raise its reason; if a receiver does, its message of that call is dropped."""
    ranks2.run(refuse, queue)


PLACES = [["one", "another"], ["one", "another", "one"], ["one", "one", "another"]]
"""Where the ranks are: rank 0 writes a queue to a rank on another host, and beside it to one on its own host."""


@pytest.mark.guarantee("D67")
@pytest.mark.parametrize("queue", [False, True])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_ranks_on_several_hosts_get_no_object_of_another_call(places: list[str], queue: bool) -> None:
    """Where the messages go through Gloo, or through a queue to readers on its host and on others."""
    body = other_source.__module__, other_source.__qualname__
    for name in ("broadcast_object", "broadcast_tensor_dict"):
        run_ranks(run_far, len(places), places, *body, name, queue, 3)


def broadcast_in_a_handler(rank: int, world_size: int, directory: Path) -> None:
    """Broadcast from a handler at each place of a broadcast of rank 0, until the call has no more places."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        group.enable_broadcaster()
        assert not group._broadcaster.is_local  # type: ignore[union-attr]
        seen: list[list[int]] = []
        if rank == 0:
            for step in itertools.count():

                def make() -> None:
                    group.broadcast_object([step, 0])  # noqa: B023 - called within the same round

                def nested() -> None:
                    # Refused, or a call of its own before or behind the other one.
                    with suppress(UsageError):
                        group.broadcast_object([step, 1])  # noqa: B023
                        seen.append([step, 1])  # noqa: B023

                has_come = handling_at(step, make, nested, PLACES_OF_A_SEND)
                seen.append([step, 0])
                if not has_come:
                    break
            assert step > 5, step
            group.broadcast_object([])
        else:
            while (found := group.broadcast_object()) != []:
                seen.append(found)
        sent, *received = everyone.all_gather_object(seen)
        assert all(sorted(each) == sorted(sent) for each in received)


PLACES_OF_A_SEND = (
    *(
        f"coordinator/{name}.py"
        for name in ("calls", "planes", "queues/broadcast_order", "queues/broadcaster")
    ),
    *(f"shm_broadcast/{name}.py" for name in ("queue", "turn", "ring/writer", "remote/writer")),
)


@pytest.mark.guarantee("D67")
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_a_broadcast_of_a_handler_inside_of_another_one_is_refused_or_whole(places: list[str]) -> None:
    """Each object that was sent comes once, wherever the handler strikes in the other call."""
    body = broadcast_in_a_handler.__module__, broadcast_in_a_handler.__qualname__
    run_ranks(run_far, len(places), places, *body)


@pytest.mark.guarantee("D67")
@pytest.mark.parametrize("queue", [False, True])
def test_a_refusal_is_told_on_other_hosts(ranks2: RankPool, queue: bool) -> None:
    """The reasons, and the next calls, are those of one host."""
    FarPool(ranks2, ["one", "another"]).run(refuse, queue)
