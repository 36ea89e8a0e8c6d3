"""A collective that one rank refuses is refused on all ranks, and the next call works."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator import (
    CapabilityError,
    CommError,
    DisagreementError,
    GroupCoordinator,
    ReduceOperation,
    UsageError,
)
from device_comm import _core
from shm_broadcast.threads import DaemonThread
from tests.harness import RankPool
from tests.worlds import ApartPool, meet, new_group, world

Call = Callable[[GroupCoordinator], Any]


def combined(group: GroupCoordinator, flag: Any) -> Any:
    """Combine, with stated counts of tokens, so that no dispatch comes before."""
    with group.token_counts([2] * group.world_size):
        return group.combine(torch.ones(2 * group.world_size, 4), flag)


# A call that is right, and the same call as one rank gets it wrong.
CALLS: dict[str, tuple[Call, Call]] = {
    "all_reduce": (
        lambda group: group.all_reduce(torch.ones(4)),
        lambda group: group.all_reduce(torch.ones(4), "no such reduction"),  # type: ignore[call-overload]
    ),
    "all_gather": (
        lambda group: group.all_gather(torch.ones(0, 4), 0),
        lambda group: group.all_gather(torch.ones(0, 4), 7),
    ),
    "all_to_all": (
        lambda group: group.all_to_all(torch.ones(12, 4)),
        lambda group: group.all_to_all(torch.ones(12, 4), 9),
    ),
    "dispatch": (
        lambda group: group.dispatch(torch.ones(2, 4), torch.ones(2, 2), torch.ones(2, 2)),
        lambda group: group.dispatch("tokens", torch.ones(2, 2), torch.ones(2, 2)),  # type: ignore[call-overload]
    ),
    "with a flag that is none: dispatch": (
        lambda group: group.dispatch(torch.ones(2, 4), torch.ones(2, 2), torch.ones(2, 2)),
        lambda group: group.dispatch(torch.ones(2, 4), torch.ones(2, 2), torch.ones(2, 2), "yes"),  # type: ignore[call-overload]
    ),
    "with further tensors twice: dispatch": (
        lambda group: group.dispatch(torch.ones(2, 4), torch.ones(2, 2), False, None),
        lambda group: group.dispatch(torch.ones(2, 4), torch.ones(2, 2), False, [], []),
    ),
    "with a flag that is none: combine": (
        lambda group: combined(group, False),
        lambda group: combined(group, "yes"),
    ),
    "broadcast": (
        lambda group: group.broadcast(torch.ones(4)),
        lambda group: group.broadcast(torch.ones(4), 9),
    ),
    "reduce": (
        lambda group: group.reduce(torch.ones(4)),
        lambda group: group.reduce(torch.ones(4), 0, "no such reduction"),  # type: ignore[call-overload]
    ),
    "gather": (lambda group: group.gather(torch.ones(4)), lambda group: group.gather(torch.ones(4), 9)),
    "scatter": (
        lambda group: group.scatter(torch.empty(2), None if group.rank else torch.ones(4)),
        lambda group: group.scatter(torch.empty(2), src=9),
    ),
    "reduce_scatter": (
        lambda group: group.reduce_scatter(torch.ones(4)),
        lambda group: group.reduce_scatter(torch.ones(4), 7),
    ),
    "of the group's all_to_all_single: all_to_all_into_output": (
        lambda group: group.all_to_all_single(torch.empty(4), torch.ones(4)),
        lambda group: group.all_to_all_single(torch.empty(4), torch.ones(4), [1]),
    ),
    "barrier": (lambda group: group.barrier(), lambda group: group.barrier(-1.0)),
    "all_gather_object": (
        lambda group: group.all_gather_object({"rank": group.rank}),
        lambda group: group.all_gather_object(lambda: None),
    ),
    "create_mq_broadcaster": (
        lambda group: group.create_mq_broadcaster(0),
        lambda group: group.create_mq_broadcaster(9),
    ),
    "create_single_reader_mq_broadcasters": (
        lambda group: group.create_single_reader_mq_broadcasters(0),
        lambda group: group.create_single_reader_mq_broadcasters(9),
    ),
    "split_group": (
        lambda group: group.split_group(color=0).destroy(),  # type: ignore[union-attr]
        lambda group: group.split_group(color=-7),
    ),
    "all_sum": (lambda group: group.all_sum(2), lambda group: group.all_sum("two")),  # type: ignore[arg-type]
    "async all_reduce": (
        lambda group: group.all_reduce(torch.ones(4), async_op=True).wait(),
        lambda group: group.all_reduce("tensor", async_op=True).wait(),  # type: ignore[call-overload]
    ),
    "async all_reduce_coalesced": (
        lambda group: group.all_reduce_coalesced([torch.ones(4)], async_op=True).wait(),
        lambda group: group.all_reduce_coalesced(["tensor"], async_op=True),  # type: ignore[call-overload]
    ),
    "all_gather_into_tensor": (
        lambda group: group.all_gather_into_tensor(torch.empty(group.world_size * 4), torch.ones(4)),
        lambda group: group.all_gather_into_tensor(torch.empty(3), torch.ones(4)),
    ),
    "reduce_scatter_tensor": (
        lambda group: group.reduce_scatter_tensor(torch.empty(4), torch.ones(group.world_size * 4)),
        lambda group: group.reduce_scatter_tensor(torch.empty(8)[::2], torch.ones(group.world_size * 4)),
    ),
    "with a lost gradient: all_reduce": (
        lambda group: group.all_reduce(torch.ones(4), ReduceOperation.MAX),
        lambda group: group.all_reduce(torch.ones(4, requires_grad=True), ReduceOperation.MAX),
    ),
    "with a gradient and a wrong deadline: all_gather": (
        lambda group: group.all_gather(torch.ones(4)),
        lambda group: group.all_gather(torch.ones(4, requires_grad=True), timeout_s=-1.0),
    ),
    "with two outputs: all_gather": (
        lambda group: group.all_gather(torch.ones(4)),
        lambda group: group.all_gather(  # type: ignore[call-overload]
            torch.ones(4), output_tensor_list=[], out=torch.empty(8)
        ),
    ),
    "with an output for several: all_gatherv": (
        lambda group: group.all_gatherv(torch.ones(4)),
        lambda group: group.all_gatherv([torch.ones(4)], output=torch.empty(8)),  # type: ignore[call-overload]
    ),
}


def refuse_one(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let the last rank get the second of five calls wrong; sum the number of each step afterwards."""
    good, wrong = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        sums = []
        for step in range(5):
            if step == 1 and rank == world_size - 1:
                with pytest.raises(UsageError):
                    wrong(group)
            elif step == 1:
                with pytest.raises(DisagreementError) as refused:
                    good(group)
                assert f"rank {world_size - 1} refused {name.rsplit(maxsplit=1)[-1]}: " in str(refused.value)
                assert refused.value.views[world_size - 1].startswith("refused ")
            else:
                good(group)
            sums.append(group.all_reduce(torch.tensor(float(step))).item())
            assert group.all_gather_object(step) == [step] * world_size
        assert sums == [float(step * world_size) for step in range(5)]


