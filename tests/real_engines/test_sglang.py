"""SGLang's own calls run on our groups: those found in its source, and those that its own functions make.

`make test-engines` runs this. SGLang's wheel is read, and its distributed layer imported; no model is.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real_engines import sglang_sites, sglang_table

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "sglang-call-sites.md"


def test_every_call_site_that_needs_no_gpu_runs(sglang: Path) -> None:
    """Each call in SGLang's source gives the right result on our group, and the table in docs says so."""
    found = sglang_table.results(sglang)
    assert len(found) > 200
    assert [each for each in found if each.failure] == []
    assert sum(not each.cause for each in found) >= 0.9 * len(found)
    assert sglang_table.table(sglang_sites.version_of(sglang), found) == TABLE.read_text().rstrip("\n")


def test_every_attribute_that_is_read_exists(sglang: Path) -> None:
    """What SGLang reads of `get_parallel().tp_group` and the like is there."""
    found = sglang_sites.attributes(sglang)
    assert {"rank_in_group", "cpu_group", "ca_comm", "active_ranks"} <= found
    assert found <= sglang_table.our_attributes()


def test_its_own_functions_create_our_groups(sglang: Path) -> None:
    """With the plugin, SGLang's `initialize_model_parallel` and `communication_op` work on our groups."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
    answers = run_both(sglang, address)
    mine = [
        [[float(row * 4 + column + rank) for column in range(4)] for row in range(2)] for rank in range(2)
    ]
    total = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(*mine, strict=True)]
    for rank, found in enumerate(answers):
        assert found["class"] == "SglangGroupCoordinator"
        assert found["ranks"] == [0, 1]
        assert found["same node"] == [True, True]
        for name in ("all_reduce", "attention", "experts", "patched"):
            assert found[name] == total
        assert found["all_gather"] == [a + b for a, b in zip(*mine, strict=True)]
        assert found["into"] == mine[0] + mine[1]
        assert found["scattered"] == [total[rank]]
        assert found["dict"] == mine[0]
        assert found["custom"] == [2.0]


def run_both(sglang: Path, address: str) -> list[dict[str, Any]]:
    """Run `sglang_run` as two ranks; return what each printed."""
    paths = [str(ROOT), str(sglang), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "SGLANG_PLUGINS": "group_coordinator", "PYTHONPATH": os.pathsep.join(paths)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.real_engines.sglang_run", str(rank), "2", address],
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
        assert lines, log[-6000:]
        assert "uses its groups" in log
        answers.append(json.loads(lines[0].removeprefix("RESULT ")))
    return answers
