"""A rank that was stopped while the others have gone on: it is told so, whatever it does, and disturbs nobody."""

import pytest

from tests.rebuild_cycles import Crowd

GROUPS = ("world", "dp", "ep", "rdp")
"""Groups of all ranks, each with a state of its own: what the rank does first in each is its first call."""


def started(crowd: Crowd) -> list[int]:
    members = [crowd.spawn() for _ in range(3)]
    for rank, number in enumerate(members):
        crowd.tell(number, "start", rank, 3)
    for number in members:
        crowd.answer(number)
    return members


@pytest.mark.guarantee("E3")
@pytest.mark.parametrize(
    "calls",
    [
        ("barrier", "all_reduce", "broadcast_object", "recv"),
        pytest.param(
            ("all_gather_object", "send", "recv_object", "create_mq_broadcaster"), marks=pytest.mark.thorough
        ),
        pytest.param(
            ("all_reduce of 1 MiB", "broadcast_tensor_dict", "send_object", "barrier"),
            marks=pytest.mark.thorough,
        ),
        ("dequeue", "enqueue"),
    ],
    ids=", ".join,
)
def test_every_call_of_a_stopped_rank_says_that_it_is_excluded(calls: tuple[str, ...]) -> None:
    """Its first call in a group, the next one, and those with which it would change members."""
    with Crowd() as crowd:
        *others, stopped = started(crowd)
        crowd.ask([*others, stopped], "use", 1)
        crowd.ask([*others, stopped], "make_queues", *GROUPS[:2], 2)
        crowd.stop(stopped)
        assert crowd.ask(others, "give_up") == [[0, 2, 1, [2]], [1, 2, 1, [2]]]
        crowd.resume(stopped)
        for call, group in zip(calls, GROUPS, strict=False):
            crowd.tell(stopped, "stray", call, group)
            crowd.ask(others, "use", 2)
            first, second, text = crowd.answer(stopped)
            assert (first, second) == ("ExcludedError", "ExcludedError"), f"{call}: {text}"
            assert "the others have gone on without this rank, as members [0, 1] of epoch 1" in text
        assert crowd.ask([stopped], "fail") == ["ExcludedError"]
        assert crowd.ask([stopped], "plan") == ["ExcludedError"]
        crowd.ask(others, "use", 3)
        crowd.end([stopped])
        crowd.ask(others, "use", 4)
        crowd.end(others)


@pytest.mark.thorough
@pytest.mark.guarantee("E3")
@pytest.mark.parametrize("call", ["recv", "recv_object", "dequeue"])
def test_a_call_in_which_the_rank_was_stopped_says_so_too(call: str) -> None:
    """It waits for rank 0 when it is stopped; when it runs again, the others have left the group."""
    with Crowd() as crowd:
        *others, stopped = started(crowd)
        crowd.ask([*others, stopped], "make_queues", *GROUPS[:2], 2)
        crowd.tell(stopped, "stray", call, "dp")
        crowd.see_asleep(stopped)
        crowd.stop(stopped)
        crowd.ask(others, "give_up")
        crowd.resume(stopped)
        first, second, text = crowd.answer(stopped)
        assert (first, second) == ("ExcludedError", "ExcludedError"), text
        crowd.ask(others, "use", 1)
        crowd.end([*others, stopped])