@pytest.mark.guarantee("D69")
@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call_is_refused_on_all_ranks(ranks2: RankPool, name: str) -> None:
    """The others raise for that call, with rank and reason; every later call has the right result."""
    ranks2.run(refuse_one, name)


class NoBlocks:
    """Stands for a pool of memory on a machine that has none left."""

    def take(self, nbytes: int) -> None:
        raise MemoryError(f"no {nbytes} bytes")


def without_blocks(group: GroupCoordinator, call: Call) -> None:
    """Make a call for whose result there is no memory."""
    with mock.patch.object(group.device_communicator, "_pool", NoBlocks()):
        call(group)


def without_a_begin(group: GroupCoordinator) -> None:
    """Let native code raise where it would begin a call, as it does without memory for that."""
    region: Any = vars(group.device_communicator)["_region"]
    region.make("all_reduce", partial(int, "no number"), 30.0)


def without_a_later_begin(group: GroupCoordinator) -> None:
    """Let native code raise where it would begin a call that had to wait for another thread's."""
    region: Any = vars(group.device_communicator)["_region"]
    region.make("all_reduce", partial(next, map(int, [str(_core.BUSY)] * 2 + ["no number"])), 30.0)


def large(group: GroupCoordinator) -> torch.Tensor:
    return group.all_gather(torch.ones(1 << 17))


