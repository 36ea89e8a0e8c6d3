"""A host vanishes without closing a socket: its interface goes down. The ranks of the others name it in every call."""

import gc
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.group import GroupCoordinator
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from tests.host_namespaces import Host, run_on_hosts
from tests.hosts import report
from tests.leaks import Snapshot, leaked_since
from tests.probes import requires
from tests.waiting import wait_until
from tests.worlds import LARGE, meet, new_group, outcome_of, small

pytestmark = requires("network_namespaces")

HOSTS = [Host(name, {"net": [f"10.78.0.{number}/24"]}) for number, name in enumerate("abc", 1)]
RANKS = range(6)
LOST_AFTER_S = 0.8
PROMISED_S = LOST_AFTER_S + 1.0
# On a busy machine a rank runs late; the deadlines of the calls, which would otherwise end them, are a minute.
PROMPT_S = 15.0
DESTROY_S = 2.0
CUT_S = 0.4
STOPPED_S = 3 * LOST_AFTER_S
# What the kernel takes to find a vanished host by itself.
IDLE_S = 5 * LOST_AFTER_S + 12.0
# A network that pauses for less than half of the setting loses nobody.
PATIENT_S, PAUSE_S = 6.0, 1.5
# One more host than those of which each watches all others.
RING = 17
LATE, KEEPALIVES = "barrier long after", "barrier without beats"
BETWEEN_OTHERS = "dequeue from a rank that stays"

Call = Callable[[GroupCoordinator, int], Any]

# The end of a queue that this rank uses in the present scenario.
_end: list[Any] = []


def open_queue(group: GroupCoordinator, name: str, lost: int) -> None:
    """Make the queue of a scenario: from rank `lost` or another one to all others, or from each rank to that one."""
    if name == "dequeue":
        _end[:] = [group.create_mq_broadcaster(lost)]
    elif name == BETWEEN_OTHERS:
        _end[:] = [group.create_mq_broadcaster((lost + 2) % 6)]
    elif name == "enqueue":
        _end[:] = [group.create_single_reader_mq_broadcasters(lost)[0]]


