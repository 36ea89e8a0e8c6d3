"""How often one rank asks the store while groups over two hosts are created, whether the last rank is late or not."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.bootstrap.methods import address
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from coordinator.settings import CoordinatorSettings
from tests.hosts import report, run_on_two_hosts
from tests.probes import requires
from tests.worlds import new_group

pytestmark = [pytest.mark.thorough, requires("network_namespaces")]

MOST = 12
# The hosts of this test have one kernel, so each of four ranks gets the views of all.
MOST_BYTES = 1024 + 300 * 4
# Keys that belong to no agreement.
APART = ["/created/", "/heartbeats/"]
# Of the groups that a rank creates at once, one has ranks on both hosts: a mesh for each of its planes.
MESHES = 2
LATE_S = 2.5
CREATIONS = ["the world", "the group of the world", "the groups of a layout", "one more group"]


def size_of(answer: object) -> int:
    if isinstance(answer, list):
        return sum(map(size_of, answer))
    return len(answer) if isinstance(answer, bytes) else 8


def counted(name: str) -> Callable[..., Any]:
    """Return a method that passes an operation on, and notes it with its first key and the bytes of the answer."""

    def ask(self: "CountedStore", *args: Any) -> Any:
        first = args[0] if isinstance(args[0], str) else args[0][0]
        noted: list[Any] = [name, first, 0]
        self.asked.append(noted)
        answer = getattr(self.store, name)(*args)
        noted[2] = size_of(answer)
        return answer

    return ask


class CountedStore(dist.Store):
    """A store that notes what is asked, by Gloo's threads too: C++ finds the methods of a store in Python."""

    def __init__(self, store: Any, asked: list[list[Any]], kept: list["CountedStore"]) -> None:
        super().__init__()
        self.store = store
        self.asked = asked
        self.kept = kept
        # A store of torch's that wraps this one keeps the half of it that is in C++ only.
        kept.append(self)

    set, get, add, check = counted("set"), counted("get"), counted("add"), counted("check")
    wait, append, compare_set = counted("wait"), counted("append"), counted("compare_set")
    multi_get, multi_set = counted("multi_get"), counted("multi_set")

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> "CountedStore":
        return CountedStore(self.store.clone(), self.asked, self.kept)


class Count:
    """What this rank asks in each creation."""

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []
        self.found: dict[str, Any] = {}
        kept: list[CountedStore] = []
        connect = vars(address)["open_tcp_store"]

        def connect_counted(*args: Any, **more: Any) -> CountedStore:
            return CountedStore(connect(*args, **more), self.asked, kept)

        vars(address)["open_tcp_store"] = connect_counted

    def create(self, names: Sequence[str], create: Callable[[], Any], late_s: float) -> Any:
        """Create what has these names, with one rank late. Of two, the second begins with a group's name."""
        self.asked.clear()
        start = time.monotonic()
        time.sleep(late_s)
        made = create()
        took_s = time.monotonic() - start
        keys = [key for _, key, _ in self.asked]
        first = next((place for place, key in enumerate(keys) if "/created/" in key), 0)
        parts = [self.asked[:first], self.asked[first:]] if len(names) == 2 else [list(self.asked)]
        for name, part in zip(names, parts, strict=True):
            self.found[name] = {"asked": part, "took_s": took_s}
        return made


def main(directory: Path, late: str, rank: int) -> None:
    """Be one of four ranks, of which the last is late for each creation."""
    count, late_s = Count(), float(late) if rank == 3 else 0.0
    interface = "near" if rank < 2 else "far"
    settings = CoordinatorSettings.resolve({}, interface=interface)
    count.create(
        CREATIONS[:2],
        lambda: init_distributed_environment(
            4, rank, "tcp://10.77.0.1:29511", backend="gloo", settings=settings
        ),
        late_s,
    )
    world = get_world_group()
    world.barrier()
    count.create(CREATIONS[2:3], lambda: initialize_model_parallel(2, 2), late_s)
    world.barrier()
    with count.create(CREATIONS[3:], lambda: new_group(world, interface=interface), late_s) as group:
        group.barrier()
    destroy_distributed_environment()
    report(directory, rank, count.found)


def is_of_torch(key: str) -> bool:
    """Return whether Gloo asks for it: addresses of the world's process group, or of one of our groups."""
    return "/process_groups/" in key or key.startswith("0//cpu//")


@pytest.mark.guarantee("D92")
@pytest.mark.guarantee("D94")
@pytest.mark.parametrize("late_s", [0.0, LATE_S])
def test_a_rank_asks_at_most_twelve_things_to_create_groups(late_s: float) -> None:
    """Joining the world, its group, all groups of a layout and one more group: each at most 12 operations per rank.

    Counted is each call of a method of torch's store, whoever makes it on the rank: for names, the agreement, the links
    to other hosts. For each second that the creation takes, one more is allowed. Counted apart are, by their keys, the
    operations of Gloo, three for each mesh, and those of the lazy world as it connects; and looks for a failure of
    another rank, ten a second while connections are opened, of which none is made before the ranks agree.

    In an agreement each rank but the one that ends it receives at most 1 KB and 300 bytes for each rank on its kernel.
    """
    ranks = run_on_two_hosts(__name__, str(late_s))
    for rank, found in enumerate(ranks):
        assert list(found) == CREATIONS
        for name, creation in found.items():
            asked = [tuple(each) for each in creation["asked"] if not is_of_torch(each[1])]
            looks = [each for each in asked if each[1].endswith("/failure_record")]
            ours = [each for each in asked if each not in looks]
            assert 5 <= len(ours) <= MOST + int(creation["took_s"]), (rank, name, ours)
            agreed = next(place for place, each in enumerate(asked) if each[1].endswith("/outcome"))
            assert not set(looks) & set(asked[:agreed]), (rank, name, asked)
            if not any(kind == "compare_set" and key.endswith("/outcome") for kind, key, _ in ours):
                agreement = [each for each in ours if not any(part in each[1] for part in APART)]
                assert sum(received for *_, received in agreement) <= MOST_BYTES, (rank, name, ours)
            meshes = [each for each in creation["asked"] if "/process_groups/" in each[1]]
            assert len(meshes) == (0 if name == CREATIONS[0] else 3 * MESHES), (rank, name, meshes)
            if rank < 3:
                assert creation["took_s"] >= late_s
