"""A real vLLM, unmodified, gives the same tokens over our groups and queues as over its own.

`make test-engines` runs this; it needs an environment of its own. Each test starts an engine as it is and one with the
plugin, and compares what they print.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.real_engines import surface

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Run:
    """What one run of an engine printed.

    Attributes:
        results: The result of each scenario.
        log: The engine's own output.
    """

    results: dict[str, Any]
    log: str


def run(vllm: Path, plugins: str, *arguments: str, timeout_s: float = 400) -> Run:
    """Run `vllm_run` with vLLM's interpreter."""
    log, printed = output(vllm, plugins, "tests.real_engines.vllm_run", *arguments, timeout_s=timeout_s)
    return Run(dict(printed), log)


def output(
    vllm: Path, plugins: str, *module: str, timeout_s: float = 400
) -> tuple[str, list[tuple[str, Any]]]:
    """Run a module with its arguments by vLLM's interpreter; return its output, and each result with its name."""
    done = subprocess.run(
        [str(vllm), "-m", *module],
        env={**os.environ, "VLLM_PLUGINS": plugins},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    log = done.stdout + done.stderr
    assert lines, log[-6000:]
    assert done.returncode == 0, log[-6000:]
    assert "Exception in thread" not in log
    return log, [(name, json.loads(text)) for _, name, text in lines]


def uses_ours(log: str) -> int:
    """Return how many processes say that they use our groups and queues."""
    return len(set(re.findall(r"process (\d+) of vLLM \S+ uses its groups and queues", log)))


def test_what_the_plugin_relies_on_is_written_down(vllm: Path) -> None:
    """The classes, what their objects have, what other modules read, and what the plugin uses, in vLLM's source."""
    (folder,) = vllm.parents[1].glob("lib/python*/site-packages")
    frozen = json.loads((ROOT / "tests/unit/coordinator/vllm_surface.json").read_text())
    assert surface.surface(folder) == frozen[surface.version_of(folder)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tensor", "2"),
        ("--tensor", "2", "--asynchronous"),
        ("--tensor", "2", "--compiled"),
        ("--tensor", "1", "--pipeline", "2", "--compiled"),
        ("--tensor", "2", "--pipeline", "2", "--compiled"),
    ],
    ids=["tp2-eager", "tp2-asynchronous", "tp2-compiled", "pp2-compiled", "tp2-pp2-compiled"],
)
def test_the_tokens_are_those_of_stock(vllm: Path, arguments: tuple[str, ...]) -> None:
    """Decoding, cached prefixes, prompts in chunks and grammars give equal tokens, eager, asynchronous and compiled."""
    scenarios = ["tokens", "prefix"]
    if arguments == ("--tensor", "2"):
        scenarios += ["structured", "sleep", "rpc"]
    stock = run(vllm, "", *arguments, *scenarios)
    ours = run(vllm, "group_coordinator", *arguments, *scenarios)
    assert uses_ours(stock.log) == 0
    workers = int(arguments[1]) * (int(arguments[3]) if "--pipeline" in arguments else 1)
    assert uses_ours(ours.log) >= 1 + workers  # the engine's core and its workers
    for scenario in scenarios:
        assert ours.results[scenario] == stock.results[scenario]
    before, after = ours.results["prefix"]["cached"]
    assert not any(before)
    assert all(after)


def test_ranks_of_another_launcher_give_the_tokens_of_stock(vllm: Path) -> None:
    """Each of torchrun's two ranks has an engine of its own (`external_launcher`); all of them give equal tokens."""
    answers = []
    for plugins in ("", "group_coordinator"):
        log, printed = output(
            vllm,
            plugins,
            *("torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())),
            *("--module", "tests.real_engines.vllm_run", "--tensor", "2"),
            *("--set", 'distributed_executor_backend="external_launcher"', "tokens"),
        )
        assert uses_ours(log) == (2 if plugins else 0)
        found = [value for name, value in printed if name == "tokens"]
        assert len(found) == 2
        answers += found
    assert all(answer == answers[0] for answer in answers)


def test_the_tokens_of_two_nodes_are_those_of_stock(vllm: Path) -> None:
    """Each node has an executor and a worker. With ours the second node ends with the first; stock's must be killed."""
    found = {}
    for plugins in ("", "group_coordinator"):
        place = ["nnodes=2", 'master_addr="127.0.0.1"', f"master_port={free_port()}"]
        place = [word for each in place for word in ("--set", each)]
        command = [
            str(vllm),
            "-m",
            "tests.real_engines.vllm_run",
            *place,
            "--set",
            "node_rank=1",
            "node",
        ]
        environment = {**os.environ, "VLLM_PLUGINS": plugins, "VLLM_CPU_OMP_THREADS_BIND": "1"}
        with subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        ) as second:
            try:
                found[plugins] = run(vllm, plugins, *place, "--set", "node_rank=0", "tokens")
                if plugins:
                    second.wait(60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(second.pid, signal.SIGKILL)
    assert uses_ours(found["group_coordinator"].log) >= 2  # the engine's core and the worker of this node
    assert found["group_coordinator"].results["tokens"] == found[""].results["tokens"]


def test_a_killed_worker_ends_the_engine_and_is_named(vllm: Path) -> None:
    """The client has its error within two seconds, the log names rank and process, and no process of the engine stays.

    vLLM gives its processes 5 s to end, and Python takes some of these to collect garbage when the other worker ends.
    """
    ours = run(vllm, "group_coordinator", "--tensor", "2", "kill")
    killed = ours.results["kill"]
    assert killed["seconds"] < 2
    assert [len(killed["ended"][name]) for name in ("core", "workers")] == [1, 1]
    for name, times in killed["ended"].items():
        assert None not in times, f"{name}: {times}"
    (line, *_) = [
        line for line in ours.log.splitlines() if str(killed["victim"]) in line and "rank 1" in line
    ]
    assert "PeerLostError" in line