def enqueue_until_full() -> None:
    while True:
        _end[0].enqueue(bytes(LARGE // 64), 60.0)


def read_or_meet(group: GroupCoordinator, writer: int) -> None:
    """Wait for the writer, which sends nothing: it waits for the readers."""
    if group.rank == writer:
        group.barrier()
    else:
        _end[0].dequeue(60.0)


CALLS: dict[str, Call] = {
    "barrier": lambda group, lost: group.barrier(),
    "all_reduce": lambda group, lost: group.all_reduce(small()),
    "large all_reduce": lambda group, lost: group.all_reduce(torch.ones(LARGE // 4)),
    "broadcast_object": lambda group, lost: group.broadcast_object(None, lost),
    "recv": lambda group, lost: group.recv(torch.Size([8]), torch.float32, lost),
    "send": lambda group, lost: group.send(torch.ones(LARGE // 4), lost),
    "recv_object for ever": lambda group, lost: group.recv_object(lost),
    "all_gather": lambda group, lost: group.all_gather(small()),
    "reduce_scatter": lambda group, lost: group.reduce_scatter(torch.ones(12)),
    "all_to_all": lambda group, lost: group.all_to_all(torch.ones(12)),
    "gather": lambda group, lost: (group.gather(small(), (lost + 2) % 6), group.barrier()),
    "gather of much": lambda group, lost: group.gather(torch.ones(LARGE // 4), lost),
    "scatter": lambda group, lost: group.scatter(torch.empty(1), None, lost),
    "send_object": lambda group, lost: group.send_object(bytes(LARGE), lost),
    "broadcast_tensor_dict": lambda group, lost: group.broadcast_tensor_dict(None, lost),
    "send_tensor_dict": lambda group, lost: group.send_tensor_dict({"x": torch.ones(LARGE // 4)}, lost),
    "recv_tensor_dict": lambda group, lost: group.recv_tensor_dict(lost),
    "wait for irecv": lambda group, lost: group.device_communicator.irecv(torch.empty(8), lost).wait(),
    "wait for all_reduce": lambda group, lost: group.all_reduce(small(), async_op=True).wait(),
    "enqueue": lambda group, lost: enqueue_until_full(),
    "dequeue": lambda group, lost: _end[0].dequeue(60.0),
    BETWEEN_OTHERS: lambda group, lost: read_or_meet(group, (lost + 2) % 6),
    LATE: lambda group, lost: group.barrier(),
    KEEPALIVES: lambda group, lost: group.barrier(),
    "create": lambda group, lost: new_group(group, "late", create_timeout_s=60.0),
}
"""What ranks wait in while a host vanishes, of which rank `lost` does not take part."""


@contextmanager
def world(
    port: int, rank: int, size: int = len(RANKS), lost_after_s: float = LOST_AFTER_S
) -> Iterator[GroupCoordinator]:
    settings = CoordinatorSettings.resolve(
        {},
        timeout_s=60.0,
        create_timeout_s=60.0,
        destroy_timeout_s=DESTROY_S,
        remote={"lost_after_s": lost_after_s},
    )
    init_distributed_environment(size, rank, f"tcp://10.78.0.1:{port}", backend="gloo", settings=settings)
    try:
        yield get_world_group()
    finally:
        destroy_distributed_environment()


def cut(state: str) -> float:
    """Set this host's interface up or down; return when."""
    subprocess.run(["ip", "link", "set", "net", state], check=True)
    return time.monotonic()


def lose(group: GroupCoordinator, rank: int, directory: Path, host: int, name: str) -> dict[str, Any]:
    """Let a host vanish while the others wait in a call; return how that ended on this rank, and how much later."""
    found = dict[str, Any]()
    first, place = 2 * host, f"{name} {host}".replace(" ", "-")
    told = directory / f"cut-{place}"
    open_queue(group, name, first)
    meet(rank, RANKS, directory, f"begin-{place}")
    if rank // 2 == host:
        if rank == first:
            time.sleep(CUT_S)
            told.write_text(json.dumps(cut("down")))
        elif name == "barrier":
            found["cut off"] = outcome_of(group.barrier)
        meet(rank, RANKS, directory, f"end-{place}")
        return found
    if name == LATE:
        wait_until(told.exists, "the host vanishes", PROMPT_S)
        time.sleep(IDLE_S)
    started = time.monotonic()
    found = outcome_of(lambda: CALLS[name](group, first))
    ended = time.monotonic()
    found["again"] = outcome_of(group.barrier)["kind"]
    meet(rank, RANKS, directory, f"end-{place}")
    found["late_s"] = ended - max(json.loads(told.read_text()), started)
    return found


def leave(group: GroupCoordinator, rank: int, directory: Path, host: int) -> dict[str, Any]:
    """Let a host vanish while nobody waits; return how long the others take to destroy a group."""
    other, first = new_group(group, "other", destroy_timeout_s=DESTROY_S), 2 * host
    meet(rank, RANKS, directory, f"begin-destroy-{host}")
    if rank == first:
        cut("down")
    meet(rank, RANKS, directory, f"down-{host}")
    found = outcome_of(other.destroy)
    meet(rank, RANKS, directory, f"end-destroy-{host}")
    return found


def beats_of(group: GroupCoordinator) -> Any:
    found = group._parts.world
    assert found is not None
    return found.heartbeats(LOST_AFTER_S)


def run(name: str, host: int, port: int, rank: int, directory: Path) -> dict[str, Any]:
    before = Snapshot.take()
    with world(port, rank) as group:
        group.barrier()
        if name == KEEPALIVES:
            for link in beats_of(group)._links.values():
                link._beats_left = 0  # as if nobody had read them for hours
        if name == "quiet":
            return stay(group, rank, directory)
        act = leave if name == "destroy" else partial(lose, name=name)
        found = act(group, rank, directory, host)
        if rank == 2 * host:
            cut("up")
        meet(rank, RANKS, directory, f"up-{port}")
    del group
    _end.clear()
    gc.collect()
    found["leaks"] = leaked_since(before)
    return found


def pause(port: int, rank: int, directory: Path) -> dict[str, Any]:
    """Let the network of host 2 be silent for a time while the others wait for rank 4."""
    with world(port, rank, lost_after_s=PATIENT_S) as group:
        group.barrier()
        meet(rank, RANKS, directory, "begin-pause")
        if rank == 4:
            cut("down")
            time.sleep(PAUSE_S)
            cut("up")
        found = outcome_of(group.barrier)
        meet(rank, RANKS, directory, "end-pause")
    return found


def lose_in_ring(port: int, rank: int, directory: Path) -> dict[str, Any]:
    """Let the last one of `RING` hosts, with a rank each, vanish, while the others wait for it."""
    ranks, last = range(RING), RING - 1
    with world(port, rank, RING) as group:
        partners = sorted(beats_of(group).names(ranks))
        meet(rank, ranks, directory, "begin-ring")
        if rank == last:
            cut("down")
        found = {} if rank == last else outcome_of(group.barrier)
        meet(rank, ranks, directory, "end-ring")
        if rank == last:
            cut("up")
        meet(rank, ranks, directory, "up-ring")
    return found | {"partners": partners}


def stay(group: GroupCoordinator, rank: int, directory: Path) -> dict[str, Any]:
    """Let ranks 4 and 5 destroy a group, rank 5 be stopped for a time, and then die; return what the others see."""
    found, pids = dict[str, Any](), group.all_gather_object(os.getpid())
    other = new_group(group, "other")
    other.barrier()
    if rank in (4, 5):
        other.destroy()
    meet(rank, RANKS, directory, "left")
    if rank not in (4, 5):
        found["left"] = outcome_of(other.barrier)
        other.destroy()
    for what, number, seconds in (("stopped", signal.SIGSTOP, STOPPED_S), ("killed", signal.SIGKILL, 0.0)):
        meet(rank, RANKS, directory, what)
        if rank == 4:
            os.kill(pids[5], number)
            time.sleep(seconds)
            os.kill(pids[5], signal.SIGCONT)
        if rank == 5 and what == "killed":
            time.sleep(PROMPT_S)
        found[what] = outcome_of(group.barrier)
    return found


def ends(words: str, dead: Collection[int] = ()) -> list[list[dict[str, Any]]]:
    """Run scenarios, such as `barrier/2`, one after the other; return for each what the ranks found."""
    ranks = run_on_hosts(__name__, HOSTS, 2, words, dead=dead)
    return [[each[word] for each in ranks if word in each] for word in words.split(",")]


def assert_named(
    found: list[dict[str, Any]],
    host: int,
    bound_s: float,
    again: str = "GroupBrokenError",
) -> None:
    survivors = [each for each in found if "kind" in each]
    assert len(survivors) == 4
    for each in survivors:
        assert each["kind"] == "PeerLostError", each
        assert each["peers"] == [2 * host, 2 * host + 1], each
        assert each["again"] == again, each
        assert each["late_s"] < bound_s, each
        # torch's wait in a store that has vanished cannot be ended: an agreement's thread stays until its deadline.
        assert each["leaks"] == [] or (again == "PeerLostError" and host == 0), each


@pytest.fixture(scope="module")
def sample() -> list[list[dict[str, Any]]]:
    """Run scenarios in one set of processes, of which rank 5 dies in the last one."""
    return ends("barrier/2,all_reduce/0,wait for all_reduce/2,dequeue/2,quiet/2", dead=[5])


Sample = list[list[dict[str, Any]]]


@pytest.mark.guarantee("V1")
@pytest.mark.guarantee("V2")
def test_a_host_that_vanishes_is_named_by_all_survivors(sample: Sample) -> None:
    """It is named in a barrier, and if it served the world's store in a sum. The deadlines are a minute.

    So it is where a handle is waited for, and in a queue, whose own connection may break first.
    """
    barrier, total, waited, read, _ = sample
    assert_named(barrier, 2, PROMPT_S)
    # Who is cut off names hosts too, with all of their ranks: the one that it notices first, or both at once.
    (cut_off,) = [each["cut off"] for each in barrier if "cut off" in each]
    assert cut_off["kind"] == "PeerLostError"
    assert cut_off["peers"] in ([0, 1], [2, 3], [0, 1, 2, 3])
    assert_named(total, 0, PROMPT_S)
    assert_named(waited, 2, PROMPT_S)
    assert_named(read, 2, PROMPT_S)


@pytest.mark.guarantee("V3")
def test_a_rank_that_leaves_stops_or_dies_is_no_vanished_host(sample: Sample) -> None:
    """Who leaves a group has destroyed it, who is stopped comes late, and who dies is named alone."""
    found = sample[-1]
    survivors = [each for each in found if "left" in each]
    assert len(survivors) == 4
    for each in survivors:
        assert each["left"]["kind"] == "PeerLostError", each
        assert "the group was destroyed by" in each["left"]["text"]
        assert each["stopped"]["kind"] == "NoneType", each
        assert each["stopped"]["seconds"] > 2 * LOST_AFTER_S
        assert (each["killed"]["kind"], each["killed"]["peers"]) == ("PeerLostError", [5]), each
        assert "no answer" not in each["killed"]["text"]


@pytest.mark.thorough
@pytest.mark.guarantee("V3")
def test_a_network_that_pauses_loses_no_host() -> None:
    """The beats that got lost are sent again, and the call goes on."""
    ranks = run_on_hosts(__name__, HOSTS, 2, "pause")
    for each in ranks:
        assert each["pause"]["kind"] == "NoneType", each
    assert ranks[0]["pause"]["seconds"] > PAUSE_S


@pytest.mark.thorough
@pytest.mark.guarantee("V1")
def test_hosts_that_do_not_watch_the_vanished_one_hear_of_it() -> None:
    """Of 17 hosts each watches 14. The two that do not watch the last one read the failure record."""
    hosts = [Host(f"h{number}", {"net": [f"10.78.0.{number}/24"]}) for number in range(1, RING + 1)]
    *survivors, lost = [each["ring"] for each in run_on_hosts(__name__, hosts, 1, "ring")]
    assert [len(each["partners"]) for each in (*survivors, lost)] == [14] * RING
    assert len([each for each in survivors if RING - 1 not in each["partners"]]) == 2
    for each in survivors:
        assert (each["kind"], each["peers"]) == ("PeerLostError", [RING - 1]), each
        assert each["seconds"] < PROMPT_S


@pytest.mark.thorough
@pytest.mark.guarantee("V1")
@pytest.mark.guarantee("V2")
@pytest.mark.parametrize("host", [0, 2])
def test_destroy_waits_for_no_vanished_host(host: int) -> None:
    """Neither for its ranks nor for the store that it served."""
    (found,) = ends(f"destroy/{host}")
    for each in found[: 2 * host] + found[2 * host + 2 :]:
        assert each["kind"] == "NoneType", each
        assert each["seconds"] < DESTROY_S + PROMISED_S, each
        assert each["leaks"] == [], each


@pytest.mark.thorough
@pytest.mark.guarantee("V1")
@pytest.mark.guarantee("V2")
@pytest.mark.parametrize("host", [0, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_vanished_host_is_named_within_a_second_of_its_time(name: str, host: int) -> None:
    """All of its ranks and no others are named in every call, also if the host served the world's store."""
    (found,) = ends(f"{name}/{host}")
    # The group that is not created breaks no other one: that finds the same when it waits.
    bound_s = IDLE_S if name == KEEPALIVES else PROMISED_S
    again = "PeerLostError" if name == "create" else "GroupBrokenError"
    assert_named(found, host, bound_s, again)


APART = {"pause": pause, "ring": lose_in_ring}


def main(directory: Path, words: str, rank: int) -> None:
    """Run one rank in all scenarios, one after the other."""
    found = {}
    for number, word in enumerate(words.split(",")):
        name, _, host = word.partition("/")
        if name in APART:
            found[word] = APART[name](29601 + number, rank, directory)
        else:
            found[word] = run(name, int(host), 29601 + number, rank, directory)
        if rank == 5:  # it may die in the next one
            report(directory, rank, found)
    report(directory, rank, found)
