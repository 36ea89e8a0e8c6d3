"""The work of the ranks of `check`, `demo` and `info`. Only rank 0 prints."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from coordinator import testing
from coordinator.diagnosis.top.command import top_command
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)

__all__ = ["JOBS", "REPORT", "JobOptions"]

REPORT: Final = "start-up.txt"
# Bytes per call, from the activations of a decode step to those of a prefill.
SIZES: Final = (1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20)
# Calls per median. 21 calls of 16 MiB take less than a second.
REPEATS: Final = 21
# Between the steps of the demo while it holds: ranks of an engine compute as long as this.
STEP_S: Final = 0.01


class JobOptions(msgspec.Struct, frozen=True):
    """What the user asks of a job.

    Attributes:
        only: Parts of `check` to run; empty for all.
        hold_s: Seconds for which `demo` makes calls at its end.
    """

    only: tuple[str, ...] = ()
    hold_s: float = 0.0


def check(rank: int, ranks: int, directory: Path, options: JobOptions) -> int:
    """Verify the collectives, objects, tensor dicts and queues of a group of all ranks."""
    with _world(rank, ranks, directory) as group:
        group.enable_broadcaster()
        say = _speaker(rank)
        say(
            f"checking a group of {ranks} on {group.device}, algorithm: {group.device_communicator.algorithm}"
        )
        failed = 0
        for name, part in _parts(group).items():
            if options.only and name not in options.only:
                continue
            started = time.perf_counter()
            text = ""
            try:
                part()
            except (testing.ConformanceError, _WrongResultError) as wrong:
                text = str(wrong)
            took_ms = (time.perf_counter() - started) * 1e3
            # Exchange the findings, so that the exit status is the same on all ranks.
            wrongs = [each for each in group.all_gather_object(text) if each]
            failed += bool(wrongs)
            say(f"  {name:<28} {'WRONG' if wrongs else 'ok':<6} {took_ms:8.1f} ms")
            for each in dict.fromkeys(wrongs):
                say(f"    {each}")
        say(f"failed parts: {failed}" if failed else "all parts are correct")
        return 1 if failed else 0


def _parts(group: GroupCoordinator) -> dict[str, Callable[[], None]]:
    """Return the parts of the conformance suite, for two ranks or more, and then those of the host plane."""
    clause = partial(
        testing.check_device_communicator,
        group.device_communicator,
        host=group,
        destroy=False,
        timeout_s=30.0,
    )
    contract = testing.PARTS if group.world_size > 1 else ()
    return {
        **{name: partial(clause, parts=(name,)) for name in contract},
        "barrier": group.barrier,
        "objects": partial(_check_objects, group),
        "tensor dicts": partial(_check_tensor_dicts, group),
        "queue": partial(_check_queue, group),
    }


class _WrongResultError(Exception):
    """A call returned something else than was sent."""


def _demand(is_right: bool, text: str) -> None:
    if not is_right:
        raise _WrongResultError(text)


def _check_objects(group: GroupCoordinator) -> None:
    values: list[Any] = [None, True, -1, 2.5, "text", b"bytes", [1, (2, 3)], {"key": {"nested": [1]}}]
    for src in range(group.world_size):
        got = group.broadcast_object(values if group.rank_in_group == src else None, src)
        _demand(got == values, f"broadcast_object from rank {src} returned {got!r}")
    gathered = group.all_gather_object(group.rank_in_group)
    _demand(gathered == list(range(group.world_size)), f"all_gather_object returned {gathered!r}")


def _check_tensor_dicts(group: GroupCoordinator) -> None:
    tensor = torch.arange(5000, dtype=torch.float32, device=group.device)
    sent = {"hidden": tensor, "step": 7, "empty": tensor[:0]}
    if group.world_size > 1:
        if group.is_first_rank:
            group.send_tensor_dict(sent, dst=1)
        elif group.rank_in_group == 1:
            got = group.recv_tensor_dict(src=0)
            _demand(
                got is not None and torch.equal(got["hidden"], tensor),
                "recv_tensor_dict returned wrong values",
            )
    back = group.broadcast_tensor_dict(sent if group.is_first_rank else None, 0)
    _demand(back is not None and back["step"] == 7, f"broadcast_tensor_dict returned {back!r}")


def _check_queue(group: GroupCoordinator) -> None:
    for step in range(200):
        got = group.broadcast_object({"step": step} if group.is_first_rank else None)
        _demand(got == {"step": step}, f"message {step} of the queue was {got!r}")


def demo(rank: int, ranks: int, directory: Path, options: JobOptions) -> int:
    """Show the calls of a group with their times and algorithms."""
    say = _speaker(rank)
    started = time.perf_counter()
    with _world(rank, ranks, directory) as group:
        group.enable_broadcaster()
        pids = group.all_gather_object(os.getpid())
        say(f"{group!r}")
        say(
            f"joined the world and created the group in {(time.perf_counter() - started) * 1e3:.0f} ms; "
            f"all times are medians on rank 0\n"
        )
        say(f"{'all_reduce':<24}{'size':>9}{'time':>12}{'bandwidth':>14}   algorithm")
        for nbytes in SIZES:
            tensor = torch.ones(nbytes // 4, device=group.device)
            took_s = _median_s(group, lambda tensor=tensor: group.all_reduce(tensor))  # type: ignore[misc]
            path = group.device_communicator.path("all_reduce", nbytes, tensor.dtype)
            say(
                f"{'':<24}{_size(nbytes):>9}{took_s * 1e6:>9.1f} us{nbytes / took_s / 1e9:>9.2f} GB/s"
                f"   {path.algorithm}: {path.reason}"
            )
        say("")
        step = {"step": 1, "tokens": list(range(64)), "finished": []}
        calls: dict[str, Callable[[], Any]] = {
            "barrier": group.barrier,
            "broadcast_object": lambda: group.broadcast_object(step),
            "all_gather_object": lambda: group.all_gather_object(rank),
            "broadcast_tensor_dict": lambda: group.broadcast_tensor_dict({"hidden": torch.ones(8192)}),
        }
        for name, call in calls.items():
            say(f"{name:<33}{_median_s(group, call) * 1e6:>9.1f} us")
        if options.hold_s:
            say(
                f"\nmaking calls for {options.hold_s:g} s; watch it from another terminal: {top_command(pids)}"
            )
            _hold(group, options.hold_s)
        elif ranks > 1:
            say(
                "\nNext: `python -m coordinator demo --hold 60` goes on making calls, which `python -m coordinator "
                "top` shows.\n`python -m coordinator check` verifies every collective; README.md has a first program."
            )
    return 0


def _hold(group: GroupCoordinator, hold_s: float) -> None:
    """Make the calls of an engine's steps for as long as rank 0's clock says."""
    tensor = torch.ones(8192, device=group.device)
    end_s = time.monotonic() + hold_s
    while group.broadcast_object(time.monotonic() < end_s if group.is_first_rank else None):
        for _ in range(4):
            group.all_reduce(tensor)
        time.sleep(STEP_S)


def start_up(rank: int, ranks: int, directory: Path, options: JobOptions) -> int:  # noqa: ARG001
    """Create a world and its groups; rank 0 writes its start-up report to the directory."""
    with _world(rank, ranks, directory):
        tensor = 2 if ranks % 2 == 0 else 1
        layout = ParallelLayout(tensor=tensor, pipeline=ranks // tensor)
        with ParallelGroups.create(layout) as groups:
            if rank == 0:
                (directory / REPORT).write_text(str(groups.startup_report()), encoding="utf-8")
    return 0


def _median_s(group: GroupCoordinator, call: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        group.barrier()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


@contextmanager
def _world(rank: int, ranks: int, directory: Path) -> Iterator[GroupCoordinator]:
    """Yield the group of all ranks, on CUDA devices if every rank can have its own."""
    has_devices = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    backend, method = "nccl" if has_devices else "gloo", f"file://{directory}/rendezvous"
    init_distributed_environment(ranks, rank, method, local_rank=rank, backend=backend)
    try:
        yield get_world_group()
    finally:
        destroy_distributed_environment()


def _speaker(rank: int) -> Callable[[str], None]:
    """Return a function that prints a line on rank 0 and does nothing on other ranks."""
    return partial(print, flush=True) if rank == 0 else lambda _text: None


JOBS: Final = {"check": check, "demo": demo, "start-up": start_up}
