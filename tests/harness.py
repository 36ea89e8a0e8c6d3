"""Run a function in several processes with a deadline, and report failures by rank.

`run_ranks` starts new processes for one function. `RankPool` keeps its processes for many functions. Use the
fixtures `ranks2` and `ranks4`, unless a rank is killed or the process itself is under test. What uses `torch.compile`
runs by `run_ranks`, or in the fixture `compilers2`.

A rank's function is at the top level of a test module and starts with
`def body(rank: int, world_size: int, directory: Path, ...)`. `directory` is new for every call and the same for all
ranks, and its path is short enough for a Unix socket. Arguments and results are sent as msgpack, which carries numbers,
text, bytes, lists and dicts; tuples arrive as lists. In ranks warnings are errors. A test fails if a rank leaves
descriptors, threads, children, temporary directories or a default process group, or if one of its threads raised.
"""

import contextlib
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.rank_main import receive, send
from tests.rank_processes import SURVIVOR_GRACE_S, RankProcess

__all__ = ["RankFailureError", "RankPool", "run_ranks"]

GRACE_S = 5.0
"""How long the other ranks may go on after one has failed. The test has failed, but their errors may show why."""

EXIT_S = 20.0
"""How long a process may take to end after its last function has returned."""


class RankFailureError(AssertionError):
    """An error for one or more failed ranks; its text shows each failure.

    Attributes:
        failures: Text of each failure, by rank.
    """

    def __init__(self, what: str, world_size: int, failures: Mapping[int, str]) -> None:
        """Build the text from the failure of each rank."""
        parts = [f"{len(failures)} of {world_size} ranks failed: {what}"]
        parts += [f"--- rank {rank}: {text}" for rank, text in sorted(failures.items())]
        super().__init__("\n".join(parts))
        self.failures = dict(failures)


def run_ranks(
    target: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    expect_dead: Collection[int] = (),
    environ: Mapping[str, str] | None = None,
    fresh: bool = False,
    check_leaks: bool = True,
    while_running: Callable[[Sequence[int]], None] | None = None,
) -> list[Any]:
    """Run `target(rank, world_size, directory, *args)` in `world_size` new processes.

    Args:
        target: A function at the top level of an importable module.
        world_size: Number of processes.
        args: Arguments that msgpack supports.
        timeout_s: Deadline in seconds. Ranks that still run are killed, and the failure shows their Python stacks.
        expect_dead: Ranks that must die without an answer; their result is None.
        environ: Environment variables that differ from this process's.
        fresh: Start a new interpreter for each rank, which costs more than a second of processor time each.
        check_leaks: Whether descriptors, threads, children and directories left by a rank are a failure.
        while_running: A function that this process calls with the process ids by rank once all ranks have started.

    Returns:
        The result of each rank, by rank.

    Raises:
        RankFailureError: A rank raised, died, did not answer in time, ended with an error, or left a process
            behind. No process survives.
    """
    __tracebackhide__ = True
    with RankPool(world_size, environ=environ, fresh=fresh, brief=True, compiles=True) as pool:
        return pool.run(
            target,
            *args,
            timeout_s=timeout_s,
            expect_dead=expect_dead,
            check_leaks=check_leaks,
            while_running=while_running,
        )


