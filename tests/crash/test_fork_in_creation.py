"""A signal handler forks at any place of a creation: the child goes no further in it, and the parent gets its group."""

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count, product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from coordinator import parallel_state
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups
from coordinator.stateless import create_stateless_group
from shm_broadcast.segment import Handover, Segment, take_over
from shm_broadcast.threads import caller
from tests.crash.test_fork import ended, fork
from tests.handlers import handling_at, handling_where
from tests.harness import RankPool
from tests.ports import free_port
from tests.samples import sampled
from tests.worlds import HostsPool, join_world, outcome_of, small

# A child that goes on in the creation waits for its parent, which waits for it, or for the other rank.
CHILD_S = 10.0
# The child shows where it is, shortly before it is killed.
STACKS_S = 8.0

# For all places of a run together.
RUN_S = 400.0
STRIDE = 61

PRODUCT = tuple(f"/{name}/" for name in ("coordinator", "device_comm", "shm_broadcast"))


def sub_group(_rank: int, _directory: Path, _port: int) -> GroupCoordinator:
    made = parallel_state.get_world_group().create_subgroup([0, 1])
    assert made is not None
    return made


def parallel_groups(_rank: int, _directory: Path, _port: int) -> ParallelGroups:
    return ParallelGroups.from_sizes(tensor_parallel_size=2)


def stateless(rank: int, _directory: Path, port: int) -> GroupCoordinator:
    return create_stateless_group("127.0.0.1", port, rank, 2)


def world(rank: int, directory: Path, _port: int) -> GroupCoordinator:
    join_world(rank, 2, directory)
    return parallel_state.get_world_group()


CREATIONS: dict[str, Callable[[int, Path, int], Any]] = {
    "sub-group": sub_group,
    "parallel groups": parallel_groups,
    "stateless": stateless,
    "world": world,
}


OWN_WORLD = ("stateless", "world")


@contextmanager
def around(kind: str, rank: int, method: str) -> Iterator[None]:
    """Be in a world for those creations that need one."""
    if kind not in OWN_WORLD:
        parallel_state.init_distributed_environment(2, rank, method, backend="gloo")
    yield
    parallel_state.destroy_distributed_environment()


def use(made: Any, kind: str, has_come: bool) -> bool:
    """Use what was created, and destroy it; return whether the place came on any rank."""
    group = made.tp if kind == "parallel groups" else made
    assert group.all_reduce(small()).tolist() == (2 * small()).tolist()
    came = any(group.all_gather_object(has_come))
    if kind == "world":
        group.barrier()
        parallel_state.destroy_distributed_environment()
    else:
        made.destroy()
    return came


def left_by(made: list[Any], error: BaseException | None, kind: str) -> str:
    """Return how the creation has ended in a child: nothing that it has can be used."""
    if not made:
        return repr(error)
    group = made[0].tp if kind == "parallel groups" else made[0]
    return f"{outcome_of(group.barrier)['kind']} in a call"


def fork_at(
    step: int, create: Callable[[], Any], kind: str, directory: Path
) -> tuple[list[Any], bool, list[str]]:
    """Create, and fork at one place. The child goes on and ends first; return what was made and how that went."""
    parent, made, told = os.getpid(), list[Any](), list[str]()
    passed, error = 0, None

    def is_place(frame: FrameType) -> bool:
        nonlocal passed
        # A creation that belongs to nobody yet has asked and made nothing: a fork there is one before it.
        if not passed and kind in OWN_WORLD and caller.forks is None:
            return False
        if not any(part in frame.f_code.co_filename for part in PRODUCT):
            return False
        passed += 1
        if passed == step + 1:
            told.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        return passed == step + 1

    def handle() -> None:
        if not (child := fork()):
            faulthandler.dump_traceback_later(STACKS_S, file=(directory / f"stacks-{step}").open("w"))
            return
        try:
            told.append(str(ended(child, CHILD_S)))
        except AssertionError as hangs:
            told.append(f"{hangs}: {(directory / f'stacks-{step}').read_text()}")

    try:
        has_come = handling_where(is_place, lambda: made.append(create()), handle)
    except BaseException as raised:
        if os.getpid() == parent:
            raise
        error = raised
    if os.getpid() != parent:
        try:
            (directory / f"child-{step}").write_text(left_by(made, error, kind))
            os._exit(0)
        finally:
            os._exit(1)
    print(step, told, flush=True)
    if has_come:
        report = directory / f"child-{step}"
        told.append(report.read_text() if report.exists() else "no word of the child")
    return made, has_come, told


