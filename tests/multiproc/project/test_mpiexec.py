"""mpiexec starts the demo: the same tokens come out as from its own launcher and from torchrun."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.project.test_tiny_llm_demo import (
    CONFIG,
    DEMO,
    PROMPTS,
    prompts,
    random_checkpoint,
    report_of,
    run_demo,
)
from tests.ports import free_port
from tests.probes import mpiexec_of, requires

pytestmark = pytest.mark.thorough

# Open MPI refuses to run as root, and on fewer cores than ranks, unless it is told to.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
VENDORS = [
    pytest.param("MPICH", marks=requires("mpich")),
    pytest.param("Open MPI", marks=requires("open_mpi")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the arguments that let the demo serve a model of random weights."""
    directory = random_checkpoint(tmp_path_factory.mktemp("mpiexec") / "model", CONFIG)
    return ["--model", str(directory), "--json", "--max-tokens", "12", *prompts(PROMPTS)]


@pytest.fixture(scope="module")
def expected(model: list[str]) -> list[dict[str, Any]]:
    """Return what the ranks generate that the demo starts itself, and those of torchrun alike."""
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        "-m",
        DEMO[2],
    )
    own, other = (report_of(run_demo(*model, command=command)) for command in (DEMO, torchrun))
    assert own["continuations"] == other["continuations"]
    found: list[dict[str, Any]] = own["continuations"]
    assert len(found) == len(PROMPTS)
    return found  # fmt: skip


@pytest.mark.guarantee("G60")
@pytest.mark.parametrize("vendor", VENDORS)
def test_mpiexec_starts_the_ranks_that_give_the_same_tokens(
    vendor: str, model: list[str], expected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes of mpiexec meet by `mpi://`, and rank 0 reports."""
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    command = [mpiexec_of(vendor) or "", "-n", "4", *DEMO, "--init-method", f"mpi://127.0.0.1:{free_port()}"]
    assert report_of(run_demo(*model, command=command))["continuations"] == expected


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_number_of_processes_that_does_not_fit_is_told(
    vendor: str, model: list[str], tmp_path: Path
) -> None:
    """Two processes cannot be TP 2 x PP 2; every rank says so."""
    command = [mpiexec_of(vendor) or "", "-n", "2", *DEMO, "--init-method", f"mpi://127.0.0.1:{free_port()}"]
    done = subprocess.run(
        [*command, *model],
        env={**os.environ, **OPEN_MPI, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode != 0
    assert "needs 4 processes, not 2" in done.stderr
