"""Between hosts, and over plain Gloo, a refused call is told, and never combined with another one."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coordinator import DisagreementError, GroupBrokenError, GroupCoordinator, NativeError, UsageError
from device_comm.process_group import ProcessGroupCommunicator
from tests.harness import RankPool
from tests.multiproc.coordinator.test_refused_calls import CALLS, Call
from tests.waiting import wait_until
from tests.worlds import ApartPool, HostsPool, meet, new_group, tell_when_waiting, world

# Those that go different ways between hosts: in two levels, over Gloo as tensors, and over Gloo on the host plane.
BETWEEN_HOSTS = [
    *("all_reduce", "async all_reduce", "broadcast", "all_to_all", "gather", "scatter"),
    *("of the group's all_to_all_single: all_to_all_into_output", "dispatch", "barrier", "all_gather_object"),
    *("create_mq_broadcaster", "create_single_reader_mq_broadcasters", "split_group"),
]
# What must happen soon may take this long on a busy machine.
SOON_S = 20.0


@pytest.fixture(scope="module")
def ranks3() -> Iterator[RankPool]:
    """Three processes on two hosts: two that wait, and one that refuses."""
    with RankPool(3, brief=True) as pool:
        yield pool


def refuse_between_hosts(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let all ranks refuse a call, and then rank 1 alone; it goes on with the next call."""
    good, wrong = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        with pytest.raises(UsageError):
            wrong(group)
        assert group.all_gather_object(rank) == [0, 1]
        if rank == 1:
            with pytest.raises(UsageError):
                wrong(group)
        with pytest.raises(GroupBrokenError if rank else DisagreementError, match=f"rank 1 refused {name}: "):
            group.all_gather_object("next") if rank == 1 else good(group)
        with pytest.raises(GroupBrokenError):
            group.all_gather_object(rank)


def refuse_and_wait(rank: int, world_size: int, directory: Path, name: str) -> str:
    """Let rank 1 refuse a call and make no other one until rank 0 has been told."""
    good, wrong = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        good(group)
        if rank == 1:
            with pytest.raises(UsageError):
                wrong(group)
            meet(rank, range(world_size), directory, "told")
            # What rank 0 has sent for the refused call may come first.
            with pytest.raises((GroupBrokenError, DisagreementError)) as caught:
                good(group)
            return "" if isinstance(caught.value, DisagreementError) else str(caught.value)
        began = time.monotonic()
        with pytest.raises(DisagreementError) as told:
            good(group)
        # Long before the deadline of 300 s.
        assert time.monotonic() - began < SOON_S
        meet(rank, range(world_size), directory, "told")
        assert told.value.views[1].startswith("refused ")
        with pytest.raises(GroupBrokenError):
            good(group)
        return str(told.value)


@pytest.mark.guarantee("D69", "G66")
@pytest.mark.parametrize("name", BETWEEN_HOSTS)
def test_between_hosts_a_refusal_is_told_to_ranks_that_wait(ranks2: RankPool, name: str) -> None:
    """They raise with rank and reason, though the refusing rank makes no other call; it then finds the group broken."""
    refused = f"rank 1 refused {name.rsplit(maxsplit=1)[-1]}: "
    told, own = ApartPool(ranks2).run(refuse_and_wait, name)
    assert refused in told
    assert not own or refused in own


def refuse_beside_a_wait(group: GroupCoordinator, directory: Path, wrong: Call) -> None:
    """On rank 1, refuse a call once rank 0 waits in its next one, which it is about to make."""
    if group.rank == 1:
        wait_until((directory / "waits-0").exists, "the other rank waits")
        with pytest.raises(UsageError):
            wrong(group)
    else:
        tell_when_waiting(group, directory)


