"""The demo's command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import DemoError

__all__ = ["LaunchedRank", "Options", "parse_options"]

DESCRIPTION = """\
Serve a Llama with tensor and pipeline parallelism over this project's groups, on the CPU, and check that
every token equals the one that a single process generates.

Without --model, first train a tiny model on a few sentences (some seconds) and serve that.
"""

EPILOG = """\
Under torchrun each process is one rank; their number must be --tp times --pp:
  torchrun --nproc-per-node 4 -m examples.tiny_llm --tp 2 --pp 2
Other launchers are named:
  mpiexec -n 4 python -m examples.tiny_llm --init-method mpi://127.0.0.1:29700
  srun -n 4 python -m examples.tiny_llm --init-method slurm://:29700

exit status: 0 if all tokens are identical, 1 if not or if a rank failed, 2 for wrong options or an unusable model
"""


@dataclass(frozen=True)
class LaunchedRank:
    """The launcher's arguments for a rank that it starts.

    Attributes:
        rank: Global rank.
        directory: Directory for the rendezvous and the ranks' files; the launcher removes it.
        launcher_pid: Process id of the launcher; the rank dies with it.
    """

    rank: int
    directory: Path
    launcher_pid: int


@dataclass(frozen=True)
class Options:
    """The user's options.

    Attributes:
        model: Checkpoint directory; None for the seeded checkpoint.
        tensor: Ranks that share each layer.
        pipeline: Pipeline stages.
        prompts: Prompts; empty for the demo's own.
        max_tokens: Maximal number of generated tokens per prompt.
        temperature: Sampling temperature; 0 takes the likeliest token.
        seed: Seed of the sampling and of the seeded checkpoint.
        slots: Maximal number of requests at the same time.
        tokens_per_step: Maximal number of tokens in a batch.
        arrival_gap: Steps between the arrivals of two requests.
        hold_s: Seconds for which the prompts are served again and again at the end, for those who watch.
        deadline_s: Seconds after which the launcher gives up, beside `hold_s`.
        as_json: Whether to print JSON instead of text.
        init_method: How the ranks that another launcher started meet, such as "mpi://HOST:PORT"; None for torchrun, and
            for the ranks that the demo starts itself.
        launched: Set in the processes that the launcher starts.
    """

    model: Path | None = None
    tensor: int = 2
    pipeline: int = 2
    prompts: tuple[str, ...] = ()
    max_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0
    slots: int = 4
    tokens_per_step: int = 48
    arrival_gap: int = 3
    hold_s: float = 0.0
    deadline_s: float = 300.0
    as_json: bool = False
    init_method: str | None = None
    launched: LaunchedRank | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    def check_world_size(self, processes: int) -> None:
        """Check the number of processes that another launcher started.

        Args:
            processes: Number of processes.

        Raises:
            DemoError: It differs from `world_size`.
        """
        if processes != self.world_size:
            raise DemoError(
                f"--tp {self.tensor} x --pp {self.pipeline} needs {self.world_size} processes, not {processes}"
            )


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line; on a mistake, print the usage and exit with status 2.

    Args:
        arguments: Arguments to parse instead of this process's own.
    """
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_llm",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint directory of a Llama architecture")
    add("--tp", type=positive, default=defaults.tensor, metavar="N", help="ranks per layer (%(default)s)")
    add("--pp", type=positive, default=defaults.pipeline, metavar="N", help="pipeline stages (%(default)s)")
    add("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    add(
        "--max-tokens",
        type=positive,
        default=defaults.max_tokens,
        metavar="N",
        help="maximal number of tokens per prompt (%(default)s)",
    )
    add(
        "--temperature",
        type=not_negative,
        default=defaults.temperature,
        metavar="T",
        help="0 takes the likeliest token (%(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=defaults.seed,
        metavar="N",
        help="seed of sampling and training (%(default)s)",
    )
    add(
        "--slots", type=positive, default=defaults.slots, metavar="N", help="requests at a time (%(default)s)"
    )
    add(
        "--tokens-per-step",
        type=positive,
        default=defaults.tokens_per_step,
        metavar="N",
        help="maximal number of tokens in a batch; longer prompts take several steps (%(default)s)",
    )
    add(
        "--arrival-gap",
        type=int,
        default=defaults.arrival_gap,
        metavar="N",
        help="steps between the arrivals of two prompts (%(default)s)",
    )
    add(
        "--hold",
        type=not_negative,
        default=defaults.hold_s,
        metavar="S",
        help="serve the prompts again and again for so many seconds, for those who watch (%(default)s)",
    )
    add(
        "--deadline",
        type=not_negative,
        default=defaults.deadline_s,
        metavar="S",
        help="seconds until the launcher gives up, beside --hold (%(default)s)",
    )
    add("--init-method", metavar="URL", help="how ranks that another launcher starts meet (see below)")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--launched", nargs=3, default=None, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    launched = None
    if parsed.launched is not None:
        rank, directory, launcher_pid = parsed.launched
        launched = LaunchedRank(int(rank), Path(directory), int(launcher_pid))
    return Options(
        model=parsed.model,
        tensor=parsed.tp,
        pipeline=parsed.pp,
        prompts=tuple(parsed.prompt),
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        seed=parsed.seed,
        slots=parsed.slots,
        tokens_per_step=parsed.tokens_per_step,
        arrival_gap=parsed.arrival_gap,
        hold_s=parsed.hold,
        deadline_s=parsed.deadline,
        as_json=parsed.json,
        init_method=parsed.init_method,
        launched=launched,
    )


def positive(text: str) -> int:
    """Read a number of at least 1.

    Raises:
        argparse.ArgumentTypeError: `text` is not such a number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def not_negative(text: str) -> float:
    """Read a finite number of at least 0.

    Raises:
        argparse.ArgumentTypeError: `text` is not such a number.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value
