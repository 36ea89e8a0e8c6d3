"""The benchmarks' own logic: percentiles, noise, comparisons, thresholds, files, plots and arguments."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("rich")
pytest.importorskip("numpy")

from benchmarks import __main__ as command
from benchmarks import comparing, results, running, tables, tuning
from benchmarks.measuring import _last_alike
from benchmarks.results import LEVELS, Machine, Measurement, Region, Results, Skipped

ROOT = Path(__file__).parents[3]

MACHINE = Machine(
    cpu="one",
    cores=2,
    all_cores=2,
    memory_gib=8.0,
    kernel="Linux",
    python="3.11",
    packages={"torch": "2"},
    gpus=[],
)


def measured(time_us: float = 10.0, rounds: list[float] | None = None, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "case": "all_reduce",
        "variant": "float32",
        "implementation": "ours",
        "world_size": 2,
        "nbytes": 1 << 10,
        "algorithm": "one-shot",
        "reason": "two ranks",
        "calls": 100,
        "percentiles_us": [time_us * (0.5 + level / 100) for level in LEVELS],
        "rounds_us": rounds or [time_us] * 5,
        "cpu_us": time_us,
        "cpu_percent": 50.0,
        "rate_per_s": 1000.0,
    }
    return Measurement(**{**fields, **changes})


def a_run(*measurements: Measurement, **changes: Any) -> Results:
    fields: dict[str, Any] = {
        "schema": results.SCHEMA_VERSION,
        "date": "2026-01-02 03:04 UTC",
        "took_s": 1.0,
        "is_quick": False,
        "machine": MACHINE,
        "measurements": list(measurements),
    }
    return Results(**{**fields, **changes})


def full_run() -> Results:
    """Return a run with figures for every plot."""
    found = []
    for whose, factor in (("ours", 1.0), ("torch gloo", 40.0)):
        for world_size in (2, 4):
            found += [
                measured(factor * nbytes**0.5, implementation=whose, world_size=world_size, nbytes=nbytes)
                for nbytes in (1 << 10, 8 << 10, 16 << 10, 1 << 20)
            ]
            found.append(
                measured(
                    factor,
                    case="scaling",
                    variant="barrier",
                    nbytes=None,
                    implementation=whose,
                    world_size=world_size,
                )
            )
        found.append(
            measured(factor, case="queue", variant="tiny, 2 ms apart", nbytes=None, implementation=whose)
        )
        found += [
            measured(
                case="waiting", variant=f"{rate}", nbytes=None, implementation=whose, rate_per_s=float(rate)
            )
            for rate in (10, 100, 1000)
        ]
    regions = [
        Region(
            operation="all_reduce", world_size=4, first_bytes=1024, last_bytes=8192, algorithm="a", reason="r"
        ),
        Region(
            operation="all_reduce",
            world_size=4,
            first_bytes=8196,
            last_bytes=1 << 20,
            algorithm="b",
            reason="r",
        ),
    ]
    return a_run(*found, regions=regions, skipped=[Skipped(what="graphs", reason="no device")])


# --- percentiles --------------------------------------------------------------------------------------------


def test_percentiles_lie_between_neighbours_in_proportion() -> None:
    """A percentile is interpolated between its neighbours; 0 and 100 are the ends."""
    assert results.percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert results.percentile([1.0, 2.0, 3.0, 4.0], 0) == 1.0
    assert results.percentile([1.0, 2.0, 3.0, 4.0], 100) == 4.0
    assert results.percentile([7.0], 99) == 7.0


def test_percentiles_do_not_need_order() -> None:
    """Percentiles do not need sorted samples."""
    found = results.percentiles([float(value) for value in reversed(range(101))])
    assert found == [pytest.approx(level) for level in LEVELS]


def test_no_samples_have_no_percentile() -> None:
    """An empty list raises instead of giving zero."""
    with pytest.raises(ValueError, match="no values"):
        results.percentile([], 50)


def test_bandwidth_is_bytes_by_time() -> None:
    """1 KB in 10 µs is 0.1 GB/s; a case without bytes has no bandwidth."""
    assert measured(10.0).bandwidth_gb_s == pytest.approx(0.1024)
    assert measured(10.0, nbytes=None).bandwidth_gb_s is None


# --- files --------------------------------------------------------------------------------------------------


def test_results_survive_a_file(tmp_path: Path) -> None:
    """A file gives back what was written, to four digits."""
    run = full_run()
    results.write_results(tmp_path / "new" / "results.json", run)
    read = results.read_results(tmp_path / "new")
    assert read.machine == run.machine
    assert read.regions == run.regions
    assert read.skipped == run.skipped
    assert [each.key for each in read.measurements] == [each.key for each in run.measurements]
    assert read.measurements[0].at(99) == pytest.approx(run.measurements[0].at(99), rel=1e-3)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "holds no readable results"),
        ("{}", "holds no readable results"),
        ('{"schema":', "holds no readable results"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, text: str) -> None:
    """An error names a file that is not a result file."""
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(results.BenchmarkError, match=text):
        results.read_results(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    """A file of another version is refused, even if its fields look right."""
    path = tmp_path / "results.json"
    written = msgspec.to_builtins(full_run())
    written["schema"] += 1
    path.write_bytes(msgspec.json.encode(written))
    with pytest.raises(results.BenchmarkError, match="version 2, this program reads version 1"):
        results.read_results(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    """The error contains the path."""
    with pytest.raises(results.BenchmarkError, match=re.escape(str(tmp_path))):
        results.read_results(tmp_path)


def test_the_machine_is_described() -> None:
    """The description holds the processor's name, the cores and the version of torch."""
    found = results.describe_machine()
    assert found.cpu
    assert 1 <= found.cores <= found.all_cores
    assert "torch" in found.packages


