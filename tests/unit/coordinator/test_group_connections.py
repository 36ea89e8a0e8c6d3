"""Connections of a group that carry tensors: who is connected, and what ends the opening."""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest

from coordinator.bootstrap.blocking_calls import connect_watched
from coordinator.bootstrap.group_connections import open_connections
from shm_broadcast.errors import CommTimeoutError, NativeError, PeerLostError
from shm_broadcast.liveness import PeerWatch, this_process

PROMPT_S = 20.0


def no_check() -> None:
    """Raise nothing."""


class Exchange:
    """All-gathers bytes between threads, one for each rank."""

    def __init__(self, size: int) -> None:
        self._told: list[bytes] = [b""] * size
        self._all = threading.Barrier(size)

    def of(self, rank: int, change: Callable[[bytes], bytes] = bytes) -> Callable[[bytes], list[bytes]]:
        def exchange(own: bytes) -> list[bytes]:
            self._told[rank] = change(own)
            self._all.wait(PROMPT_S)
            return list(self._told)

        return exchange


def opened(
    partners: Sequence[Sequence[int]],
    timeout_s: float = PROMPT_S,
    check: Callable[[], None] = no_check,
    told: Callable[[bytes], bytes] = bytes,
) -> list[Any]:
    """Let each rank open connections to its partners; return for each rank these or an error. Rank 0 tells `told`."""
    exchange = Exchange(len(partners))
    found: list[Any] = [None] * len(partners)

    def body(rank: int) -> None:
        change = told if rank == 0 else bytes
        try:
            found[rank] = open_connections(
                rank, partners[rank], "127.0.0.1", exchange.of(rank, change), check, f"rank {rank}", timeout_s
            )
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(partners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PROMPT_S)
        assert not thread.is_alive()
    return found


def close(found: Sequence[Any]) -> None:
    for each in found:
        if isinstance(each, dict):
            for connection in each.values():
                connection.close()


@pytest.mark.guarantee("D95")
def test_partners_are_connected_with_each_other_and_with_nobody_else() -> None:
    """Ranks 0, 2 and 3 are leaders; rank 1 takes part and gets no connection."""
    found = opened([[2, 3], [], [0, 3], [0, 2]])
    assert [sorted(each) for each in found] == [[2, 3], [], [0, 3], [0, 2]]
    for rank in (0, 2, 3):
        for partner, connection in found[rank].items():
            connection.sendall(bytes([rank, partner]))
    for rank in (0, 2, 3):
        for partner, connection in found[rank].items():
            connection.settimeout(PROMPT_S)
            assert connection.recv(2) == bytes([partner, rank])
    close(found)


@pytest.mark.guarantee("D95")
def test_a_rank_that_does_not_know_the_token_is_kept_out() -> None:
    """It is taken for a stranger, and the deadline names the rank that did not come."""
    found = opened([[1], [0]], 1.0, told=lambda own: own.replace(own[-12:-4], b"QUFBQUFB"))
    assert isinstance(found[0], CommTimeoutError)
    assert found[0].missing == (1,)
    assert "no connection for tensors with rank(s) 1" in str(found[0])
    assert isinstance(found[1], (CommTimeoutError, NativeError))


@pytest.mark.parametrize("told", [b"{}", b'{"address":"\xff","port":1,"token":""}'])
def test_what_is_no_address_is_refused(told: bytes) -> None:
    """The error says which rank told it; nobody connects anywhere."""
    found = opened([[1], [0]], 1.0, told=lambda _own: told)
    assert isinstance(found[1], NativeError)
    assert "rank 0 of the group told no address" in str(found[1])


@pytest.mark.parametrize("address", [b"localhost.invalid", b"x" * 300])
def test_an_address_that_is_not_numeric_is_refused(address: bytes) -> None:
    """No name is looked up, and the error says which rank told it."""
    found = opened([[1], [0]], 1.0, told=lambda own: own.replace(b"127.0.0.1", address))
    assert isinstance(found[1], NativeError)
    assert "rank 0 told no numeric address" in str(found[1])


def test_a_failure_of_another_rank_ends_the_opening() -> None:
    """It is looked for ten times a second."""

    def fail() -> None:
        raise NativeError("rank 5 has failed", library="none", function="none")

    found = opened([[1], []], PROMPT_S, fail)
    assert isinstance(found[0], NativeError)
    assert "rank 5 has failed" in str(found[0])
    assert found[1] == {}


@pytest.mark.guarantee("G37")
def test_who_was_interrupted_is_named_though_torch_sees_the_closed_connection_first() -> None:
    """The rank lives on, so that nothing but its failure record tells of it, which comes some looks later."""
    looks = list[int]()

    def connect() -> None:
        raise RuntimeError("Connection closed by peer")

    def check() -> None:
        looks.append(1)
        if len(looks) > 3:
            raise PeerLostError("interrupted: rank 1", peers=(1,))

    with closing(PeerWatch(this_process(), {})) as watch:
        with pytest.raises(PeerLostError, match="interrupted: rank 1"):
            connect_watched(connect, "connect", "connect", watch, check)
        with pytest.raises(NativeError, match="Connection closed by peer"):
            connect_watched(connect, "connect", "connect", watch)
