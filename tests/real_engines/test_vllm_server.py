"""`vllm serve` with one variable: a client gets the same answers over HTTP as from vLLM as it is."""

import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_server import ask, serve, stream

pytestmark = pytest.mark.engine


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
        with serve(vllm, model, plugins, log) as (address, _):
            got[plugins] = answers(address)
    stock, ours = got.values()
    assert stock["one"] == stock["stream"] != ""
    assert ours == stock
    lines = [line for line in logs["group_coordinator"].read_text().splitlines() if "uses its groups" in line]
    assert len(lines) >= 3
    assert "uses its groups" not in logs[""].read_text()
