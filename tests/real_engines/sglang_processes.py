"""Run a module with SGLang's wheel on its path, as two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_both(module: str, wheel: Path, argument: str) -> list[Any]:
    """Run `python -m module RANK 2 argument` with the plugin; return what each rank printed behind "RESULT".

    Raises:
        AssertionError: A rank printed no result, or did not use our groups; its log is in the text.
    """
    paths = [str(ROOT), str(wheel), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "SGLANG_PLUGINS": "group_coordinator", "PYTHONPATH": os.pathsep.join(paths)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), "2", argument],
            env=environ,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()
    answers = []
    for out, log in outputs:
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        if not lines or "uses its groups" not in log:
            raise AssertionError(log[-6000:])
        answers.append(json.loads(lines[0].removeprefix("RESULT ")))
    return answers
