"""The commands of `python -m coordinator`: `info`, `check`, `demo`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

# Beyond this a host is not what is being tried.
MOST_RANKS = 64
# The contract of a device communicator by its calls, and what the host plane carries.
CHECKED = (
    *("all_gather", "all_gatherv", "gather", "broadcast", "all_reduce", "all_reduce_", "autograd"),
    *("reduce_scatter", "reduce_scatterv", "reduce_scatterv_into_output", "reduce", "scatter", "all_to_all"),
    *("send and recv", "refusals", "prepare_buffers", "barrier", "objects", "tensor dicts", "queue"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 if all is well, 1 if not, 2 for a wrong command line."""
    options = _parser().parse_args(arguments)
    if options.command == "info":
        from coordinator.cli.info import show_info

        return show_info(as_json=options.json, tries=not options.no_start)
    if options.command == "rank":
        from coordinator.cli.local_ranks import run_rank

        return run_rank(
            options.job, options.rank, options.ranks, options.directory, options.launcher, options.only
        )
    from coordinator.cli.local_ranks import run_job

    return run_job(options.command, options.ranks, options.timeout, getattr(options, "only", []))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator",
        description="Parallel groups for LLM serving: see what is here, and try it.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{info,check,demo}")
    info = commands.add_parser("info", help="versions, devices, libraries and the way that calls would take")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.add_argument(
        "--no-start", action="store_true", help="do not start two ranks to see that groups work here"
    )
    for name, help_ in (
        ("check", "start ranks on this host and verify every collective; exit status 1 if one is wrong"),
        ("demo", "start ranks on this host and show what a group can do, with times"),
    ):
        command = commands.add_parser(name, help=help_)
        command.add_argument("-n", "--ranks", type=_ranks, default=2, help="how many (default: 2)")
        command.add_argument(
            "--timeout", type=_seconds, default=600.0, help="give up after so many seconds (default: 600)"
        )
        if name == "check":
            command.add_argument(
                "--only",
                action="append",
                default=[],
                choices=CHECKED,
                metavar="PART",
                help="such as all_reduce",
            )
    # What `check` and `demo` start; of no use to anybody else.
    rank = commands.add_parser("rank")
    rank.add_argument("job", choices=("check", "demo", "start-up"))
    rank.add_argument("--rank", type=int, required=True)
    rank.add_argument("--ranks", type=int, required=True)
    rank.add_argument("--directory", type=Path, required=True)
    rank.add_argument("--launcher", type=int, required=True)
    rank.add_argument("--only", action="append", default=[])
    return parser


def _ranks(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:4]) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {MOST_RANKS}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds up to a day")
    return seconds
