"""The run of one rank: join the groups, load a stage, serve. Rank 0 also prepares, compares and reports."""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from coordinator.diagnosis.top.command import top_command

from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import DemoError
from .group import ModelGroups
from .lessons import PROMPTS
from .model import LlamaStage, load_weights
from .options import Options
from .progress import Progress
from .report import Continuation, Report
from .sampling import Sampler
from .scheduler import Request, Scheduler
from .seeded import write_seeded_checkpoint
from .timing import TimedGroup, summarize
from .tokenizer import Tokenizer, open_tokenizer
from .wiring import join_groups
from .worker import StageWorker, serve

__all__ = ["run_rank"]


@dataclass(frozen=True)
class _Job:
    """The work that rank 0 prepares.

    Attributes:
        directory: The checkpoint directory.
        config: The model's shape.
        tokenizer: The model's tokenizer.
        prompts: The prompts as text.
        requests: The prompts as requests, with their steps of arrival.
        max_length: Tokens of the longest sequence.
    """

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer
    prompts: tuple[str, ...]
    requests: tuple[Request, ...]
    max_length: int


def run_rank(options: Options) -> int:
    """Serve the prompts together with the other ranks.

    Args:
        options: Equal on all ranks.

    Returns:
        The rank's exit status: on rank 0, 0 if all tokens are identical and 1 if not; elsewhere 0.
    """
    torch.set_num_threads(1)
    with ExitStack() as stack:
        groups, alone = stack.enter_context(join_groups(options))
        processes = groups.world.gather_object([socket.gethostname(), os.getpid()], dst=0)
        if not groups.world.is_first_rank:
            _follow(options, groups)
            return 0
        _say_how_to_watch(processes or [])
        progress = stack.enter_context(Progress())
        report = _lead(options, groups, alone, progress, stack)
    if options.as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        report.show(Console())
    return 0 if report.is_identical else 1


def _lead(
    options: Options, groups: ModelGroups, alone: ModelGroups, progress: Progress, stack: ExitStack
) -> Report:
    """Do rank 0's part.

    Args:
        options: The user's options.
        groups: Groups of all ranks.
        alone: Groups of this rank only.
        progress: The progress line.
        stack: Receives resources to clean up at the end.
    """
    # While this rank prepares, the others wait for the broadcast below, without a deadline.
    try:
        directory = options.model or _make_checkpoint(options, alone, progress, stack)
        job = _prepare(options, directory)
        show = _step_shower(progress, "one process")
        reference, reference_s = _generate(options, job, alone, show, together=False)
    except DemoError as error:
        groups.world.broadcast_object({"error": str(error)}, src=0)
        raise
    groups.world.broadcast_object({"directory": str(job.directory), "max_length": job.max_length}, src=0)
    timed = _timed(groups)
    layout = f"TP {options.tensor} x PP {options.pipeline}"
    progress.show(f"loading {layout}")
    scheduler, seconds = _generate(options, job, timed, _step_shower(progress, layout), together=True)
    samples = groups.world.gather_object(_samples(timed), dst=0)
    _hold(options, job, groups, progress)
    return Report(
        tensor=options.tensor,
        pipeline=options.pipeline,
        steps=scheduler.step,
        seconds=seconds,
        reference_seconds=reference_s,
        continuations=[
            Continuation(
                prompt,
                job.tokenizer.decode(scheduler.generated[number]),
                scheduler.generated[number],
                reference.generated[number],
            )
            for number, prompt in enumerate(job.prompts)
        ],
        operations=summarize(samples or []),
    )


def _follow(options: Options, groups: ModelGroups) -> None:
    """Do the part of a rank other than 0.

    Args:
        options: The user's options.
        groups: Groups of all ranks.
    """
    told = groups.world.broadcast_object(src=0)
    if "error" in told:
        raise DemoError(told["error"])
    directory = Path(told["directory"])
    timed = _timed(groups)
    worker = _make_worker(
        options, directory, ModelConfig.from_directory(directory), timed, told["max_length"]
    )
    serve(worker, None)
    groups.world.gather_object(_samples(timed), dst=0)
    while groups.world.broadcast_object(src=0) == "again":
        worker = _make_worker(
            options, directory, ModelConfig.from_directory(directory), groups, told["max_length"]
        )
        serve(worker, None)


def _say_how_to_watch(processes: Sequence[Sequence[Any]]) -> None:
    """Print the command that shows the ranks of this host while they run.

    Args:
        processes: Host and process id of each rank.
    """
    pids = [pid for host, pid in processes if host == socket.gethostname()]
    sys.stderr.write(f"watch it from another terminal: {top_command(pids)}\n")
    sys.stderr.flush()


