"""`mpi://HOST:PORT`: processes that `mpiexec` has started. MPI itself is not used.

Open MPI sets OMPI_COMM_WORLD_*, also for programs that do not call MPI. MPICH's Hydra, and the launchers made of it
(Intel MPI, MVAPICH), set PMI_* and MPI_LOCAL*. No variable names rank 0's host, so the user does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coordinator.launchers.launch import Caller, Launch, Variables, place

__all__ = ["MPI", "read_mpi"]

MPI: Final = "mpi://HOST:PORT"

_OPEN_MPI: Final = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA: Final = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read_mpi(environ: Mapping[str, str], caller: Caller, host: str) -> Launch:
    """Return what mpiexec has told this process.

    Args:
        environ: The process's variables.
        caller: What the caller knows, the port too.
        host: Name or address of rank 0's host, as the user has passed it.

    Raises:
        UsageError: A variable that is needed is missing or malformed, or two of them contradict each other.
    """
    is_open_mpi, is_hydra = (any(environ.get(name) for name in names[:2]) for names in (_OPEN_MPI, _HYDRA))
    launcher = "mpiexec of Open MPI" if is_open_mpi else "mpiexec of MPICH" if is_hydra else "mpiexec"
    variables = Variables(environ, MPI, launcher)
    if not is_open_mpi and not is_hydra and -1 in (caller.rank, caller.world_size, caller.local_rank):
        variables.refuse(
            f"neither {_OPEN_MPI[0]}, which mpiexec of Open MPI sets, nor {_HYDRA[0]}, which that of MPICH sets, is "
            "there",
            "start the processes with mpiexec",
        )
    for one, other in zip(_OPEN_MPI, _HYDRA, strict=True):
        variables.check_equal(one, other)
    *names, local_size_name = _OPEN_MPI if is_open_mpi else _HYDRA
    rank, world_size, local_rank = place(variables, caller, (names[0], names[1], names[2]))
    # A caller that gives the ranks another order or number knows more than the launcher.
    local_size = variables.optional_number(local_size_name, 1, world_size) if caller.world_size < 0 else None
    if local_size is not None and caller.local_rank < 0 and local_rank >= local_size:
        variables.refuse(
            f"{names[2]}={local_rank} and {local_size_name}={local_size} contradict each other: {launcher} sets both"
        )
    return Launch(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=host,
        port=caller.port,
        spans_hosts=local_size is not None and local_size < world_size,
    )
