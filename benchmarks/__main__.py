"""`python -m benchmarks`: measure, compare, plot and tune. Without a command it measures everything."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.results import BenchmarkError, Results, read_results, write_results

if TYPE_CHECKING:
    from benchmarks import running

# Ranks of most cases, few enough for a laptop, and the largest world of the case `scaling`.
WORLD: Final = 2
SCALE_TO: Final = 8
OTHERS: Final = {
    "start-up": "start_up",
    "crowds": "crowds",
    "overlap": "overlap",
    "kernel-calls": "kernel_calls",
    "nccl-calls": "nccl_calls",
    "status-calls": "status_calls",
    "rebuild": "rebuild",
    "agreement": "agreement",
    "meeting": "meeting",
    "two-hosts": "two_hosts",
    "start-simulation": "start_simulation",
    "top": "top",
    "training": "training",
    "engines": "engines",
    "load": "engine_load",
    "trace": "engine_trace",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "run")
    if given[0] in OTHERS:
        # These modules parse their own arguments, which our parser would refuse.
        return _run_other(*given)
    options = _parser().parse_args(given)
    try:
        status: int = options.command(options)
    except BenchmarkError as error:
        sys.stderr.write(f"benchmarks: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="measure (the default); under torchrun, in its world")
    run.add_argument("--cases", default="", help="comma-separated names (default: all)")
    run.add_argument(
        "--world", type=int, default=WORLD, help=f"ranks to start on this host (default: {WORLD})"
    )
    run.add_argument(
        "--scale-to", type=int, default=SCALE_TO, help="largest world of `scaling` (default: %(default)s)"
    )
    run.add_argument(
        "--out", type=Path, help="folder for results.json and the plots (default: write no files)"
    )
    run.add_argument("--peers", type=Path, metavar="HOME", help="folder of the peers' venv/ and vllm/")
    run.add_argument(
        "--quick", action="store_true", help="only check that everything runs; ignore the figures"
    )
    run.set_defaults(command=_run)

    compare = commands.add_parser("compare", help="show what became slower by more than the noise")
    compare.add_argument("before", type=Path, help="results.json of a run, or its folder")
    compare.add_argument("after", type=Path)
    compare.add_argument(
        "--least", type=float, default=0.1, help="smallest relative change that counts (default: 0.1)"
    )
    compare.set_defaults(command=_compare)

    plot = commands.add_parser("plot", help="draw the plots of a stored run")
    plot.add_argument("results", type=Path, help="results.json of a run, or its folder")
    plot.add_argument("--out", type=Path, help="folder for the plots (default: that of the results)")
    plot.set_defaults(command=_plot)

    show = commands.add_parser("show", help="print the tables of a stored run")
    show.add_argument("results", type=Path)
    show.set_defaults(command=_show)

    tune = commands.add_parser("tune", help="measure the policy thresholds of this host's CUDA devices")
    tune.add_argument("--out", type=Path, required=True, help="the policy file to write")
    tune.add_argument("--ranks", type=int, help="devices to use (default: all, at most 8)")
    tune.set_defaults(command=_tune)

    for name, module in OTHERS.items():
        commands.add_parser(name, help=f"run benchmarks/{module}.py; -h shows its arguments")

    rank = commands.add_parser("rank")  # internal: `run` starts its ranks with this command
    rank.add_argument("--plan", type=Path, required=True)
    rank.add_argument("--rank", type=int, required=True)
    rank.set_defaults(command=_rank)
    return parser


# --- run --------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from benchmarks import running
    from coordinator.settings import LaunchEnvironment

    cases = running.chosen_cases(options.cases)
    peers = None if options.peers is None else str(options.peers.resolve())
    launch = LaunchEnvironment.from_env()
    world = options.world if launch is None else launch.world_size
    if world < 2:
        raise BenchmarkError(f"the number of ranks is {world}, but must be at least 2")
    plans = _plans(options, cases, peers, world, is_launched=launch is not None)
    is_shown = launch is None or launch.rank == 0
    with _progress(sum(len(plan.cases) for plan in plans), is_shown=is_shown) as (tell, step):
        if launch is not None:
            _, results = running.run_in_world(plans[0], tell, step)
        else:
            results = _run_here(plans, tell, step, is_quick=options.quick)
    if results is not None:
        _keep(results, options.out)
    return 0


def _plans(
    options: argparse.Namespace, cases: list[str], peers: str | None, world: int, *, is_launched: bool
) -> list[running.Plan]:
    """Return one plan per world; unless launched, `scaling` has its own, larger world."""
    from benchmarks.running import SCALING, Plan

    if is_launched:
        return [Plan(world_size=world, cases=cases, is_quick=options.quick, peers=peers)]
    scale_to = min(options.scale_to, 4) if options.quick else options.scale_to
    if scale_to < 2:
        raise BenchmarkError(f"--scale-to is {scale_to}, but must be at least 2")
    first = [name for name in cases if name != SCALING]
    plans = [Plan(world_size=world, cases=first, is_quick=options.quick, peers=peers)] if first else []
    if SCALING in cases:
        plans.append(Plan(world_size=scale_to, cases=[SCALING], is_quick=options.quick))
    return plans


def _run_here(
    plans: list[running.Plan], tell: Callable[[str], None], step: Callable[[], None], *, is_quick: bool
) -> Results:
    from benchmarks.launching import run_here
    from benchmarks.running import Findings, results_of

    start = time.monotonic()
    findings = Findings()
    for plan in plans:
        tell(f"starting {plan.world_size} ranks")
        findings.add(run_here(plan, tell, step))
    return results_of(findings, is_quick=is_quick, took_s=time.monotonic() - start)


@contextmanager
def _progress(total: int, *, is_shown: bool) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Show a progress bar; yield two callbacks, one for the current measurement's name and one for a finished case."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        yield (
            lambda text: progress.update(task, description=text),
            lambda: progress.advance(task),
        )


def _keep(results: Results, out: Path | None) -> None:
    from benchmarks.tables import console_of, show_results

    show_results(results, console_of())
    if out is None:
        return
    write_results(out / "results.json", results)
    from benchmarks.plots import draw_all

    made = [out / "results.json", *draw_all(results, out)]
    print(f"wrote {', '.join(path.name for path in made)} to {out}")


# --- the other commands -----------------------------------------------------------------------------------------------


def _compare(options: argparse.Namespace) -> int:
    from benchmarks.comparing import changes_between, has_got_slower, show_changes
    from benchmarks.tables import console_of

    before, after = read_results(options.before), read_results(options.after)
    changes = changes_between(before, after, options.least)
    if not changes:
        raise BenchmarkError("the two runs have no figure in common, so there is nothing to compare")
    show_changes(before, after, changes, console_of())
    return 1 if has_got_slower(changes) else 0


def _plot(options: argparse.Namespace) -> int:
    from benchmarks.plots import draw_all

    results = read_results(options.results)
    folder = options.results if options.results.is_dir() else options.results.parent
    for path in draw_all(results, options.out or folder):
        print(path)
    return 0


def _show(options: argparse.Namespace) -> int:
    from benchmarks.tables import console_of, show_results

    show_results(read_results(options.results), console_of())
    return 0


def _tune(options: argparse.Namespace) -> int:
    from benchmarks.tune_devices import tune

    return tune(options.out, options.ranks)


def _run_other(name: str, *arguments: str) -> int:
    module = f"benchmarks.{OTHERS[name]}"
    # In a separate process, because the module starts its ranks under its own name.
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode  # noqa: S603 - ours


def _rank(options: argparse.Namespace) -> int:
    from benchmarks.launching import die_with_parent
    from benchmarks.running import run_rank

    die_with_parent()
    run_rank(options.plan, options.rank)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
