"""Where ranks are, packed for the store, and what follows from it."""

import zlib
from random import Random
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.bootstrap.agreement.views import (
    Place,
    Places,
    View,
    Views,
    read_view,
    unable,
    write_view,
)
from shm_broadcast.errors import CapabilityError
from shm_broadcast.liveness import this_process


def view(host: int, address: str = "", memory: str = "", namespace: int = 1) -> View:
    process = msgspec.structs.replace(
        this_process(), boot_id=f"boot-{host}", hostname=f"node-{host}", network_namespace=namespace
    )
    return View({}, process, address or f"10.0.0.{host + 1}", memory or f"memory-{host}")


def views_of(rank: int, views: list[View]) -> Views:
    own = views[rank].process.boot_id
    near = {other: each for other, each in enumerate(views) if each.process.boot_id == own}
    return Views(rank, range(len(views)), near, Places.of(views))


places = st.builds(Place, st.integers(0, 4), st.integers(0, 9), st.integers(0, 9), st.booleans())


@given(st.lists(places, max_size=40))
def test_places_arrive_as_they_were(found: list[Place]) -> None:
    """Any placement is packed and unpacked unchanged."""
    names = [f"node-{kernel}" for kernel in range(5)]
    packed = Places.decode(Places(found, names).encode())
    assert list(packed) == found
    assert list(packed.hostnames) == names


host_names = st.one_of(
    st.sampled_from(
        ["a9", "a10", "a09", "a010", "a9.b1", "a10.b1", "a9.b2", "9", "10", "", ".", "a", "٩", "1" * 64]
    ),
    st.text(max_size=70),
)


@given(st.lists(host_names, max_size=12))
def test_names_of_hosts_arrive_as_they_were(names: list[str]) -> None:
    """Whether they are numbered one behind the other or not."""
    places = [Place(kernel, 0, 0, False) for kernel in range(len(names))]
    assert list(Places.decode(Places(places, names).encode()).hostnames) == names


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"abc",
        Places([Place(3, 0, 0, False)], ["one"]).encode(),
        zlib.compress(b"[[null],[0],[0],[0],[0]]"),
        zlib.compress(b'[["one",null],[0],[0],[0],[0]]'),
        zlib.compress(b'[["%s",null],[0],[0],[0],[0]]' % (b"1" * 5000)),
    ],
)
def test_damaged_places_are_refused(packed: bytes) -> None:
    """A value that no rank has written is an error of its own type."""
    with pytest.raises(msgspec.MsgspecError):
        Places.decode(packed)


def test_regular_places_of_many_ranks_take_little_room() -> None:
    """10,000 ranks, eight on each of 1,250 hosts that are numbered, or have random names, which are most of it."""
    assert len(Places.of(view(rank // 8) for rank in range(10_000)).encode()) < 300
    assert len(Places.of(view(rank // 8) for rank in range(1000)).encode()) < 150
    places, names = Places.of(view(rank // 8) for rank in range(10_000)), Random(1)
    named = Places(places, [f"pod-{names.getrandbits(20):05x}" for _ in range(1250)])
    assert len(named.encode()) < 6000


@pytest.mark.guarantee("D92")
def test_a_view_takes_less_than_300_bytes_for_each_rank_on_the_host() -> None:
    """It arrives as it was, without its facts."""
    own = msgspec.structs.replace(view(1, "10.200.100.100", "m" * 32), digest="d" * 32, nonce="n" * 16)
    place = {"boot_id": str(UUID(int=1)), "hostname": "node-00001", "pid": 1 << 22, "start_ticks": 1 << 40}
    own = msgspec.structs.replace(own, process=msgspec.structs.replace(own.process, **place))
    # Of eight groups, for none of which this rank offers memory.
    own = msgspec.structs.replace(own, note=msgspec.json.encode([b""] * 8).decode())
    written = write_view(msgspec.structs.replace(own, facts={"groups": "x" * 1000}))
    assert read_view(written.encode()) == own
    assert len(written) < 300


def test_ranks_of_one_host_listen_on_loopback() -> None:
    """Others need the address that the rank announced."""
    alone = [view(0), view(0)]
    assert views_of(0, alone).listening_address("127.0.0.1") == "127.0.0.1"
    apart = [view(0), view(1)]
    assert views_of(1, apart).listening_address("127.0.0.1") == "10.0.0.2"
    # Two containers of one host share no loopback.
    containers = [view(0, namespace=1), view(0, namespace=2)]
    assert views_of(0, containers).listening_address("127.0.0.1") == "10.0.0.1"


def test_a_loopback_address_that_others_cannot_reach_is_refused_by_all() -> None:
    """Whoever knows the addresses adds them."""
    views = [view(0), view(1, "127.0.0.1"), view(1)]
    texts = []
    for rank in range(3):
        with pytest.raises(CapabilityError) as caught:
            views_of(rank, views).listening_address("127.0.0.1")
        texts.append(str(caught.value))
    assert all("rank 1 on host node-1 announced a loopback address" in text for text in texts)
    assert all("which rank 0 on host node-0" in text for text in texts)
    assert "(127.0.0.1)" in texts[1]


def test_a_part_of_the_ranks_is_known_as_the_whole_is() -> None:
    """Only ranks of the part count: whether they share memory, who is watched, and what is said of others."""
    views = [view(0), view(0), view(1)]
    known = views_of(0, views)
    assert not known.share_memory
    assert known.of([0, 1]).share_memory
    assert known.of([0, 2]).ranks == (0, 2)
    watch = known.watch()
    try:
        assert watch.describe(2) == "on host node-1, state not visible from here"
        assert watch.describe(7) == "no process known"
    finally:
        watch.close()


def test_a_rank_that_cannot_watch_is_unable_only_beside_others() -> None:
    """Of those that cannot, the first one counts that has another rank on its kernel and in its PID namespace."""
    alone, first, second = (
        msgspec.structs.replace(view(host), refusal="pidfd_open failed") for host in (0, 1, 1)
    )
    assert unable({0: alone, 1: view(1)}) is None
    assert unable({0: alone, 3: second, 2: first}) == 2
    assert unable({0: alone, 3: second, 2: view(1)}) == 3
    apart = msgspec.structs.replace(
        second, process=msgspec.structs.replace(second.process, pid_namespace=1 + first.process.pid_namespace)
    )
    assert unable({2: first, 3: apart}) is None
    assert read_view(write_view(first).encode()).refusal == "pidfd_open failed"
