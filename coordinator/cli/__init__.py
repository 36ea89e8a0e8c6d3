"""The commands of `python -m coordinator`, of which `--help` shows a list."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

# Upper limit of `--ranks`, far above the number of devices on one host.
MOST_RANKS = 64
# The parts of `check`: the calls of a device communicator, then those of the host plane.
CHECKED = (
    *("all_gather", "all_gatherv", "gather", "broadcast", "all_reduce", "all_reduce_", "autograd"),
    *("reduce_scatter", "reduce_scatterv", "reduce", "scatter", "all_to_all", "all_reduce_into_output"),
    *("reduce_scatterv_into_output", "all_gatherv_into_output", "all_to_all_into_output"),
    *("fused", "send and recv", "refusals", "prepare_buffers", "barrier", "objects", "tensor dicts", "queue"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 for success, 1 for a failure, 2 for a wrong command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "check":
        _complete_check(parser, options)
    if options.command == "check" and options.hosts:
        return _check_hosts(options)
    if options.command == "info":
        from coordinator.cli.info import show_info

        return show_info(as_json=options.json, tries=not options.no_start, pids=options.pid)
    if options.command == "top":
        from coordinator.cli.top import show_top

        return show_top(once=options.once, pids=options.pid, interval_s=options.interval)
    if options.command == "dump":
        from coordinator.cli.dump import write_dump

        return write_dump(out=options.out, pids=options.pid)
    if options.command == "trace":
        from coordinator.cli.trace import write_trace

        return write_trace(options.out, options.directories, options.pid)
    if options.command == "metrics":
        from coordinator.cli.metrics import export_metrics

        return export_metrics(listen=options.listen, textfile=options.textfile, interval_s=options.interval)
    if options.command == "stragglers":
        from coordinator.cli.stragglers import watch_stragglers

        return watch_stragglers(options.window, options.pid, logs=options.log)
    if options.command == "blame":
        from coordinator.cli.blame import blame

        return blame(options.directory, options.pid, waiting_s=options.waiting, as_json=options.json)
    from coordinator.cli.local_ranks import run_job, run_rank

    if options.command == "rank":
        return run_rank(
            options.job,
            options.rank,
            options.ranks,
            options.directory,
            options.launcher,
            options.only,
            options.hold,
        )
    return run_job(
        options.command,
        options.ranks,
        options.timeout,
        getattr(options, "only", []),
        hold_s=getattr(options, "hold", 0.0),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator",
        description="Parallel groups for LLM serving: verify this installation, try it, and see what ranks do.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="show versions, devices, libraries and the chosen algorithms")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.add_argument(
        "--no-start", action="store_true", help="skip the trial start of two ranks on this host"
    )
    info.add_argument(
        "--pid",
        type=_pid,
        action="append",
        default=[],
        help="show only what the groups of this process did; may be repeated",
    )
    _add_check(commands)
    _add_demo(commands)
    _add_top_and_dump(commands)
    _add_trace(commands)
    _add_stragglers(commands)
    _add_metrics(commands)
    _add_blame(commands)
    _add_rank(commands)
    return parser


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="start ranks on this host and verify every collective, or with --hosts check the way between hosts; exit "
        "status 1 if something is wrong",
    )
    # `_complete_check` fills in what depends on --hosts.
    check.add_argument("-n", "--ranks", type=_ranks, help="number of ranks (default: 2)")
    check.add_argument(
        "--timeout",
        type=_seconds,
        help="give up after this many seconds (default: 600; with --hosts for each step, default: 10)",
    )
    check.add_argument(
        "--only",
        action="append",
        default=[],
        choices=CHECKED,
        metavar="PART",
        help="check only this part, such as all_reduce; may be repeated",
    )
    _add_hosts(check)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo", help="start ranks on this host and show the calls of a group, with their times"
    )
    demo.add_argument("-n", "--ranks", type=_ranks, default=2, help="number of ranks (default: 2)")
    demo.add_argument(
        "--timeout", type=_seconds, default=600.0, help="give up after this many seconds (default: 600)"
    )
    demo.add_argument(
        "--hold",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="go on making calls for so many seconds, and print the command that watches them",
    )


def _add_rank(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    # Internal: `check`, `demo` and `info` start their ranks with this command.
    rank = commands.add_parser("rank")
    rank.add_argument("job", choices=("check", "demo", "start-up"))
    rank.add_argument("--rank", type=int, required=True)
    rank.add_argument("--ranks", type=int, required=True)
    rank.add_argument("--directory", type=Path, required=True)
    rank.add_argument("--launcher", type=int, required=True)
    rank.add_argument("--only", action="append", default=[])
    rank.add_argument("--hold", type=float, default=0.0)


def _add_hosts(check: argparse.ArgumentParser) -> None:
    check.add_argument(
        "--hosts",
        action="store_true",
        help="run it on every rank, with the launcher of the job: say where a start on several hosts stops, and "
        "measure "
        "each pair of hosts",
    )
    hosts = check.add_argument_group("with --hosts")
    hosts.add_argument(
        "--init-method",
        metavar="URL",
        help="how the ranks meet: env:// (default), tcp://HOST:PORT, slurm://, mpi://HOST:PORT or lws://",
    )
    for name, what in (
        ("rank", "rank of this process"),
        ("world-size", "number of processes"),
        ("local-rank", "index of this process on its host"),
        ("local-world-size", "number of processes per host, for lws://"),
    ):
        hosts.add_argument(
            f"--{name}", type=_index, metavar="N", help=f"{what}, if the launcher does not say it"
        )
    hosts.add_argument("--json", action="store_true", help="print one JSON object; the steps go to stderr")


def _complete_check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options of `check` that contradict each other, and fill in what was not given."""
    only_hosts = ("init_method", "rank", "world_size", "local_rank", "local_world_size")
    given = [name for name in only_hosts if getattr(options, name) is not None] + ["json"] * options.json
    if given and not options.hosts:
        parser.error(f"check: --{given[0].replace('_', '-')} is for --hosts")
    if options.hosts and (options.only or options.ranks is not None):
        parser.error("check: with --hosts the launcher starts the ranks; --ranks and --only are for one host")
    if options.timeout is None:
        options.timeout = 10.0 if options.hosts else 600.0
    if options.ranks is None:
        options.ranks = 2


