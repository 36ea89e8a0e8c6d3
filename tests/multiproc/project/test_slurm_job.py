"""The job for Slurm runs under a program that starts tasks as srun does. No Slurm runs here."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.project.test_tiny_llm_demo import CONFIG, PROMPTS, REPOSITORY, prompts, random_checkpoint
from tests.ports import free_port

# With the variables of `test_init_methods.py`. Tasks get the step's ports only if they are asked for.
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
assert words.pop(0) == "--kill-on-bad-exit=1", words
told = {{"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "localhost"}}
told["SLURM_STEP_NUM_NODES"] = "1"
if words[0] == "--resv-ports=1":
    words.pop(0)
    told["SLURM_STEP_RESV_PORTS"] = "{port}-{port}"
tasks = [
    subprocess.Popen(words, env={{**os.environ, **told, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}})
    for task in range(4)
]
sys.exit(max(abs(task.wait()) for task in tasks))
"""


def run_job(directory: Path, model: Path, **environ: str) -> dict[str, Any]:
    """Run the job; return the report of rank 0."""
    srun = directory / "srun"
    srun.write_text(SRUN.format(python=sys.executable, port=free_port()))
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        ["examples/slurm_job.sh", "--json", "--max-tokens", "8", *prompts(PROMPTS[:2])],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PATH": f"{directory}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "MODEL": str(model),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("port", ["reserved", "named"])
def test_the_job_serves_the_model_in_four_tasks(tmp_path: Path, port: str) -> None:
    """With a reserved port and with one of the user's the ranks meet on the first node, and the tokens are right."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    environ = {} if port == "reserved" else {"PORT": str(free_port())}
    report = run_job(tmp_path, model, **environ)
    assert report["identical"]
    assert len(report["continuations"]) == 2
