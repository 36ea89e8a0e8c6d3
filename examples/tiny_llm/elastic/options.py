"""The command line of the elastic demo."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.tiny_llm.options import LaunchedRank, not_negative, positive

__all__ = ["REPLICAS", "ElasticOptions", "LaunchedWorker", "parse_options"]

REPLICAS = 2

DESCRIPTION = """\
Serve a Llama on two replicas, kill a worker in the middle of its answers, go on with the other replica, take new
workers in while that serves, let the old replica leave, and check that every token equals the one that a process
generates which nobody disturbs.

Without --model, first train a tiny model on a few sentences (some seconds) and serve that.
"""

EPILOG = "exit status: 0 if all answers are right, 1 if not or if something failed, 2 for wrong options"


@dataclass(frozen=True)
class LaunchedWorker(LaunchedRank):
    """The front end's arguments for a worker that it starts.

    Attributes:
        socket: Descriptor of the worker's end of its socket to the front end.
        replaces: The first worker whose place among the ranks it takes; None for one of the first workers.
    """

    socket: int = -1
    replaces: int | None = None


@dataclass(frozen=True)
class ElasticOptions:
    """The user's options.

    Attributes:
        model: Checkpoint directory; None for the seeded checkpoint.
        tensor: Ranks of a replica; they share each layer.
        victim: Rank of the worker that is killed.
        prompts: Number of different prompts.
        max_tokens: Maximal number of generated tokens per answer.
        slots: Maximal number of answers at a time on a replica.
        step_ms: Milliseconds that a step takes at least, as with a larger model.
        seed: Chooses when the worker is killed, and seeds the training.
        deadline_s: Seconds after which the front end gives up.
        as_json: Whether to print JSON instead of text.
        launched: Set in the processes that the front end starts.
    """

    model: Path | None = None
    tensor: int = 2
    victim: int = 3
    prompts: int = 12
    max_tokens: int = 96
    slots: int = 4
    step_ms: float = 10.0
    seed: int = 0
    deadline_s: float = 300.0
    as_json: bool = False
    launched: LaunchedWorker | None = None

    @property
    def world_size(self) -> int:
        """Number of workers that begin together."""
        return REPLICAS * self.tensor


def parse_options(arguments: Sequence[str] | None = None) -> ElasticOptions:
    """Parse the command line; on a mistake, print the usage and exit with status 2.

    Args:
        arguments: Arguments to parse instead of this process's own.
    """
    defaults = ElasticOptions()
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_llm.elastic",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint directory of a Llama architecture")
    add("--tp", type=positive, default=defaults.tensor, metavar="N", help="ranks per replica (%(default)s)")
    add("--victim", type=int, metavar="RANK", help="rank of the worker that is killed (the last one)")
    for name, default, text in (
        ("prompts", defaults.prompts, "different prompts"),
        ("max-tokens", defaults.max_tokens, "maximal number of tokens per answer"),
        ("slots", defaults.slots, "answers at a time on a replica"),
    ):
        add(f"--{name}", type=positive, default=default, metavar="N", help=f"{text} (%(default)s)")
    add(
        "--step-ms",
        type=not_negative,
        default=defaults.step_ms,
        metavar="MS",
        help="what a step takes at least, as with a larger model (%(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="chooses the moment of the kill (%(default)s)")
    add(
        "--deadline",
        type=not_negative,
        default=defaults.deadline_s,
        metavar="S",
        help="seconds until the front end gives up (%(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--launched", nargs=5, default=None, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    world_size = REPLICAS * parsed.tp
    victim = world_size - 1 if parsed.victim is None else parsed.victim
    if not 0 <= victim < world_size:
        parser.error(f"argument --victim: there is no rank {victim}, but {world_size} of them")
    return ElasticOptions(
        model=parsed.model,
        tensor=parsed.tp,
        victim=victim,
        prompts=parsed.prompts,
        max_tokens=parsed.max_tokens,
        slots=parsed.slots,
        step_ms=parsed.step_ms,
        seed=parsed.seed,
        deadline_s=parsed.deadline,
        as_json=parsed.json,
        launched=None if parsed.launched is None else _launched(*parsed.launched),
    )


def _launched(number: str, directory: str, launcher_pid: str, socket: str, replaces: str) -> LaunchedWorker:
    """Read what `processes` passes to a worker."""
    place = None if replaces == "nobody" else int(replaces)
    return LaunchedWorker(int(number), Path(directory), int(launcher_pid), int(socket), place)
