"""Threads of one rank that use a group at the same time: one waits for the other."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import DisagreementError, GroupCoordinator, UsageError
from tests.harness import RankPool
from tests.waiting import wait_until
from tests.worlds import LARGE, ApartPool, meet, new_group, outcome_of, tell_when_waiting, world

CALLS: dict[str, Callable[[GroupCoordinator, float | None], Any]] = {
    "all_reduce": lambda group, limit_s: group.all_reduce(torch.tensor([2.0]), timeout_s=limit_s).tolist(),
    "all_reduce_": lambda group, limit_s: group.all_reduce_(torch.tensor([2.0]), timeout_s=limit_s).tolist(),
    "all_gather": lambda group, limit_s: group.all_gather(torch.tensor([2.0]), timeout_s=limit_s).tolist(),
    "broadcast": lambda group, limit_s: group.broadcast(torch.tensor([2.0]), timeout_s=limit_s).tolist(),
    "barrier": lambda group, limit_s: group.barrier(timeout_s=limit_s),
}
RESULTS = {
    "all_reduce": [4.0],
    "all_reduce_": [4.0],
    "all_gather": [2.0, 2.0],
    "broadcast": [2.0],
    "barrier": None,
}


def in_turn(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let two threads of rank 0 make a call each while rank 1 is away; rank 1 makes both in one thread."""
    # Barriers and tensors have a plane each: a call waits only for one on its own plane.
    begin = "barrier" if name == "barrier" else "all_reduce"
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 1:
            meet(rank, range(world_size), directory, "both wait")
            assert CALLS[begin](group, None) == RESULTS[begin]
            assert CALLS[name](group, None) == RESULTS[name]
            return
        first: list[Any] = []
        tell_when_waiting(group, directory, "first waits")
        thread = threading.Thread(target=lambda: first.append(CALLS[begin](group, None)))
        thread.start()
        wait_until((directory / "first waits-0").exists, "the first thread waits")
        start = time.monotonic()
        with pytest.raises(UsageError, match=f"^{name} .*another thread of this rank is in a collective"):
            CALLS[name](group, 0.3)
        assert 0.3 <= time.monotonic() - start < 5.0
        second: list[Any] = []
        other = threading.Thread(target=lambda: second.append(CALLS[name](group, None)))
        other.start()
        time.sleep(0.1)  # it may also come later, but usually waits by now
        meet(rank, range(world_size), directory, "both wait")
        thread.join()
        other.join()
        assert (first, second) == ([RESULTS[begin]], [RESULTS[name]])


@pytest.mark.guarantee("D66")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_second_thread_waits_for_its_turn(ranks2: RankPool, name: str) -> None:
    """It is made when the first thread's call is done; its deadline passes meanwhile, and leaves the group intact."""
    ranks2.run(in_turn, name)


REFUSED: dict[str, Callable[[GroupCoordinator], Any]] = {
    "all_reduce": lambda group: group.all_reduce("tensor"),  # type: ignore[call-overload]
    "barrier": lambda group: group.barrier(-1.0),
}


