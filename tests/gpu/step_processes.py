"""The product in two and four processes that share the GPU: calls, captures, the end; and ranks that die or stop.

Our kernels need no NCCL, but a capture, and a group of more than two, connect it, and NCCL refuses two ranks on one
GPU. So those lives get a stub of NCCL, whose connection comes about and carries nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.notes import Notes
from tests.gpu.processes import run_ranks, values_of
from tests.gpu.step import open_gpu, run_module
from tests.native.nccl_stub.build import build_stub

DEADLINE_S = 3.0
EXPANDABLE = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def lives(notes: Notes, directory: Path, stub: str) -> None:
    """Run whole lives of groups."""
    correct: list[str] = []
    cases: tuple[tuple[str, int, str | None, str, int, int, bool, float], ...] = (
        ("2 processes by IPC, eager, with the real NCCL unconnected", 2, None, "ipc", 5, 0, False, 50.0),
        ("2 processes by IPC, eager and captured", 2, stub, "ipc", 5, 20, False, 60.0),
        ("4 processes by IPC, eager and captured", 4, stub, "ipc", 2, 6, False, 80.0),
        ("2 processes by descriptors, expandable segments", 2, stub, "vmm", 2, 10, True, 60.0),
    )
    for number, (name, world, nccl, kind, rounds, replays, expandable, most) in enumerate(cases):
        with notes.check(name):
            notes.need(15.0, name)
            arguments = {
                "nccl": nccl,
                "kind": kind,
                "rounds": rounds,
                "replays": replays,
                "expandable": expandable,
            }
            outcomes = run_ranks(
                "tests.gpu.bodies:whole",
                world,
                directory / f"life-{number}",
                min(most, notes.left() - 3.0),
                arguments,
                environment=EXPANDABLE if expandable else None,
            )
            found = values_of(outcomes)
            if any(each != found[0] for each in found):
                raise AssertionError(f"the ranks differ: {found}")
            notes.fact(f"paths: {name}", f"{found[0]['memory']} memory, {found[0]['paths']}")
            correct.append(name)
    wanted = {case[0] for case in cases[1:3]}
    notes.goal(
        "two and four processes over CUDA IPC",
        "right bits, eager and captured",
        f"{len(correct)} of {len(cases)} kinds of groups: {'; '.join(correct) or 'none'}",
        wanted <= set(correct),
    )


def groups(notes: Notes, directory: Path, stub: str) -> None:
    """Run the same as a user writes it."""
    for name, replays in (
        ("a group of the coordinator, eager", 0),
        ("a group of the coordinator, captured", 5),
    ):
        with notes.check(name):
            notes.need(15.0, name)
            arguments: dict[str, Any] = {"nccl": stub if replays else None, "replays": replays}
            seconds = min(50.0, notes.left() - 3.0)
            outcomes = run_ranks(
                "tests.gpu.bodies:shipped", 2, directory / f"group-{replays}", seconds, arguments
            )
            found = values_of(outcomes)
            if found[0] != found[1] or found[0]["algorithm"] == "nccl":
                raise AssertionError(f"the ranks found {found}")


def losses(notes: Notes, directory: Path, stub: str) -> None:
    """Kill a rank, and stop one."""
    for how, kind in (("killed", "PeerLostError"), ("stopped", "CommTimeoutError")):
        with notes.check(f"a rank that is {how}"):
            notes.need(DEADLINE_S + 10.0, f"a rank that is {how}")
            arguments = {"nccl": stub, "how": how, "deadline_s": DEADLINE_S}
            outcomes = run_ranks(
                "tests.gpu.bodies:fails",
                2,
                directory / how,
                min(45.0, notes.left() - 3.0),
                arguments,
                wait_for=[0],
            )
            (found,) = values_of(outcomes, [0])
            seconds = notes.figure(
                f"a {how} rank: until the error, deadline {DEADLINE_S:.0f} s", found["seconds"], "s"
            )
            told = f"{found['kind']} naming {found['ranks']} after {seconds:.2f} s"
            # Behind the kernels' deadline the ranks still ask each other who it was.
            is_right = found["kind"] == kind and 1 in found["ranks"] and seconds < DEADLINE_S + 3.0
            if how == "killed":
                is_in_time = is_right and seconds <= DEADLINE_S
                notes.goal(
                    "a killed rank", f"an error within the deadline of {DEADLINE_S:.0f} s", told, is_in_time
                )
            if not is_right:
                raise AssertionError(f"expected {kind}: {told}: {found['text']}")


def run(notes: Notes) -> None:
    """Run the step."""
    # The ranks open the device themselves; this process must not hold a context meanwhile.
    open_gpu().close()
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        directory = Path(name)
        stub = str(build_stub(directory))
        lives(notes, directory, stub)
        losses(notes, directory, stub)
        groups(notes, directory, stub)


if __name__ == "__main__":
    sys.exit(run_module(run, sys.argv[1:]))
