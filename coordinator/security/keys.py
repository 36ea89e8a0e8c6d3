"""The CURVE key pairs that belong to a job's secret: one for its store, and one for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import zmq
from zmq.utils import z85

from coordinator.security.secret import Secret
from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import CapabilityError

__all__ = ["keys_of_rank", "keys_of_store", "public_keys"]

_STORE: Final = "store"
_RANK: Final = "rank"


def keys_of_store(secret: Secret, run: str) -> RemoteKeys:
    """Return the pair of the process that serves the store of a run.

    Raises:
        CapabilityError: The installed libzmq was built without CURVE; so do the next two.
    """
    return _pair(secret.derive(_STORE, run, 0))


def keys_of_rank(secret: Secret, run: str, rank: int) -> RemoteKeys:
    """Return the pair of a rank of a run."""
    return _pair(secret.derive(_RANK, run, rank))


def public_keys(secret: Secret, run: str, world_size: int) -> Mapping[bytes, int]:
    """Return the rank that each public key of a run belongs to. Takes about 20 us a rank."""
    return {keys_of_rank(secret, run, rank).public: rank for rank in range(world_size)}


def _pair(secret_half: bytes) -> RemoteKeys:
    if not zmq.has("curve"):
        raise CapabilityError("the installed libzmq was built without CURVE", requirement="libzmq with CURVE")
    return RemoteKeys(z85.decode(zmq.curve_public(z85.encode(secret_half))), secret_half)