def _hold(options: Options, job: _Job, groups: ModelGroups, progress: Progress) -> None:
    """Serve the prompts again and again for as long as the user asks, and let the other ranks end then."""
    end_s = time.monotonic() + options.hold_s
    while time.monotonic() < end_s:
        groups.world.broadcast_object("again", src=0)
        show = _step_shower(progress, f"TP {options.tensor} x PP {options.pipeline} again")
        _generate(options, job, groups, show, together=True)
    groups.world.broadcast_object("end", src=0)


def _make_checkpoint(options: Options, alone: ModelGroups, progress: Progress, stack: ExitStack) -> Path:
    """Train the seeded checkpoint in a directory that is removed at the end."""
    if options.launched is not None:
        parent = options.launched.directory
    else:
        parent = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="group-coordinator-demo-")))
    steps = 0

    def show(loss: float) -> None:
        nonlocal steps
        steps += 1
        progress.show("training a tiny model", f"step {steps}, loss {loss:.3f}")

    write_seeded_checkpoint(parent / "checkpoint", alone, seed=options.seed, on_step=show)
    return parent / "checkpoint"


def _prepare(options: Options, directory: Path) -> _Job:
    """Read the checkpoint's config, and turn the prompts into requests."""
    config = ModelConfig.from_directory(directory)
    tokenizer = open_tokenizer(directory, config)
    prompts = options.prompts or PROMPTS
    requests = tuple(
        Request(number, tuple(tokenizer.encode(prompt)), options.max_tokens, number * options.arrival_gap)
        for number, prompt in enumerate(prompts)
    )
    largest = max((token for request in requests for token in request.prompt), default=0)
    if largest >= config.vocab_size:
        raise DemoError(
            f"{directory}: a prompt has token {largest}, but the vocabulary has only {config.vocab_size}"
        )
    longest = max(len(request.prompt) for request in requests) + options.max_tokens
    return _Job(directory, config, tokenizer, prompts, requests, min(longest, config.max_position_embeddings))


def _make_worker(
    options: Options, directory: Path, config: ModelConfig, groups: ModelGroups, max_length: int
) -> StageWorker:
    """Load this rank's stage."""
    stage = LlamaStage(config, groups, max_length)
    with Checkpoint(directory) as checkpoint:
        load_weights(stage, checkpoint)
    return StageWorker(stage, options.slots, Sampler(options.temperature, options.seed))


def _generate(
    options: Options,
    job: _Job,
    groups: ModelGroups,
    on_step: Callable[[Scheduler], None],
    *,
    together: bool,
) -> tuple[Scheduler, float]:
    """Serve all requests from rank 0.

    Args:
        options: The user's options.
        job: The work.
        groups: Groups of the ranks that serve.
        on_step: Called after each step.
        together: Whether requests may share a batch.

    Returns:
        The scheduler, which holds the generated tokens, and the duration of all steps in seconds.
    """
    scheduler = Scheduler(
        job.requests,
        slots=options.slots if together else 1,
        tokens_per_step=options.tokens_per_step if together else job.max_length,
        max_length=job.max_length,
        eos_tokens=job.config.eos_token_ids,
    )
    worker = _make_worker(options, job.directory, job.config, groups, job.max_length)
    start_s = time.perf_counter()
    serve(worker, scheduler, on_step)
    return scheduler, time.perf_counter() - start_s


def _step_shower(progress: Progress, who: str) -> Callable[[Scheduler], None]:
    """Return a callback that shows the scheduler's progress."""

    def show(scheduler: Scheduler) -> None:
        tokens = sum(map(len, scheduler.generated.values()))
        requests = f"{scheduler.running} requests running, {scheduler.waiting} waiting"
        progress.show(f"generating with {who}", f"step {scheduler.step}, {requests}, {tokens} tokens")

    return show


def _timed(groups: ModelGroups) -> ModelGroups:
    """Wrap each group so that its operations are timed."""
    return ModelGroups(TimedGroup(groups.world), TimedGroup(groups.tensor), TimedGroup(groups.pipeline))


def _samples(groups: ModelGroups) -> dict[str, dict[str, list[float]]]:
    """Return this rank's measured durations, by group and operation."""
    named = {"world": groups.world, "tp": groups.tensor, "pp": groups.pipeline}
    return {name: group.samples_us for name, group in named.items() if isinstance(group, TimedGroup)}