ENDLESS = 1 << 45

# A call that is right, and one that fails on a rank that lacks memory for it.
LACKING: dict[str, tuple[Call, Call]] = {
    "a copy of what all_reduce gets": (
        lambda group: group.all_reduce(torch.ones(4)),
        lambda group: group.all_reduce(torch.ones(1).expand(ENDLESS)),
    ),
    "a copy of what reduce_scatter gets": (
        lambda group: group.reduce_scatter(torch.ones(4)),
        lambda group: group.reduce_scatter(torch.ones(1).expand(ENDLESS)),
    ),
    "a copy of what all_to_all gets": (
        lambda group: group.all_to_all(torch.ones(4)),
        lambda group: group.all_to_all(torch.ones(1).expand(ENDLESS)),
    ),
    "a result": (large, lambda group: without_blocks(group, large)),
    "a result of async all_gather": (
        large,
        lambda group: without_blocks(
            group, lambda group: group.all_gather(torch.ones(1 << 17), async_op=True).wait()
        ),
    ),
    "the call itself": (lambda group: group.all_reduce(torch.ones(4)), without_a_begin),
    "the call itself, in its turn": (lambda group: group.all_reduce(torch.ones(4)), without_a_later_begin),
}


def lack_memory(rank: int, world_size: int, directory: Path, what: str) -> None:
    """Let the last rank fail in the second of three calls before it begins."""
    good, wrong = LACKING[what]
    with world(rank, world_size, directory) as everyone, new_group(everyone, timeout_s=30.0) as group:
        for step in range(3):
            if step == 1 and rank == world_size - 1:
                with pytest.raises((RuntimeError, MemoryError, ValueError)) as lacking:
                    wrong(group)
                assert not isinstance(lacking.value, CommError)
            elif step == 1:
                with pytest.raises(DisagreementError, match=f"rank {world_size - 1} refused ") as refused:
                    good(group)
                assert "Error: " in str(refused.value)
            else:
                good(group)
            assert group.all_reduce(torch.tensor(float(step))).item() == step * world_size
            assert group.all_gather_object(step) == [step] * world_size


@pytest.mark.guarantee("D69")
@pytest.mark.parametrize("what", LACKING)
def test_a_call_that_lacks_memory_before_it_begins_is_refused_on_all_ranks(
    ranks2: RankPool, what: str
) -> None:
    """The rank raises what torch or Python raises there; the others raise with that reason, and the next call works."""
    ranks2.run(lack_memory, what)


