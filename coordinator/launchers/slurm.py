"""`slurm://`: processes that `srun` has started.

Facts from srun's manual, "OUTPUT ENVIRONMENT VARIABLES": SLURM_PROCID is the rank in the step, SLURM_NTASKS the number
of tasks, SLURM_LOCALID the number of the task on its node, SLURM_STEP_NODELIST the nodes of the step, of which the
first runs rank 0. SLURM_STEP_RESV_PORTS is set if the step has reserved ports (`srun --resv-ports`, with
`MpiParams=ports=` in slurm.conf): a range such as 12000-12001, which no other step on these nodes has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from coordinator.launchers.launch import MOST_RANKS, Caller, Launch, Variables, place
from coordinator.launchers.nodelist import expand_nodelist
from shm_broadcast.errors import UsageError

__all__ = ["SLURM", "read_slurm"]

SLURM: Final = "slurm://"

# Of SLURM_STEP_RESV_PORTS the first port is used; ranges and lists of them follow, with brackets or without.
_FIRST_PORT: Final = re.compile(r"\[?([0-9]{1,5})([-,][0-9,-]+)?\]?")


def read_slurm(environ: Mapping[str, str], caller: Caller) -> Launch:
    """Return what srun has told this process. The store is on the first node of the step.

    Args:
        environ: The process's variables.
        caller: What the caller knows; its port beats that of the step.

    Raises:
        UsageError: A variable that is needed is missing or malformed, or two of them contradict each other.
    """
    variables = Variables(environ, SLURM, "srun")
    # With --preserve-env the first one is that of the job.
    variables.check_equal(
        "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "start the processes with srun without --preserve-env"
    )
    # A batch script, which has the other variables too, is no step: only srun sets this one.
    nodelist = variables.text("SLURM_STEP_NODELIST", "start the processes with srun")
    rank, world_size, local_rank = place(variables, caller, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    try:
        nodes = expand_nodelist(nodelist)
    except UsageError as error:
        variables.refuse(f"srun has set SLURM_STEP_NODELIST={nodelist[:80]!r}: {error}")
    count = variables.optional_number("SLURM_STEP_NUM_NODES", 1, MOST_RANKS)
    if count is not None and count != len(nodes):
        variables.refuse(
            f"SLURM_STEP_NUM_NODES={count} and SLURM_STEP_NODELIST={nodelist[:80]!r}, which has {len(nodes)} nodes, "
            "contradict each other: srun sets both"
        )
    return Launch(
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=nodes[0],
        port=caller.port if caller.port > 0 else _reserved_port(variables),
        spans_hosts=len(nodes) > 1,
    )


def _reserved_port(variables: Variables) -> int:
    text = variables.text(
        "SLURM_STEP_RESV_PORTS",
        "start the processes with srun --resv-ports=1, or name a port that is free on the first node: slurm://:PORT",
    )
    match = _FIRST_PORT.fullmatch(text)
    port = int(match[1]) if match is not None else 0
    if not 1 <= port <= 65535:
        variables.refuse(f"srun has set SLURM_STEP_RESV_PORTS={text[:80]!r}, which begins with no TCP port")
    return port