def refuse_beside(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let a second thread of rank 0 refuse two calls while the first is in one; then rank 1 makes all three."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 1:
            meet(rank, range(world_size), directory, "refused")
            assert CALLS[name](group, None) == RESULTS[name]
            for _ in range(2):
                with pytest.raises(DisagreementError, match=f"rank 0 refused {name}: ") as told:
                    CALLS[name](group, None)
                assert list(told.value.views) == [0, 1]
        else:
            first: list[Any] = []
            tell_when_waiting(group, directory, "first waits")
            thread = threading.Thread(target=lambda: first.append(CALLS[name](group, None)))
            thread.start()
            wait_until((directory / "first waits-0").exists, "the first thread waits")
            for _ in range(2):
                with pytest.raises(UsageError):
                    REFUSED[name](group)
            # A turn that did not come is no call: it takes no number.
            with pytest.raises(UsageError, match=f"^{name} .*another thread of this rank is in a collective"):
                CALLS[name](group, 0.1)
            meet(rank, range(world_size), directory, "refused")
            thread.join()
            assert first == [RESULTS[name]]
        for step in range(3):
            assert group.all_reduce(torch.tensor(float(step))).item() == 2.0 * step
            assert group.all_gather_object(step) == [step] * world_size


@pytest.mark.guarantee("D66")
@pytest.mark.guarantee("D69")
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_beside_a_call_of_another_thread_takes_the_next_number(ranks2: RankPool, name: str) -> None:
    """The other rank raises in the same calls, with the reason; every later call has the right result."""
    ranks2.run(refuse_beside, name)


def one_after_the_other(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        results: list[float] = []

        def call(step: int) -> None:
            results.append(group.all_reduce(torch.tensor(float(step))).item())
            group.barrier()

        for step in range(20):
            thread = threading.Thread(target=call, args=(step,))
            thread.start()
            thread.join()
        assert results == [2.0 * step for step in range(20)]


@pytest.mark.guarantee("D66")
def test_successive_calls_may_come_from_different_threads(ranks2: RankPool) -> None:
    """No thread owns a group."""
    ranks2.run(one_after_the_other)


class Messages:
    """The long message number `value` by one kind of call: how rank 0 moves it, and how rank 1 does."""

    def __init__(self, kind: str) -> None:
        """Use calls of `kind`: of objects, tensors or tensor dicts."""
        self.kind = kind

    def send(self, group: GroupCoordinator, value: int, limit_s: float | None = None) -> None:
        """Send it to the other rank; it is longer than any buffer between them."""
        peer, tensor = 1 - group.rank_in_group, torch.full((LARGE,), value, dtype=torch.uint8)
        if self.kind == "object":
            group.send_object(bytes([value]) * LARGE, peer, timeout_s=limit_s)
        elif self.kind == "tensor":
            group.send(tensor, peer, timeout_s=limit_s)
        else:
            group.send_tensor_dict({"x": tensor}, peer, timeout_s=limit_s)

    def recv(self, group: GroupCoordinator, limit_s: float | None = None) -> int:
        """Receive one from the other rank; return its number."""
        peer = 1 - group.rank_in_group
        if self.kind == "object":
            return int(group.recv_object(peer, timeout_s=limit_s)[-1])
        if self.kind == "tensor":
            return int(group.recv((LARGE,), torch.uint8, peer, timeout_s=limit_s)[-1])
        found: Any = group.recv_tensor_dict(peer, timeout_s=limit_s)
        return int(found["x"][-1])


KINDS = ("object", "tensor", "tensor dict")


def queue(rank: int, world_size: int, directory: Path, kind: str, is_sending: bool, has_time: bool) -> None:
    """Let a thread of rank 0 wait for rank 1 in a message, and another one queue behind it."""
    messages = Messages(kind)
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:

        def move(value: int, limit_s: float | None = None) -> int:
            if is_sending == (rank == 0):
                messages.send(group, value, limit_s)
                return value
            return messages.recv(group, limit_s)

        if rank == 1:
            meet(rank, range(world_size), directory, "both wait")
            if has_time:
                assert [move(1), move(2)] == [1, 2]
                assert group.all_gather_object(rank) == [0, 1]
            else:
                assert failure(outcome_of(lambda: move(1))) == ("CommTimeoutError", [1])
            return
        found: list[dict[str, Any]] = []
        tell_when_waiting(group, directory, "first waits")
        first = threading.Thread(target=lambda: found.append(outcome_of(lambda: move(1))))
        first.start()
        wait_until((directory / "first waits-0").exists, "the first thread waits")
        if has_time:
            values: list[int] = []
            second = threading.Thread(target=lambda: values.append(move(2, 60.0)))
            second.start()
            time.sleep(0.1)  # it may also come later, but usually waits by now
            meet(rank, range(world_size), directory, "both wait")
            first.join()
            second.join()
            assert (found[0]["value"], values) == (1, [2]), found
            assert group.all_gather_object(rank) == [0, 1]
            return
        late = outcome_of(lambda: move(2, 0.5))
        assert failure(late) == ("CommTimeoutError", [1])
        # The message of 64 MiB is made within this time, too.
        assert 0.5 <= late["seconds"] < 8.0
        first.join(8.0)
        assert [failure(each) for each in found] == [("CommTimeoutError", [1])]
        assert failure(outcome_of(lambda: move(3))) == ("GroupBrokenError", [])
        meet(rank, range(world_size), directory, "both wait")


def failure(outcome: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the type of a call's error, and whom it names."""
    return outcome["kind"], outcome["missing"]


@pytest.mark.guarantee("D6")
@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host each"])
@pytest.mark.parametrize("is_sending", [True, False], ids=["sends", "receives"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_queued_message_whose_deadline_passes_names_the_rank_that_is_away(
    ranks2: RankPool, kind: str, is_sending: bool, apart: bool
) -> None:
    """It waits behind the first thread's for its own deadline; then both end, as the group breaks on every rank."""
    (ApartPool(ranks2) if apart else ranks2).run(queue, kind, is_sending, False, timeout_s=60.0)


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host each"])
@pytest.mark.parametrize("is_sending", [True, False], ids=["sends", "receives"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_queued_message_moves_behind_that_of_the_first_thread(
    ranks2: RankPool, kind: str, is_sending: bool, apart: bool
) -> None:
    """When the other rank comes within the deadline, it gets both messages whole, and the group is intact."""
    (ApartPool(ranks2) if apart else ranks2).run(queue, kind, is_sending, True, timeout_s=60.0)


def gather_behind(rank: int, world_size: int, directory: Path) -> None:
    """Let two threads of rank 0 gather objects, of which rank 1 has sent both of its own and rank 2 none."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 1:
            for _ in range(2):
                group.gather_object(rank)
        meet(rank, range(world_size), directory, "sent")
        if rank == 0:
            found: list[dict[str, Any]] = []
            tell_when_waiting(group, directory, "first waits")
            first = threading.Thread(
                target=lambda: found.append(outcome_of(lambda: group.gather_object(rank)))
            )
            first.start()
            wait_until((directory / "first waits-0").exists, "the first thread waits")
            late = outcome_of(lambda: group.gather_object(rank, timeout_s=1.0))
            first.join()
            assert [failure(each) for each in (late, *found)] == [("CommTimeoutError", [2])] * 2
            assert late["seconds"] >= 1.0
        meet(rank, range(world_size), directory, "over")


@pytest.mark.guarantee("D6")
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host each"])
def test_a_gather_behind_that_of_another_thread_names_the_rank_for_which_both_wait(apart: bool) -> None:
    """Not the first rank of which it has nothing: that one's object is there, for when the first gather is over."""
    with RankPool(3, brief=True) as pool:
        (ApartPool(pool) if apart else pool).run(gather_behind, timeout_s=60.0)
