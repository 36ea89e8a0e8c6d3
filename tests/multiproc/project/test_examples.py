"""Every program in examples/ runs as its description says, and prints the right results."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import RankPool
from tests.hosts import report, run_on_two_hosts
from tests.ports import free_port
from tests.probes import requires
from tests.strict import STRICT

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
DEADLINE_S = 60.0


def run_as_torchrun_does(rank: int, world_size: int, directory: Path, program: str, port: int) -> str:
    """Run a program in this process with torchrun's variables; return its output."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in told.items()})
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(program, run_name="__main__")
    finally:
        for name in told:
            del os.environ[name]
        forget_registered()
    return printed.getvalue()


def forget_registered() -> None:
    """Unregister a program's classes, because those of the next program have the same module, `__main__`."""
    from shm_broadcast.codec import registry

    for cls in [each for each in registry.by_class if each.__module__ == "__main__"]:
        registry.unregister_type(cls)


def run_ranks_of(pool: RankPool, program: str) -> list[str]:
    path = str(EXAMPLES / program)
    return pool.run(run_as_torchrun_does, path, free_port(), timeout_s=DEADLINE_S)


def test_a_worker_written_for_vllm_runs(ranks2: RankPool) -> None:
    """Both ranks get each plan, and the sum over the group equals that of the whole layer."""
    printed = run_ranks_of(ranks2, "vllm_style_worker.py")
    steps = [re.findall(r"step (\d): (\d) tokens, sum (-?\d+)", each) for each in printed]
    assert [each[:2] for each in steps[0]] == [("0", "3"), ("1", "4"), ("2", "5")]
    assert steps[0] == steps[1]


def test_two_stages_keep_batches_in_flight(ranks2: RankPool) -> None:
    """The first stage gets the tokens of all batches back, in order."""
    first, second = run_ranks_of(ranks2, "two_stage_pipeline.py")
    assert re.findall(r"batch (\d): tokens \[\d+, \d+, \d+, \d+\]", first) == list("012345")
    assert not second


def test_a_scheduler_broadcasts_without_torch() -> None:
    """Every worker gets every step, and neither the scheduler nor a worker has imported torch."""
    code = (
        "import runpy, sys\n"
        "try:\n"
        f"    runpy.run_path({str(EXAMPLES / 'scheduler_without_torch.py')!r}, run_name='__main__')\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [*STRICT, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"worker {rank}: 10 tokens in 5 steps; torch imported: False" for rank in range(2)
    ]


@requires("network_namespaces")
@pytest.mark.thorough
def test_torchrun_joins_two_hosts() -> None:
    """The script starts once on each of two hosts and runs the worker on both."""
    found = run_on_two_hosts(__name__)
    for host in (found[0], found[2]):
        assert host["status"] == 0, host["printed"]
        assert "step 2: 5 tokens" in host["printed"]


def test_every_example_is_listed() -> None:
    """Each file in examples/ has a line in its README."""
    listed = (EXAMPLES / "README.md").read_text()
    programs = [each.name for each in EXAMPLES.iterdir() if each.suffix in (".py", ".sh")]
    assert len(programs) >= 5
    assert [name for name in programs if name != "__init__.py" and f"`{name}`" not in listed] == []


def main(directory: Path, rank: int) -> None:
    """Start the script if this is the first rank of its host; the second rank has nothing to do."""
    if rank in (0, 2):
        done = subprocess.run(
            [EXAMPLES / "torchrun_two_hosts.sh", str(rank // 2), "10.77.0.1"],
            env={**os.environ, "PYTHON": sys.executable, "RANKS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        report(directory, rank, {"status": done.returncode, "printed": done.stdout})
    else:
        report(directory, rank, {})


@pytest.mark.thorough
def test_replicas_go_on_when_one_is_killed() -> None:
    """The two that are left finish all steps, as ranks 0 and 1 of an epoch of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.survive"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    lines = done.stdout.splitlines()
    for number, rank in ((0, 0), (2, 1)):
        assert f"process {number} is rank {rank}: step 5, 2 replicas" in lines
    assert "process 1 is rank 1: step 2, 3 replicas" in lines