# --- what got slower ----------------------------------------------------------------------------------------


def test_noise_is_zero_where_rounds_are_alike() -> None:
    """Equal rounds have no noise, and neither has a single round."""
    assert comparing.noise_of([5.0]) == 0.0
    assert comparing.noise_of([5.0] * 5) == 0.0


def test_one_disturbed_round_is_no_noise() -> None:
    """Of five rounds one outlier is ignored."""
    assert comparing.noise_of([10.0, 10.1, 9.9, 10.05, 500.0]) < 0.2


def test_few_rounds_are_judged_by_their_range() -> None:
    """With three rounds the noise is their whole range."""
    assert comparing.noise_of([10.0, 10.0, 20.0]) == pytest.approx(10 / 1.693)


def verdict_of(before: Measurement, after: Measurement, least_share: float = 0.1) -> str:
    (change,) = comparing.changes_between(a_run(before), a_run(after), least_share)
    return change.verdict


def test_a_clear_change_is_told() -> None:
    """Twice the time is slower, half of it faster, five percent is no change."""
    assert verdict_of(measured(10.0), measured(20.0)) == "slower"
    assert verdict_of(measured(20.0), measured(10.0)) == "faster"
    assert verdict_of(measured(10.0), measured(10.5)) == "same"
    assert verdict_of(measured(10.0), measured(10.5), 0.01) == "slower"


def test_a_change_within_the_noise_is_none() -> None:
    """A change smaller than the spread of the rounds in either run does not count."""
    noisy = [7.0, 9.0, 10.0, 12.0, 14.0]
    assert verdict_of(measured(10.0, noisy), measured(15.0)) == "same"
    assert verdict_of(measured(10.0), measured(15.0, [1.5 * each for each in noisy])) == "same"
    assert verdict_of(measured(10.0, noisy), measured(30.0)) == "slower"


def test_only_what_both_runs_have_is_compared() -> None:
    """A case that only one run has is not compared."""
    changes = comparing.changes_between(a_run(measured()), a_run(measured(), measured(case="barrier")))
    assert [each.after.case for each in changes] == ["all_reduce"]


def test_only_ours_fails_a_comparison() -> None:
    """A slower peer says something about the machine and does not fail the comparison."""
    slow = [measured(implementation=whose) for whose in ("torch gloo", "ours, spin")]
    changes = comparing.changes_between(a_run(slow[0]), a_run(measured(90.0, implementation="torch gloo")))
    assert not comparing.has_got_slower(changes)
    changes = comparing.changes_between(a_run(slow[1]), a_run(measured(90.0, implementation="ours, spin")))
    assert comparing.has_got_slower(changes)


