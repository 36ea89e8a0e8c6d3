"""What the trace of an engine's step says follows from the scheduler's events."""

import pytest

from benchmarks.engine_trace import analysed, parsed


def switch(core: int, at: float, before: int, state: str, after: int) -> str:
    """Return the line of a switch, as perf prints it."""
    names = f"prev_comm=VLLM::Worker TP prev_pid={before} prev_prio=120 prev_state={state}"
    return f"{before:5} [{core:03}] {at:.6f}: sched:sched_switch: {names} ==> next_comm=a next_pid={after} next_prio=0"


def waking(core: int, at: float, by: int, whom: int) -> str:
    """Return the line of a wake-up."""
    return f"{by:5} [{core:03}] {at:.6f}: sched:sched_waking: comm=VLLM::Worker TP pid={whom} prio=120 target_cpu=000"


# perf prints them by core, so not in order of time.
LINES = (
    switch(0, 1.0, 0, "R", 10),
    waking(0, 1.001, 10, 20),
    switch(0, 1.002, 10, "S", 0),
    switch(0, 1.00316, 0, "R", 10),
    switch(1, 1.0005, 0, "R", 99),
    switch(1, 1.00105, 99, "R+", 20),
    switch(1, 1.00305, 20, "R", 99),
    waking(1, 1.00306, 99, 10),
    "no event at all",
)


def test_who_runs_where_and_who_wakes_whom() -> None:
    """Two steps: the engine's core wakes a worker, which runs on the other core until another process displaces it."""
    rows = analysed(parsed(LINES), {10: "EngineCore", 20: "Worker"}, steps=2)
    core, worker = rows["EngineCore"], rows["Worker"]
    assert core["ms on core"] == {"0": pytest.approx(1.0)}
    assert worker["ms on core"] == {"1": pytest.approx(1.0)}
    assert (core["sleeps"], core["displaced"]) == (0.5, 0)
    assert (worker["sleeps"], worker["displaced"]) == (0, 0.5)
    assert worker["woken by"] == {"EngineCore": 0.5}
    assert core["woken by"] == {"another process": 0.5}
    assert worker["late us, median"] == pytest.approx(50, abs=0.1)
    assert core["late us, p90"] == pytest.approx(100, abs=0.1)


def test_a_process_that_never_runs_has_a_row() -> None:
    """It slept all the time, which is a finding too."""
    assert analysed([], {10: "EngineCore"}, steps=1)["EngineCore"]["late us, median"] is None