def fork_at_places(
    rank: int, world_size: int, directory: Path, kind: str, forker: int, port: int, first: int, stride: int
) -> list[list[str]]:
    """Create again and again; return the place of each fork, the status of the child, and how it left the call."""
    del world_size
    found, step, has_come = list[list[str]](), first, True
    method = f"tcp://127.0.0.1:{port}" if port else f"file://{directory}/rendezvous"
    with around(kind, rank, method):
        while has_come:

            def create() -> Any:
                return CREATIONS[kind](rank, directory, port)

            if rank == forker:
                made, came, told = fork_at(step, create, kind, directory)
                found += [told] if came else []
            else:
                made, came = [create()], False
            has_come = use(made[0], kind, came)
            step += stride
    return found


def check(found: list[list[str]], at_least: int) -> None:
    assert len(found) >= at_least
    wrong = [each for each in found if each[1] != "0" or not each[2].startswith("UsageError")]
    assert not wrong, "\n".join("\n".join(each) for each in wrong)


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("struck", ["start", "close"])
def test_a_fork_at_any_place_of_an_offer_of_memory_leaves_it_to_the_parent(struck: str) -> None:
    """The child, which has closed its copy of the listener, ends the call without an error, and the parent goes on."""
    key, parent = bytes(32), os.getpid()
    for step in count():
        children = list[int]()

        def struck_or_not(
            call: Callable[[], None], name: str, step: int = step, children: list[int] = children
        ) -> bool:
            if name != struck:
                call()
                return False
            places = ("shm_broadcast/segment.py", "shm_broadcast/threads.py")
            return handling_at(step, call, lambda: children.append(fork()), places)

        try:
            with closing(Segment.create(1 << 12)) as memory:
                offer = Handover(memory, key, {0, 1}, lambda _hello, descriptor: os.close(descriptor))
                has_come = struck_or_not(offer.start, "start")
                if os.getpid() == parent:
                    taken, _, watch = take_over(offer.address, key, 0, 1 << 12, timeout_s=10.0)
                    os.close(watch)
                    taken.close()
                    has_come |= struck_or_not(offer.close, "close")
                offer.close()
        finally:
            if os.getpid() != parent:
                os._exit(int(sys.exc_info()[0] is not None))
        assert offer._thread is not None
        assert not offer._thread.is_alive()
        if not has_come:
            break
        assert ended(children[0]) == 0
    assert step > 5


CASES = list(product(CREATIONS, (0, 1), ("AA", "AB")))


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize(("kind", "forker", "places"), sampled(3, CASES))
def test_a_fork_at_some_places_of_a_creation_leaves_it_to_the_parent(
    ranks2: RankPool, kind: str, forker: int, places: str
) -> None:
    """The child neither asks the store nor comes as this rank: it ends first, with a `UsageError`."""
    port = 0 if kind == "world" else free_port()
    found = HostsPool(ranks2, places).run(
        fork_at_places, kind, forker, port, 50 * forker, 299, timeout_s=RUN_S
    )
    check(found[forker], 3)


@pytest.mark.thorough
@pytest.mark.guarantee("G10")
@pytest.mark.parametrize(("kind", "forker", "places"), CASES)
def test_a_fork_at_many_places_of_a_creation_leaves_it_to_the_parent(
    ranks2: RankPool, kind: str, forker: int, places: str
) -> None:
    """As before; which places these are differs from run to run, since the waits have more and fewer looks."""
    port = 0 if kind == "world" else free_port()
    found = HostsPool(ranks2, places).run(fork_at_places, kind, forker, port, forker, STRIDE, timeout_s=RUN_S)
    check(found[forker], 10)
