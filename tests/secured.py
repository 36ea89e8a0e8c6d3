"""A store of a job in this process, for tests: rank 0 serves it, and others join."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from coordinator.security.opening import connect_to, serve_at
from coordinator.security.place import Place
from coordinator.security.secret import Secret
from coordinator.security.server import StoreServer
from coordinator.security.store import SecuredStore

__all__ = [
    "DEADLINE_S",
    "HERE",
    "SECRET",
    "VALUE",
    "check_nothing",
    "joined",
    "place",
    "ranks_of",
    "served",
    "server_of",
]

HERE = "127.0.0.1"
VALUE = bytes(range(64))
SECRET = Secret(VALUE)
DEADLINE_S = 60.0


def place(rank: int, world_size: int = 4, run: str = "run", secret: Secret = SECRET) -> Place:
    """Return a rank's place in a run."""
    return Place(secret, run, rank, world_size)


def check_nothing() -> None:
    """Raise nothing: no rank is known to be lost."""


@contextmanager
def served(world_size: int = 4, run: str = "run", port: int | None = None) -> Iterator[SecuredStore]:
    """Yield rank 0's store."""
    ports = None if port is None else (port, port)
    store = serve_at(place(0, world_size, run), HERE, ports, DEADLINE_S, check_nothing)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def joined(
    port: int, *ranks: int, run: str = "run", secret: Secret = SECRET, timeout_s: float = DEADLINE_S
) -> Iterator[list[SecuredStore]]:
    """Yield the stores of ranks that have joined at a port."""
    with ExitStack() as stack:
        stores = []
        for rank in ranks:
            stores.append(connect_to(place(rank, 4, run, secret), HERE, port, timeout_s, check_nothing))
            stack.callback(stores[-1].close)
        yield stores


def server_of(store: SecuredStore) -> StoreServer:
    """Return the server behind rank 0's store."""
    server = store._server
    assert server is not None
    return server


def ranks_of(store: SecuredStore) -> list[int]:
    """Return the ranks that are connected to rank 0's store, one for each process."""
    return sorted(each.rank for each in server_of(store)._members)