class RankPool:
    """Processes that run one function after another; each function gets a new directory.

    After a failure the pool kills the processes, and the next `run` starts new ones. A pool is a context manager.
    """

    def __init__(
        self,
        world_size: int,
        *,
        environ: Mapping[str, str] | None = None,
        fresh: bool = False,
        brief: bool = False,
        compiles: bool = False,
    ) -> None:
        """Prepare a pool of `world_size` processes; the first `run` starts them.

        With `brief` they skip the part of their exit that concerns torch alone, as `rank_main.end_briefly` says. With
        `compiles` a function may use `torch.compile`, as `frame_evaluator` says.
        """
        self.world_size = world_size
        self._environ = dict(environ or {})
        self._fresh = fresh
        self._brief = brief
        self._compiles = compiles
        self._processes: list[RankProcess] = []
        self._directory: Path | None = None

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes and check how they end; kill them after an error."""
        if kind is None:
            self.close()
        else:
            self.kill()

    @property
    def pids(self) -> list[int]:
        """The process ids by rank. The list is empty before the first run and after a failure."""
        return [process.pid for process in self._processes]

    def run(
        self,
        target: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        expect_dead: Collection[int] = (),
        check_leaks: bool = True,
        while_running: Callable[[Sequence[int]], None] | None = None,
    ) -> list[Any]:
        """Run `target` in every process. The arguments are those of `run_ranks`.

        If a rank dies, even as expected, the pool ends all its processes, and the next run starts new ones.
        """
        __tracebackhide__ = True
        name = _name_of(target)
        self._start()
        directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        try:
            for process in self._processes:
                process.forget_output()
                job = {"target": name, "rank": process.number, "world_size": self.world_size, "args": args}
                job |= {"directory": str(directory), "check_leaks": check_leaks, "compiles": self._compiles}
                # `_collect` finds a process that has died since the last run.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    send(process.channel, job)
            if while_running is not None:
                while_running(self.pids)
            values, failures = _collect(self._processes, timeout_s, set(expect_dead))
        except BaseException:
            self.kill()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if failures:
            self.kill()
            raise RankFailureError(name, self.world_size, failures)
        if expect_dead:
            self.close(expect_dead)
        return [values[rank] for rank in range(self.world_size)]

    def close(self, expect_dead: Collection[int] = ()) -> None:
        """Ask every process to end, and check how each ends.

        Raises:
            RankFailureError: A process hangs while it ends, ends with an error, or leaves processes behind.
        """
        __tracebackhide__ = True
        deadline = time.monotonic() + EXIT_S
        for process in self._processes:
            process.channel.close()
        problems = {
            process.number: _exit_problem(process, deadline, process.number in expect_dead)
            for process in self._processes
        }
        self.kill()
        failures = {rank: problem for rank, problem in problems.items() if problem is not None}
        if failures:
            raise RankFailureError("the end of the processes", self.world_size, failures)

    def kill(self) -> None:
        """Kill every process and its descendants now."""
        while self._processes:
            self._processes.pop().release()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _start(self) -> None:
        if self._processes:
            return
        self._directory = Path(tempfile.mkdtemp(prefix="logs-"))
        for rank in range(self.world_size):
            self._processes.append(
                RankProcess(rank, self._directory, self._environ, fresh=self._fresh, brief=self._brief)
            )


def _collect(
    processes: Sequence[RankProcess], timeout_s: float, expect_dead: set[int]
) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait for every rank; return values and failures by rank."""
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline, why = time.monotonic() + timeout_s, f"no answer within {timeout_s} s"
    while waiting := [p for p in processes if p.number not in values and p.number not in failures]:
        ready = _ready(waiting, deadline)
        if not ready:
            for process in waiting:
                failures[process.number] = _with_output(
                    process, f"{why}; it was here:\n{process.dump_stacks()}"
                )
            break
        for process in ready:
            value, failure = _answer(process, deadline, process.number in expect_dead)
            if failure is None:
                values[process.number] = value
            elif not failures:
                grace = time.monotonic() + GRACE_S
                if grace < deadline:
                    deadline, why = grace, f"no answer within {GRACE_S} s of the first failure"
            if failure is not None:
                failures[process.number] = failure
    return values, failures


def _ready(processes: Iterable[RankProcess], deadline: float) -> list[RankProcess]:
    """Wait until a process has answered or ended; return those that have. The list is empty at `deadline`."""
    poll = select.poll()
    by_descriptor = {}
    for process in processes:
        for descriptor in (process.pidfd, process.channel.fileno()):
            poll.register(descriptor, select.POLLIN)
            by_descriptor[descriptor] = process
    events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    return list(dict.fromkeys(by_descriptor[descriptor] for descriptor, _ in events))


def _answer(process: RankProcess, deadline: float, is_expected_dead: bool) -> tuple[Any, str | None]:
    """Return the value or the failure of a process that has answered or ended."""
    process.channel.settimeout(max(0.1, deadline - time.monotonic()))
    try:
        reply = receive(process.channel)
    except TimeoutError:
        return None, f"it stopped in the middle of its answer; it was here:\n{process.dump_stacks()}"
    process.channel.settimeout(None)
    if reply is None:
        if not process.wait(deadline):
            return None, f"it closed its channel and goes on; it was here:\n{process.dump_stacks()}"
        return None, None if is_expected_dead else _with_output(process, f"died, {_how(process)}")
    if "failure" in reply:
        return None, _with_output(process, reply["failure"])
    if is_expected_dead:
        return None, f"should have died, but returned {reply['value']!r}"
    return reply["value"], None


def _exit_problem(process: RankProcess, deadline: float, is_expected_dead: bool) -> str | None:
    """Return what went wrong when a process ended, or None if nothing did."""
    if not process.wait(deadline):
        return _with_output(process, f"hangs while it ends; it was here:\n{process.dump_stacks()}")
    if process.status != 0 and not is_expected_dead:
        return _with_output(process, f"had returned, but then ended {_how(process)}")
    if process.survivors_after(time.monotonic() + SURVIVOR_GRACE_S):
        return _with_output(process, "processes that it started survive it")
    return None


def _how(process: RankProcess) -> str:
    status = process.status or 0
    return f"by signal {-status}" if status < 0 else f"with exit status {status}"


def _with_output(process: RankProcess, text: str) -> str:
    output = process.output()
    indented = output.replace("\n", "\n    ")
    return f"(pid {process.pid}) {text}" + (f"\n  it printed:\n    {indented}" if output else "")


def _name_of(target: Callable[..., Any]) -> str:
    """Return "module:function"; raise an error if a rank could not import the function."""
    name = f"{target.__module__}:{target.__qualname__}"
    found = getattr(sys.modules.get(target.__module__), target.__name__, None)
    if found is not target or target.__module__ == "__main__":
        raise ValueError(f"{name} must stand at the top level of a module that ranks can import")
    return name