def _check_hosts(options: argparse.Namespace) -> int:
    from coordinator.cli.hosts import check_hosts
    from coordinator.launchers.launch import Caller

    place = {
        name: -1 if getattr(options, name) is None else getattr(options, name)
        for name in ("rank", "world_size", "local_rank", "local_world_size")
    }
    return check_hosts(
        options.init_method or "env://", Caller(**place), options.timeout, as_json=options.json
    )


def _add_top_and_dump(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    top = commands.add_parser(
        "top", help="show what the ranks on this host do, also while they hang or are stopped"
    )
    top.add_argument("--once", action="store_true", help="print one look as plain text, and end")
    top.add_argument(
        "--pid", type=_pid, action="append", default=[], help="only this process; may be repeated"
    )
    top.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two looks (default: 1)"
    )
    dump = commands.add_parser("dump", help="write all that the ranks on this host show, as JSON")
    dump.add_argument(
        "--out", type=Path, metavar="FILE", help="a file for its user alone (default: standard output)"
    )
    dump.add_argument(
        "--pid", type=_pid, action="append", default=[], help="only this process; may be repeated"
    )


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = commands.add_parser("trace", help="write the last calls of the ranks as a trace for Perfetto")
    trace.add_argument("out", type=Path, metavar="OUT.json", help="the file; with .gz it is compressed")
    trace.add_argument(
        "directories",
        type=Path,
        nargs="*",
        metavar="DIR",
        help="record directories, of one host or several (default: the processes on this host)",
    )
    trace.add_argument(
        "--pid", type=_pid, action="append", default=[], help="only this process; may be repeated"
    )


def _add_metrics(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    metrics = commands.add_parser("metrics", help="export what the ranks of this host do, for Prometheus")
    where = metrics.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen", metavar="HOST:PORT", help="serve GET /metrics, such as on 127.0.0.1:9464")
    where.add_argument(
        "--textfile", type=Path, metavar="DIR", help="write a file for node_exporter's textfile collector"
    )
    metrics.add_argument(
        "--interval", type=_seconds, default=15.0, help="seconds between two files (default: 15)"
    )


def _add_stragglers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    stragglers = commands.add_parser(
        "stragglers", help="name the ranks that are late all the time; exit status 3 if there is one"
    )
    stragglers.add_argument(
        "--window",
        type=_seconds,
        default=60.0,
        help="seconds of a window, of which it takes two (default: 60)",
    )
    stragglers.add_argument(
        "--log", action="store_true", help="go on until Ctrl-C, and write a line for each window"
    )
    stragglers.add_argument(
        "--pid", type=_pid, action="append", default=[], help="only this process; may be repeated"
    )


def _add_blame(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    blame = commands.add_parser(
        "blame", help="say who is at fault where ranks hang or have died; exit status 3 if somebody is named"
    )
    where = blame.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "directory", type=Path, nargs="*", default=[], metavar="DIR", help="setting record_dir"
    )
    where.add_argument("--live", action="store_true", help="look at the processes of this host")
    blame.add_argument("--json", action="store_true", help="print one JSON object")
    blame.add_argument(
        "--pid", type=_pid, action="append", default=[], help="only the job of this process; may be repeated"
    )
    blame.add_argument(
        "--waiting",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="a call of a live process counts as a wait after so many seconds (default: 1)",
    )


def _ranks(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:4]) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_RANKS}")
    return int(text)


def _index(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 999999999")
    return int(text)


def _pid(text: str) -> int:
    # The kernel's own limit is 2^22.
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= 1 << 22:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds up to 86400, one day")
    return seconds