def refuse_often(rank: int, world_size: int, directory: Path) -> None:
    """Let rank 0 refuse three calls of one plane and go on with the other, to which rank 1 comes later."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        for _ in range(3):
            with pytest.raises(UsageError if rank == 0 else DisagreementError):
                group.barrier(-1.0 if rank == 0 else None)
        assert group.all_reduce(torch.ones(2)).tolist() == [world_size] * 2
        for _ in range(3):
            with pytest.raises(UsageError if rank == 0 else DisagreementError):
                CALLS["all_reduce"][rank == 0](group)
        if rank == 0:
            assert group.recv([1], torch.float32, src=1).item() == 7.0
        elif rank == 1:
            group.send(torch.tensor([7.0]), dst=0)
        group.barrier()


@pytest.mark.guarantee("D69")
def test_refusals_come_while_their_rank_waits_for_something_else(ranks2: RankPool) -> None:
    """Several refusals of one plane reach the others while the refusing rank waits in a call of another plane."""
    ranks2.run(refuse_often)


def refuse_in_turn(rank: int, world_size: int, directory: Path) -> None:
    """Let each rank refuse several calls in a row, long before the others come to them."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        for culprit in range(world_size):
            if rank == culprit:
                for _ in range(3):
                    with pytest.raises(UsageError, match="dim"):
                        group.all_gather(torch.ones(4), 5)
            meet(rank, range(world_size), directory, f"refused {culprit}")
            if rank != culprit:
                for _ in range(3):
                    with pytest.raises(DisagreementError, match=rf"rank {culprit} refused all_gather: .*dim"):
                        group.all_gather(torch.full((4,), float(rank)))
            assert group.all_reduce(torch.ones(3)).tolist() == [float(world_size)] * 3


@pytest.mark.guarantee("D69")
def test_refusals_wait_for_nobody(ranks4: RankPool) -> None:
    """A rank may refuse calls to which no other rank has come, and goes on; each is told in its own call."""
    ranks4.run(refuse_in_turn)


