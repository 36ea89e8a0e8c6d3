"""What the launcher has told this process: its place, and where the ranks meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import msgspec

from coordinator.launchers.init_methods import find_launch
from coordinator.launchers.launch import Caller
from coordinator.settings import LaunchEnvironment, launched_local_rank, launcher_variables
from shm_broadcast.errors import UsageError

__all__ = ["Launched", "read_launch"]

# Of the variables of launchers, those that say where a rank is.
_TELLING: Final[tuple[str, ...]] = (
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_RESV_PORTS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
)
_PREFIXES: Final = {"slurm": ("SLURM_",), "mpi": ("OMPI_", "PMI_", "MPI_"), "lws": ("LWS_",)}


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """The place of this process, and where its store is.

    Attributes:
        launcher: Who has said it, for texts.
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Index on its host; -1 if nobody has said it.
        host: Name or address of the host of the store.
        port: TCP port of the store.
        has_agent: Whether an agent of the launcher serves the store, and not rank 0.
        spans_hosts: Whether the launcher says that there are several hosts.
        init_method: With which the ranks meet, `env://` or `tcp://HOST:PORT`.
        variables: The variables that say it, by name.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    has_agent: bool
    spans_hosts: bool
    init_method: str
    variables: dict[str, str]

    @property
    def serves(self) -> bool:
        """Return whether this process serves the store."""
        return self.rank == 0 and not self.has_agent


def read_launch(init_method: str, caller: Caller, environ: Mapping[str, str] | None = None) -> Launched:
    """Return the place of this process.

    Args:
        init_method: As `init_distributed_environment` takes it, `file://` left out.
        caller: What the command line says; it beats the launcher.
        environ: Variables to read instead of the process's environment.

    Raises:
        UsageError: A variable is missing or malformed, or the method is (`SettingsError` is one).
    """
    scheme = urlsplit(init_method).scheme
    if scheme == "env":
        return _from_environment(caller, environ)
    variables = launcher_variables(environ)
    launch = find_launch(init_method, variables, caller)
    if launch is None:
        return _from_command_line(init_method, caller)
    telling = {
        name: variables[name]
        for name in _TELLING
        if name in variables and name.startswith(_PREFIXES.get(scheme, ()))
    }
    return Launched(
        launcher=launch.launcher,
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        host=launch.host,
        port=launch.port,
        has_agent=False,
        spans_hosts=launch.spans_hosts,
        init_method=launch.init_method,
        variables=telling,
    )


def _from_environment(caller: Caller, environ: Mapping[str, str] | None) -> Launched:
    rank, world_size = (None if each < 0 else each for each in (caller.rank, caller.world_size))
    launch = LaunchEnvironment.from_env(environ, rank=rank, world_size=world_size)
    if launch is None:
        raise UsageError(
            "no launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for this process, which env:// reads"
        )
    local_rank = launched_local_rank(environ) if caller.local_rank < 0 else caller.local_rank
    variables = {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        **({} if local_rank is None else {"LOCAL_RANK": str(local_rank)}),
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(launch.master_port),
    }
    if launch.use_agent_store:
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": str(launch.agents)}
    return Launched(
        launcher="torchrun" if launch.use_agent_store else "the environment",
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=-1 if local_rank is None else local_rank,
        host=launch.master_addr,
        port=launch.master_port,
        has_agent=launch.use_agent_store,
        spans_hosts=launch.agents > 1,
        init_method="env://",
        variables=variables,
    )


def _from_command_line(init_method: str, caller: Caller) -> Launched:
    parts = urlsplit(init_method)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "tcp" or not host or not port or parts.path:
        raise UsageError(
            f"--init-method is {init_method!r}, but must be env://, tcp://HOST:PORT, slurm://[:PORT], "
            "mpi://HOST:PORT or lws://[:PORT]"
        )
    if not 0 <= caller.rank < caller.world_size:
        raise UsageError(f"with {init_method} pass --rank and --world-size, 0 <= rank < world size")
    return Launched(
        launcher="the command line",
        rank=caller.rank,
        world_size=caller.world_size,
        local_rank=caller.local_rank,
        host=host,
        port=port,
        has_agent=False,
        spans_hosts=False,
        init_method=init_method,
        variables={},
    )
