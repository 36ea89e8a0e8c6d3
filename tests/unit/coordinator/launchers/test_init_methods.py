"""What recorded environments of launchers mean, and which are refused. Real ones of mpiexec were recorded here."""

from typing import Any

import pytest

from coordinator.launchers.init_methods import find_launch
from coordinator.launchers.launch import Caller, Launch
from coordinator.settings import launcher_variables
from shm_broadcast.errors import UsageError

SLURM = {
    # Of `srun -N 2 --ntasks-per-node 4 --resv-ports=1`, task 5, as srun's manual says.
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "n[001-003,007],gpu5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[003,007]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_RESV_PORTS": "12000-12001",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    # Of Open MPI 5.0.11, `mpiexec -n 2`, rank 1.
    "OMPI_COMMAND": "sh",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_VERSION": "5.0.11rc1",
}
MPICH = {
    # Of MPICH 5.0.2, `mpiexec -n 2`, rank 1.
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
GFORKER = {
    # Of MPICH 5.0.2, `mpiexec.gforker -n 2`, rank 1: the launcher for one host does not number by hosts.
    "MPI_APPNUM": "0",
    "MPI_UNIVERSE_SIZE": "-1",
    "PMI_DEBUG": "0",
    "PMI_FD": "12",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
LWS = {
    # Of pod 2 in a group of 3, as pkg/utils/pod of kubernetes-sigs/lws sets them.
    "LWS_LEADER_ADDRESS": "llm-0.llm.default",
    "LWS_GROUP_SIZE": "3",
    "LWS_WORKER_INDEX": "2",
}


def found(method: str, environ: dict[str, str], **caller: int) -> Launch:
    launch = find_launch(method, launcher_variables(environ), Caller(**caller))
    assert launch is not None
    return launch


def test_srun_is_read() -> None:
    """Its numbers are those of the step. Rank 0 is on the first node, and the step has reserved the port."""
    launch = found("slurm://", SLURM)
    assert launch == Launch(
        launcher="srun",
        rank=5,
        world_size=8,
        local_rank=1,
        host="n003",
        port=12000,
        spans_hosts=True,
    )
    assert launch.init_method == "tcp://n003:12000"


@pytest.mark.parametrize("ports", ["12000", "12000-12003", "12000,12004-12005", "[12000-12001]"])
def test_the_first_reserved_port_counts(ports: str) -> None:
    """It is the same on every node of the step."""
    assert found("slurm://", {**SLURM, "SLURM_STEP_RESV_PORTS": ports}).port == 12000


def test_a_port_in_the_method_needs_no_reserved_one() -> None:
    """It beats the reserved one, which is not read then."""
    assert found("slurm://:29500", {**SLURM, "SLURM_STEP_RESV_PORTS": "none"}).port == 29500


@pytest.mark.parametrize("launched", [OPEN_MPI, MPICH])
def test_mpiexec_is_read(launched: dict[str, str]) -> None:
    """Both families say the same by variables of other names; the host and the port come from the user."""
    launch = found("mpi://10.0.0.1:29500", launched)
    place = (launch.rank, launch.world_size, launch.local_rank, launch.spans_hosts)
    assert place == (1, 2, 1, False)
    assert launch.init_method == "tcp://10.0.0.1:29500"


@pytest.mark.parametrize(
    "launched",
    [{**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, {**MPICH, "PMI_SIZE": "4"}],
)
def test_fewer_ranks_here_than_in_the_world_mean_several_hosts(launched: dict[str, str]) -> None:
    """A loopback address of the master is then refused."""
    assert found("mpi://[fd00::1]:29500", launched).spans_hosts
    assert found("mpi://[fd00::1]:29500", launched).init_method == "tcp://[fd00::1]:29500"


def test_a_launcher_that_does_not_number_by_hosts_needs_a_local_rank() -> None:
    """With the argument its variables are enough."""
    with pytest.raises(UsageError, match="MPI_LOCALRANKID is missing.*mpiexec of MPICH.*pass local_rank"):
        found("mpi://h:1", GFORKER)
    assert found("mpi://h:1", GFORKER, local_rank=1).local_rank == 1


def test_a_leader_worker_set_is_read() -> None:
    """The ranks of a pod follow each other. The caller says which process of the pod this is."""
    launch = found("lws://", LWS, local_rank=3, local_world_size=4)
    assert launch == Launch(
        launcher="a LeaderWorkerSet",
        rank=11,
        world_size=12,
        local_rank=3,
        host="llm-0.llm.default",
        port=29500,
        spans_hosts=True,
    )
    assert found("lws://:30000", LWS, local_rank=3, world_size=12).port == 30000
    assert found("lws://", LWS, local_rank=0, world_size=12, rank=8).rank == 8


@pytest.mark.guarantee("G60")
@pytest.mark.parametrize("method", ["env://", "tcp://h:1", "file:///d", "", "http://h"])
def test_no_launcher_is_guessed(method: str) -> None:
    """Whatever variables are there, only a method that names a launcher reads them."""
    everything = {**SLURM, **OPEN_MPI, **MPICH, **LWS}
    assert find_launch(method, launcher_variables(everything), Caller()) is None


@pytest.mark.guarantee("G30")
@pytest.mark.parametrize(
    ("method", "environ"),
    [
        ("slurm://:1", {"SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "x", "SLURM_NTASKS": "0", "SLURM_LOCALID": ""}),
        ("mpi://h:1", {"PMI_RANK": "7", "PMI_SIZE": "", "MPI_LOCALRANKID": "-1", "MPI_LOCALNRANKS": "9"}),
        ("mpi://h:1", {}),
    ],
)  # fmt: skip
def test_what_the_caller_says_beats_the_launcher(method: str, environ: dict[str, str]) -> None:
    """A variable that is not needed is not read."""
    launch = found(method, environ, rank=1, world_size=3, local_rank=0)
    assert (launch.rank, launch.world_size, launch.local_rank) == (1, 3, 0)


def refused(method: str, environ: dict[str, str], *words: str, **caller: int) -> None:
    with pytest.raises(UsageError) as refusal:
        found(method, environ, **caller)
    missing = [word for word in words if word not in str(refusal.value)]
    assert missing == [], str(refusal.value)


NEEDED: list[tuple[str, dict[str, str], str, str, dict[str, Any]]] = [
    *(
        ("slurm://", SLURM, name, "srun", {})
        for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_RESV_PORTS")
    ),
    *(
        ("mpi://h:1", OPEN_MPI, name, "mpiexec of Open MPI", {})
        for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    ),
    *(
        ("mpi://h:1", MPICH, name, "mpiexec of MPICH", {})
        for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
    ),
    *(("lws://", LWS, name, "LeaderWorkerSet", {"local_rank": 0, "local_world_size": 1}) for name in LWS),
]  # fmt: skip


@pytest.mark.guarantee("G60")
@pytest.mark.parametrize(("method", "environ", "name", "setter", "caller"), NEEDED)
def test_a_variable_that_is_missing_or_wrong_is_named_with_who_sets_it(
    method: str, environ: dict[str, str], name: str, setter: str, caller: dict[str, int]
) -> None:
    """The error says what launcher sets it."""
    without = {each: value for each, value in environ.items() if each != name}
    refused(method, without, name, setter, **caller)
    refused(method, {**environ, name: ""}, name, setter, **caller)
    if name == "LWS_LEADER_ADDRESS":
        return  # any text may be a name
    for value in ("(1_0)",) if name == "SLURM_STEP_NODELIST" else ("1_0", "-1", "99999999999"):
        refused(method, {**environ, name: value}, name, setter, **caller)


@pytest.mark.guarantee("G60")
@pytest.mark.parametrize(
    ("method", "environ", "words"),
    [
        ("slurm://", {**SLURM, "SLURM_STEP_NUM_TASKS": "4"}, ["NTASKS='8'", "STEP_NUM_TASKS='4'", "--preserve-env"]),
        ("slurm://", {**SLURM, "SLURM_STEP_NUM_NODES": "3"}, ["SLURM_STEP_NUM_NODES=3", "2 nodes"]),
        ("slurm://", {**SLURM, "SLURM_PROCID": "8"}, ["SLURM_PROCID='8'", "0 to 7"]),
        ("slurm://", {**SLURM, "SLURM_STEP_RESV_PORTS": "0-1"}, ["SLURM_STEP_RESV_PORTS='0-1'"]),
        ("mpi://h:1", {**OPEN_MPI, **MPICH, "PMI_RANK": "0"}, ["OMPI_COMM_WORLD_RANK='1'", "PMI_RANK='0'"]),
        ("mpi://h:1", {**MPICH, "MPI_LOCALNRANKS": "1"}, ["MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=1"]),
        ("mpi://h:1", {**MPICH, "MPI_LOCALNRANKS": "3"}, ["MPI_LOCALNRANKS='3'", "1 to 2"]),
        ("mpi://h:1", SLURM, ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "mpiexec"]),
        ("slurm://", OPEN_MPI, ["SLURM_STEP_NODELIST", "srun"]),
        ("lws://", LWS, ["pass local_world_size"]),
    ],
)  # fmt: skip
def test_variables_that_contradict_each_other_are_named(
    method: str, environ: dict[str, str], words: list[str]
) -> None:
    """Both stand in the error, with their values."""
    refused(method, environ, *words)


def test_a_batch_script_that_does_not_use_srun_is_told() -> None:
    """It has most variables of a task, and all of its processes would be rank 0."""
    script = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    refused("slurm://", script, "SLURM_STEP_NODELIST", "start the processes with srun")


@pytest.mark.parametrize(
    ("caller", "words"),
    [
        ({"local_world_size": 2}, ["local_rank is -1", "from 0 to 1"]),
        ({"local_rank": 2, "local_world_size": 2}, ["local_rank is 2", "from 0 to 1"]),
        ({"local_rank": 0, "world_size": 4}, ["world_size=4", "LWS_GROUP_SIZE=3"]),
        ({"local_rank": 0, "world_size": 6, "local_world_size": 3}, ["world_size=6", "local_world_size=3"]),
        ({"local_rank": 1, "local_world_size": 2, "rank": 4}, ["rank=4", "make it 5"]),
    ],
)
def test_a_caller_that_contradicts_the_leader_worker_set_is_told(
    caller: dict[str, int], words: list[str]
) -> None:
    """The pods number themselves, so the rank follows."""
    refused("lws://", LWS, *words, **caller)


@pytest.mark.parametrize(
    "method",
    ["slurm://h:1", "slurm://:0", "slurm://:x", "slurm:///p", "mpi://", "mpi://h", "mpi://:1", "mpi://h:1/p", "mpi://u@h:1",
     "lws://h:1", "lws://:70000", "lws://?x=1"],
)  # fmt: skip
def test_a_malformed_method_is_refused_with_the_forms(method: str) -> None:
    """Nothing in it is ignored."""
    for environ in (SLURM, MPICH, LWS):
        refused(
            method, environ, repr(method), "slurm://[:PORT], mpi://HOST:PORT or lws://[:PORT]", local_rank=0
        )


@pytest.mark.parametrize("method", ["mpi://[fd00::1:1", "tcp://[h]:1", "tcp://h]:1"])
def test_brackets_that_enclose_no_address_are_refused(method: str) -> None:
    """Also where no launcher is named."""
    with pytest.raises(UsageError, match="distributed_init_method is"):
        find_launch(method, {}, Caller())


@pytest.mark.parametrize("method", ["slurm://", "mpi://h:1", "env://", "file:///d"])
def test_a_local_world_size_is_for_pods_only(method: str) -> None:
    """Elsewhere it would be ignored, so it is refused."""
    refused(method, {**SLURM, **MPICH}, "local_world_size=2", "lws://", local_world_size=2)