def test_compare_exits_by_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0: nothing slower, 1: something slower, 2: nothing to compare."""
    for name, run in (
        ("a", a_run(measured(10.0))),
        ("b", a_run(measured(30.0))),
        ("c", a_run(measured(case="barrier"))),
    ):
        results.write_results(tmp_path / name / "results.json", run)
    assert command.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "slower" in capsys.readouterr().out
    assert command.main(["compare", str(tmp_path / "b"), str(tmp_path / "a")]) == 0
    assert command.main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 2
    assert "no figure in common" in capsys.readouterr().err


# --- thresholds ---------------------------------------------------------------------------------------------

KB = 1 << 10
SIZES = (4 * KB, 16 * KB, 64 * KB, 256 * KB)


def times(*values: float) -> dict[int, float]:
    return dict(zip(SIZES, values, strict=True))


def test_each_algorithm_gets_the_band_where_it_is_fastest() -> None:
    """Each algorithm gets its sizes: one-shot small, two-shot middle, NCCL the rest."""
    found = tuning.bands(
        {
            "nccl": times(20, 21, 30, 40),
            "push_one_shot": times(5, 8, 40, 160),
            "push_two_shot": times(9, 10, 20, 60),
        }
    )
    assert found == [("push_one_shot", 16 * KB), ("push_two_shot", 64 * KB)]


def test_nccl_alone_needs_no_row() -> None:
    """Without a size at which ours is faster there is no row."""
    assert tuning.bands({"nccl": times(1, 1, 1, 1), "push_one_shot": times(2, 2, 2, 2)}) == []


def test_the_last_size_may_be_ours() -> None:
    """If ours is fastest up to the end, the limit is the largest measured size."""
    found = tuning.bands({"nccl": times(9, 9, 9, 9), "push_one_shot": times(2, 2, 2, 2)})
    assert found == [("push_one_shot", 256 * KB)]


def test_one_odd_size_makes_no_band() -> None:
    """A single size at which another algorithm wins by little does not split a band."""
    found = tuning.bands(
        {
            "nccl": times(50, 50, 50, 50),
            "push_one_shot": times(5, 10, 20, 80),
            "push_two_shot": times(9, 9.9, 40, 100),
        }
    )
    assert found == [("push_one_shot", 64 * KB)]


def test_an_algorithm_that_cannot_carry_a_size_is_not_chosen_for_it() -> None:
    """An algorithm is not chosen for sizes beyond its memory, which were not measured."""
    one_shot = dict.fromkeys(SIZES[:2], 1.0)
    found = tuning.bands({"nccl": times(9, 9, 9, 9), "push_one_shot": one_shot})
    assert found == [("push_one_shot", 16 * KB)]


def test_equal_thresholds_of_both_modes_are_one_row() -> None:
    """Rows are merged only if both modes have equal thresholds."""

    def timings(mode: tuning.Mode, two_shot: float) -> list[tuning.Timing]:
        table = {"nccl": (9, 9, 9, 9), "push_one_shot": (1, 8, 20, 50), "push_two_shot": (3, 3, two_shot, 50)}
        return [
            tuning.Timing("all_reduce", name, 4, mode, size, value)
            for name, values in table.items()
            for size, value in zip(SIZES, values, strict=True)
        ]

    rows = tuning.thresholds_of([*timings("eager", 30), *timings("graph", 3)])
    assert {(row.algorithm, row.mode, row.max_bytes) for row in rows} == {
        ("push_one_shot", "any", 4 * KB),
        ("push_two_shot", "eager", 16 * KB),
        ("push_two_shot", "graph", 64 * KB),
    }
    assert all(row.world_size == 4 and row.operation == "all_reduce" for row in rows)


def test_tune_without_devices_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without devices `tune` exits with status 2 and writes no file."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["tune", "--out", str(tmp_path / "policy.json")]) == 2
    assert "0 here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- pictures and tables ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_picture_is_drawn(tmp_path: Path) -> None:
    """Every plot is written as non-empty PNG and SVG, in a process of its own as matplotlib keeps fonts open."""
    pytest.importorskip("matplotlib")
    results.write_results(tmp_path / "results.json", full_run())
    draw = [sys.executable, "-m", "benchmarks", "plot", str(tmp_path)]
    printed = subprocess.run(draw, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    files = [Path(line) for line in printed.splitlines()]
    pictures = ("latency_by_size", "latency_distribution", "cpu_by_rate", "latency_by_ranks")
    assert {path.name for path in files} == {f"{name}.{kind}" for name in pictures for kind in ("png", "svg")}
    assert all(path.parent == tmp_path and path.stat().st_size > 5000 for path in files)


def test_a_run_without_figures_has_no_pictures(tmp_path: Path) -> None:
    """A single measurement draws no plot."""
    plots = pytest.importorskip("benchmarks.plots")
    pytest.importorskip("matplotlib")
    assert plots.draw_all(a_run(measured(case="creation")), tmp_path) == []


def test_bands_touch() -> None:
    """The edge between two algorithms lies between the last size of one and the first of the next."""
    plots = pytest.importorskip("benchmarks.plots")
    bands = plots.edges_of(full_run().regions, 512, 1 << 21)
    assert [name for *_, name in bands] == ["a", "b"]
    assert bands[0][0] == 512
    assert bands[0][1] == bands[1][0] == pytest.approx(8194, abs=1)
    assert bands[1][1] == 1 << 21


def test_the_edge_of_a_region_is_found() -> None:
    """The edge is found by doubling and then halving."""
    assert _last_alike(lambda nbytes: nbytes <= 393216, 1024, 1 << 26) == 393216
    assert _last_alike(lambda nbytes: nbytes <= 1024, 1024, 1 << 26) == 1024
    assert _last_alike(lambda _: True, 1024, 1 << 26) == 1 << 26


def test_times_and_sizes_are_written_for_people() -> None:
    """Times and sizes are shown with three digits and a unit."""
    assert tables.time_text(4.034) == "4.03 µs"
    assert tables.time_text(12_340.0) == "12.3 ms"
    assert tables.bytes_text(64 << 10) == "64 KB"
    assert tables.bytes_text(None) == ""


def test_tables_are_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show` prints a run's tables, with the cases that were not measured."""
    results.write_results(tmp_path / "results.json", full_run())
    assert command.main(["show", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "one-shot: two ranks" in printed
    assert "not measured: graphs: no device" in printed


# --- arguments ----------------------------------------------------------------------------------------------


def test_cases_are_chosen_in_their_own_order() -> None:
    """Cases run in their own order, whatever the order of the arguments."""
    assert running.chosen_cases("queue, barrier") == ["barrier", "queue"]
    assert running.chosen_cases("") == list(running.CASES)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "--cases", "barier"], "unknown case 'barier'"),
        (["--world", "1"], "at least 2"),
        (["--cases", "scaling", "--scale-to", "1"], "--scale-to is 1"),
        (["show", "/nowhere"], "cannot read"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong arguments give one line and exit status 2."""
    assert command.main(arguments) == 2
    told = capsys.readouterr().err
    assert text in told
    assert told.count("\n") == 1


def test_no_peers_is_no_error() -> None:
    """An ordinary checkout has no peers; a named folder without peers is an error."""
    implementations = pytest.importorskip("benchmarks.implementations")
    with pytest.raises(results.BenchmarkError, match="not installed"):
        implementations.vllm_class(None)
    with pytest.raises(results.BenchmarkError, match="there is no /nowhere/vllm"):
        implementations.vllm_class(Path("/nowhere"))


# --- one run ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_quick_run_measures_ours_and_torch(tmp_path: Path) -> None:
    """Two processes and one case give a file with both implementations and the slowest rank."""
    arguments = ["--quick", "--cases", "barrier", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = results.read_results(tmp_path)
    assert run.is_quick
    assert {each.implementation for each in run.measurements} == {"ours", "torch gloo"}
    for each in run.measurements:
        assert each.world_size == 2
        assert len(each.rounds_us) == 2
        assert 0 < each.at(0) <= each.at(50) <= each.at(100) < math.inf
    assert [each.what for each in run.skipped] == ["vllm"]
