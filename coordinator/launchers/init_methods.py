"""Which launcher an init method names. None is ever guessed from the variables that are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from coordinator.launchers.launch import Caller, Launch
from coordinator.launchers.lws import read_lws
from coordinator.launchers.mpi import read_mpi
from coordinator.launchers.slurm import read_slurm
from shm_broadcast.errors import UsageError

__all__ = ["FORMS", "find_launch"]

FORMS: Final = "slurm://[:PORT], mpi://HOST:PORT or lws://[:PORT]"
"""The init methods that this package reads, for texts."""

_SCHEMES: Final = ("slurm", "mpi", "lws")


def find_launch(init_method: str, environ: Mapping[str, str], caller: Caller) -> Launch | None:
    """Return what the launcher named by `init_method` has told this process; None if it names no launcher.

    Args:
        init_method: The `distributed_init_method` of `init_distributed_environment`.
        environ: The variables of launchers; see `coordinator.settings.launcher_variables`.
        caller: What the caller knows itself. Its port is not read.

    Raises:
        UsageError: The method is malformed, a variable that is needed is missing or malformed, or what the launcher and
            the caller say is contradictory.
    """
    try:
        parts = urlsplit(init_method)
    except ValueError as error:  # brackets that enclose no address of IPv6
        raise UsageError(f"distributed_init_method is {init_method!r}: {error}") from None
    if parts.scheme not in _SCHEMES:
        if caller.local_world_size != -1:
            raise UsageError(
                f"local_world_size={caller.local_world_size} is for lws:// only, not for {init_method!r}"
            )
        return None
    host, port = _place_of(parts, init_method)
    caller = msgspec.structs.replace(caller, port=port)
    if parts.scheme == "mpi":
        _check_not_given(caller, init_method)
        if not host or port < 0:
            raise _malformed(init_method)
        return read_mpi(environ, caller, host)
    if host:
        raise _malformed(init_method)
    if parts.scheme == "lws":
        return read_lws(environ, caller)
    _check_not_given(caller, init_method)
    return read_slurm(environ, caller)


def _place_of(parts: SplitResult, init_method: str) -> tuple[str, int]:
    """Return host and port, "" and -1 where they are not there."""
    try:
        port = parts.port
    except ValueError:
        raise _malformed(init_method) from None
    if parts.path or parts.query or parts.fragment or parts.username is not None or port == 0:
        raise _malformed(init_method)
    return parts.hostname or "", -1 if port is None else port


def _check_not_given(caller: Caller, init_method: str) -> None:
    if caller.local_world_size != -1:
        raise UsageError(
            f"local_world_size={caller.local_world_size} is for lws:// only: with {init_method} the launcher says it"
        )


def _malformed(init_method: str) -> UsageError:
    return UsageError(f"distributed_init_method is {init_method!r}, but must be {FORMS}")
