"""Where rank 0's name stands for several addresses, it serves at the first that is its own, and ranks try all."""

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.addresses.names import Address
from coordinator.bootstrap import secured as meeting
from coordinator.bootstrap.methods.address import join_address
from coordinator.bootstrap.secured import find_store
from coordinator.security import server as server_module
from coordinator.security.opening import serve_at
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CapabilityError, ClosedError, CommTimeoutError
from tests.leaks import Snapshot, leaked_since
from tests.ports import free_port
from tests.secured import DEADLINE_S, HERE, VALUE, check_nothing, place, served

# Kept for documents: no host has it.
ELSEWHERE = "192.0.2.1"
# Of this host too, where nobody listens.
BESIDE = "127.0.0.9"


@pytest.fixture
def settings(tmp_path: Path) -> CoordinatorSettings:
    """Return settings with a secret."""
    path = tmp_path / "secret"
    path.write_bytes(VALUE)
    path.chmod(0o600)
    return CoordinatorSettings.resolve({}, secret_file=str(path))


@pytest.fixture
def silent() -> Iterator[int]:
    """Yield a port at which somebody else listens beside rank 0's address, and says nothing."""
    with socket.create_server((BESIDE, free_port())) as stranger:
        yield stranger.getsockname()[1]


def addresses(port: int, *hosts: str) -> list[Address]:
    return [Address(socket.AF_INET, (host, port)) for host in hosts]


def test_rank_0_serves_at_the_first_of_its_own_addresses_and_the_others_find_it(
    settings: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a secret."""
    look_up, port = socket.getaddrinfo, free_port()

    def both(host: Any, *args: Any, **options: Any) -> Sequence[Any]:
        hosts = (ELSEWHERE, HERE) if host == "master" else (host,)
        return list(itertools.chain(*(look_up(each, *args, **options) for each in hosts)))

    monkeypatch.setattr(socket, "getaddrinfo", both)
    first = join_address("master", port, 0, 2, settings)
    second = join_address("master", port, 1, 2, settings)
    first.store.set("a", "1")
    assert second.store.get("a") == b"1"
    second.leave()
    first.leave()


def test_a_stranger_at_another_address_of_the_name_keeps_nobody_out(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address that accepts connections gets some seconds to answer."""
    monkeypatch.setattr(meeting, "_TRY_S", 0.2)
    before = Snapshot.take()
    with served(port=silent) as first:
        found = find_store(place(1), addresses(silent, BESIDE, HERE), DEADLINE_S, threading.Event())
        assert found.host == HERE
        found.set("a", "1")
        assert first.get("a") == b"1"
        found.close()
    assert leaked_since(before) == []


def test_who_finds_rank_0_at_none_of_the_addresses_names_them(silent: int) -> None:
    """At the deadline, whether somebody else answers or nobody; and who is no longer waited for stops at once."""
    port, over = free_port(), threading.Event()
    with pytest.raises(CommTimeoutError, match=f"port {port} of {BESIDE}, {HERE} within 0.1 s") as caught:
        find_store(place(1), addresses(port, BESIDE, HERE), 0.1, over)
    assert caught.value.missing == (0,)
    with pytest.raises(CommTimeoutError, match=f"did not answer at {BESIDE}:{silent}"):
        find_store(place(1), addresses(silent, BESIDE, HERE), 0.1, over)
    over.set()
    with pytest.raises(ClosedError):
        find_store(place(1), addresses(port, BESIDE, HERE), DEADLINE_S, over)


def test_a_store_that_cannot_be_opened_closes_the_descriptor_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the kernel refuses is said as it is, not as a port that is taken."""

    def refuse(_threads: int) -> None:
        raise CapabilityError("epoll_create1 failed", requirement="the system call epoll_create1")

    monkeypatch.setattr(server_module, "new_context", refuse)
    before = Snapshot.take()
    listener = socket.create_server((HERE, 0))
    port = listener.getsockname()[1]
    with pytest.raises(CapabilityError, match="epoll_create1 failed"):
        serve_at(place(0), HERE, (port, port), DEADLINE_S, check_nothing, listener.detach())
    assert leaked_since(before) == []