def refuse_and_go_on(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let rank 1 refuse a call, to which rank 0 has come, and make it at once when it is the next one."""
    good, wrong = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        good(group)
        refuse_beside_a_wait(group, directory, wrong)
        with pytest.raises((DisagreementError, GroupBrokenError) if rank else DisagreementError):
            good(group)
        with pytest.raises(GroupBrokenError):
            good(group)


@pytest.mark.guarantee("D69", "G66")
@pytest.mark.parametrize("name", BETWEEN_HOSTS)
def test_between_hosts_a_refused_call_is_not_answered_by_the_next(ranks2: RankPool, name: str) -> None:
    """Both ranks raise: a call never takes what another rank brings to the next one, nor ends by it."""
    ApartPool(ranks2).run(refuse_and_go_on, name)


def refuse_together(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let all ranks refuse the same calls, one of them long before the other."""
    good, wrong = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        for step in range(3):
            if rank == step % 2:
                meet(rank, range(world_size), directory, f"refused {step}")
            for _ in range(2):
                with pytest.raises(UsageError):
                    wrong(group)
            if rank != step % 2:
                meet(rank, range(world_size), directory, f"refused {step}")
            good(group)
            group.barrier()
            assert group.all_reduce(torch.tensor(float(step))).item() == step * world_size
            assert group.all_gather_object((rank, step)) == [(0, step), (1, step)]
            parts = group.gather(torch.full((1,), float(rank + step)))
            assert rank or (parts is not None and parts.tolist() == [step, step + 1.0])
            sent = group.all_to_all(torch.tensor([10.0 * rank, 10.0 * rank + 1]))
            assert sent.tolist() == [rank, 10.0 + rank]


def refuse_over_plain_gloo(rank: int, world_size: int, directory: Path, name: str) -> str:
    """As `refuse_and_go_on`, in a group whose tensors go over Gloo alone; return the text of the error."""
    good, wrong = CALLS[name]
    with (
        world(rank, world_size, directory) as everyone,
        GroupCoordinator([everyone.ranks], everyone.local_rank, "gloo", False) as group,
    ):
        assert isinstance(group.device_communicator, ProcessGroupCommunicator)
        good(group)
        for _ in range(2):
            with pytest.raises(UsageError):
                wrong(group)
        good(group)
        refuse_beside_a_wait(group, directory, wrong)
        with pytest.raises(GroupBrokenError if rank else DisagreementError) as told:
            good(group)
        return str(told.value)


@pytest.mark.guarantee("D69")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize(
    "name", ["all_reduce", "reduce_scatter", "broadcast", "gather", "all_to_all", "scatter"]
)
def test_over_plain_gloo_a_refused_call_is_not_answered_by_the_next(
    ranks2: RankPool, name: str, apart: bool
) -> None:
    """No message says to which call it belongs; a call that all ranks refuse changes nothing there either."""
    for text in (ApartPool(ranks2) if apart else ranks2).run(refuse_over_plain_gloo, name):
        assert f"rank 1 refused {name}: " in text


def refuse_one_of_three(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let rank 1 refuse a call in which the others wait, one of them later than the other."""
    good, wrong = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        group.barrier()
        if rank == 1:
            with pytest.raises(UsageError):
                wrong(group)
            meet(rank, range(world_size), directory, "told")
        else:
            time.sleep(0.15 * rank)
            with pytest.raises(DisagreementError, match=f"rank 1 refused {name}: ") as told:
                good(group)
            assert list(told.value.views) == [1]
            meet(rank, range(world_size), directory, "told")
        with pytest.raises((GroupBrokenError, DisagreementError)):
            good(group)


@pytest.mark.guarantee("D69", "G66")
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "barrier", "all_gather_object", "all_to_all"])
def test_all_that_wait_between_hosts_raise_alike(ranks3: RankPool, name: str) -> None:
    """Whoever finds the refusal first breaks the group, and the others still say who has refused the call."""
    HostsPool(ranks3, ["one", "two", "one"]).run(refuse_one_of_three, name)


@pytest.mark.guarantee("D69", "G66")
@pytest.mark.parametrize("name", BETWEEN_HOSTS)
def test_between_hosts_a_call_that_all_ranks_refuse_changes_nothing(ranks2: RankPool, name: str) -> None:
    """It does not matter who refuses first: every later call has the right result."""
    ApartPool(ranks2).run(refuse_together, name)


@pytest.mark.guarantee("G66")
@pytest.mark.parametrize("name", ["all_gather_object", "all_sum"])
def test_between_hosts_a_refused_gather_is_not_answered_by_the_next(ranks2: RankPool, name: str) -> None:
    """Both ranks say who has refused; before, all had refused one."""
    ApartPool(ranks2).run(refuse_between_hosts, name)


def refuse_without_a_store(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let rank 1 refuse a call once it does not reach the store any more, and go on."""
    good, wrong = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        good(group)
        if rank == 1:
            vars(vars(group._health.refusals)["_store"])["_reachable"] = False
            with pytest.raises(UsageError):
                wrong(group)
        with pytest.raises(NativeError, match="out of reach" if rank else "the transport failed"):
            good(group)


@pytest.mark.guarantee("G66")
@pytest.mark.parametrize("name", ["barrier", "all_gather_object"])
def test_a_rank_that_cannot_tell_what_it_refuses_goes_no_further(ranks2: RankPool, name: str) -> None:
    """It neither ends the others' call nor answers it: its next call breaks the group, and says why."""
    ApartPool(ranks2).run(refuse_without_a_store, name)