def refuse_behind(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        handles = [group.all_reduce(torch.full((300_000,), float(step)), async_op=True) for step in range(4)]
        if rank == 0:
            with pytest.raises(UsageError):
                group.all_reduce("tensor", async_op=True)  # type: ignore[call-overload]
            last = group.all_reduce(torch.tensor(5.0), async_op=True)
        else:
            refused = group.all_reduce(torch.ones(2), async_op=True)
            last = group.all_reduce(torch.tensor(5.0), async_op=True)
            with pytest.raises(DisagreementError, match="rank 0 refused all_reduce"):
                refused.wait()
        assert [handle.wait()[0].item() for handle in handles] == [2.0 * step for step in range(4)]
        assert last.wait().item() == 10.0


@pytest.mark.guarantee("D69")
def test_a_refused_asynchronous_call_keeps_its_place(ranks2: RankPool) -> None:
    """It takes its number behind the calls that were open, and before those that follow."""
    ranks2.run(refuse_behind)


def refuse_without_a_thread(rank: int, world_size: int, directory: Path) -> None:
    """Let rank 0 make its first asynchronous call where this process can have no further thread."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 0:
            refused = mock.patch.object(
                DaemonThread, "start", side_effect=RuntimeError("can't start new thread")
            )
            with refused, pytest.raises(CapabilityError, match="can't start new thread"):
                group.all_reduce(torch.ones(4), async_op=True)
        else:
            with pytest.raises(
                DisagreementError, match="rank 0 refused all_reduce: no thread could be started"
            ):
                group.all_reduce(torch.ones(4), async_op=True).wait()
        assert group.all_reduce(torch.full((4,), 2.0), async_op=True).wait()[0].item() == 2.0 * world_size


@pytest.mark.guarantee("D69")
def test_a_call_for_which_there_is_no_thread_is_refused_on_all_ranks(ranks2: RankPool) -> None:
    """It takes its number, and the next call of this rank is not taken for it."""
    ranks2.run(refuse_without_a_thread)


@pytest.fixture(scope="module")
def ranks3() -> Iterator[RankPool]:
    """Three processes: the root of a gather, one that refuses, and one that does neither."""
    with RankPool(3, brief=True) as pool:
        yield pool


UNSENDABLE: Any = lambda: None  # noqa: E731 - an object of a type that cannot be encoded
WRONG_PARTS: dict[str, tuple[Call, Call]] = {
    "gather_object: object": (
        lambda group: group.gather_object(group.rank),
        lambda group: group.gather_object({"deep": [UNSENDABLE]}),
    ),
    "gather_object: destination": (
        lambda group: group.gather_object(group.rank),
        lambda group: group.gather_object(group.rank, 77),
    ),
    "gather_object: deadline": (
        lambda group: group.gather_object(group.rank),
        lambda group: group.gather_object(group.rank, timeout_s=-1.0),
    ),
    "scatter_object_list: object": (
        lambda group: group.scatter_object_list([None], [0, 1, 2], 2),
        lambda group: group.scatter_object_list([None], [0, {"deep": UNSENDABLE}, 2], 2),
    ),
    "scatter_object_list: too few": (
        lambda group: group.scatter_object_list([None], [0, 1, 2], 2),
        lambda group: group.scatter_object_list([None], [0, 1], 2),
    ),
    "scatter_object_list: source": (
        lambda group: group.scatter_object_list([None], [0, 1, 2], 2),
        lambda group: group.scatter_object_list([None], [0, 1, 2], -7),
    ),
}


def refuse_part(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let the last rank refuse the second of four calls, for which some others wait: the root, or all."""
    good, wrong = WRONG_PARTS[name]
    call = name.partition(":")[0]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        for step in range(4):
            if step == 1 and rank == world_size - 1:
                with pytest.raises(UsageError) as own:
                    wrong(group)
                assert "1]" not in str(own.value)  # no place in a message that the caller does not know
            elif step == 1 and (rank == 0 or call == "scatter_object_list"):
                with pytest.raises(
                    DisagreementError, match=f"rank {world_size - 1} refused {call}: "
                ) as told:
                    good(group)
                assert list(told.value.views) == [world_size - 1]
            elif call == "gather_object":
                assert good(group) == ([0, 1, 2] if rank == 0 else None)
            else:
                assert good(group) == rank
        assert group.all_gather_object(rank) == [0, 1, 2]


@pytest.mark.guarantee("G38")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", WRONG_PARTS)
def test_a_refused_part_is_told_to_those_that_wait_for_it(ranks3: RankPool, name: str, apart: bool) -> None:
    """They raise with rank and reason, on one host and on several; every later call has the right result."""
    (ApartPool(ranks3) if apart else ranks3).run(refuse_part, name)


def refuse_as_the_receiver(rank: int, world_size: int, directory: Path) -> None:
    """Let the ranks refuse calls in which the others send to them, or name different roots."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 0:
            with pytest.raises(UsageError):
                group.gather_object(0, timeout_s=-1.0)
        else:
            group.gather_object("dropped")
        assert group.gather_object(rank) == ([0, 1, 2] if rank == 0 else None)
        if rank == 1:
            with pytest.raises(UsageError):
                group.scatter_object_list([])
        else:
            assert group.scatter_object_list([None], ["dropped"] * 3) == "dropped"
        assert group.scatter_object_list([None], [0, 1, 2]) == rank
        # Rank 1 sends its part to rank 2, which is told in its next gather, as rank 0 is in this one.
        if rank == 0:
            with pytest.raises(
                DisagreementError, match="rank 1 sent its part of call #4, and none of this one"
            ):
                group.gather_object("part")
        else:
            group.gather_object("part", 2 if rank == 1 else 0)
        assert group.gather_object(rank) == ([0, 1, 2] if rank == 0 else None)
        if rank == 2:
            with pytest.raises(
                DisagreementError, match="rank 1 sent its part of call #3, in which this rank"
            ):
                group.gather_object(rank, 2)
        else:
            group.gather_object(rank, 2)
        assert group.gather_object(rank, 2) == ([0, 1, 2] if rank == 2 else None)


@pytest.mark.guarantee("G38")
@pytest.mark.parametrize("apart", [False, True])
def test_what_was_sent_for_a_refused_call_is_dropped(ranks3: RankPool, apart: bool) -> None:
    """A receiver that refuses its call tells nobody, and gets the right objects in its next one."""
    (ApartPool(ranks3) if apart else ranks3).run(refuse_as_the_receiver)
