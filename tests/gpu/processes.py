"""Ranks as processes: each runs one function of a module and says in a file what it returned or raised."""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "run_ranks", "values_of"]

_MOST_TEXT = 2500


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a rank.

    Attributes:
        rank: Its number.
        value: What its function returned; None if it did not return.
        problem: Why it did not; empty if it did.
        returncode: Of its process; None if it was killed when the time was up.
    """

    rank: int
    value: Any
    problem: str
    returncode: int | None


def run_ranks(
    body: str,
    world_size: int,
    directory: Path,
    seconds: float,
    arguments: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    wait_for: Sequence[int] | None = None,
) -> list[Outcome]:
    """Run `body` ("module:function") on every rank, for at most `seconds`.

    Args:
        body: Called with (rank, world_size, directory, **arguments).
        world_size: Ranks.
        directory: Shared; made here.
        seconds: Then whoever still runs is killed.
        arguments: What JSON can hold.
        environment: Added to that of the ranks.
        wait_for: Only these ranks are waited for, then the others are killed; for ranks that were stopped.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    processes = []
    for rank in range(world_size):
        command = [
            sys.executable,
            "-m",
            "tests.gpu.processes",
            body,
            str(rank),
            str(world_size),
            str(directory),
        ]
        with (directory / f"output-{rank}").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [*command, str(seconds), json.dumps(dict(arguments or {}))],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                )
            )
    awaited = range(world_size) if wait_for is None else wait_for
    try:
        for rank in awaited:
            try:
                processes[rank].wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_outcome(rank, code, directory) for rank, code in enumerate(codes)]


def _outcome(rank: int, code: int | None, directory: Path) -> Outcome:
    said = directory / f"result-{rank}.json"
    if said.exists():
        found = json.loads(said.read_text())
        return Outcome(rank, found["value"], found["problem"], code)
    output = (directory / f"output-{rank}").read_bytes()[-_MOST_TEXT:].decode(errors="replace")
    end = "was killed when the time was up" if code is None else f"ended with {code}"
    return Outcome(rank, None, f"rank {rank} {end}: {output.strip()}", code)


def values_of(outcomes: Sequence[Outcome], ranks: Sequence[int] | None = None) -> list[Any]:
    """Return what the ranks returned; raise with all their problems if one did not."""
    chosen = [each for each in outcomes if ranks is None or each.rank in ranks]
    problems = [each.problem for each in chosen if each.problem]
    if problems:
        raise AssertionError("\n".join(problems))
    return [each.value for each in chosen]


def main(arguments: Sequence[str]) -> int:
    """Be a rank."""
    body, rank, world_size, directory, seconds, given = arguments
    faulthandler.enable()
    # So that a rank that hangs says where before it is killed.
    faulthandler.dump_traceback_later(max(1.0, float(seconds) - 2.0))
    place = Path(directory)
    value, problem = None, ""
    try:
        module, _, name = body.partition(":")
        function = getattr(importlib.import_module(module), name)
        value = function(int(rank), int(world_size), place, **json.loads(given))
    except BaseException:
        problem = f"rank {rank}: {traceback.format_exc()[-_MOST_TEXT:]}"
    part = place / f"result-{rank}.part"
    part.write_text(json.dumps({"value": value, "problem": problem}))
    part.replace(place / f"result-{rank}.json")
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    # Without the interpreter's end: what a broken group left behind must not turn a result into a hang.
    os._exit(1 if problem else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
