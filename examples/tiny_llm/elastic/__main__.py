"""Entry point of the elastic demo: runs the front end, or one of its workers."""

import sys
from collections.abc import Sequence

from examples.tiny_llm.config import ModelConfig
from examples.tiny_llm.errors import DemoError, RunError
from examples.tiny_llm.launcher import die_with_launcher
from examples.tiny_llm.lessons import SEEDED_CONFIG

from .front_end import run_front_end
from .options import parse_options

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the demo.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit status.
    """
    options = parse_options(arguments)
    if options.launched is not None:
        die_with_launcher(options.launched)
        from .worker import (
            run_worker,
        )  # imports torch, which takes seconds and which the front end does not need

        return run_worker(options, options.launched)
    try:
        config = SEEDED_CONFIG if options.model is None else ModelConfig.from_directory(options.model)
        config.check_layout(options.tensor, 1)
        return run_front_end(options, arguments)
    except (DemoError, RunError) as error:
        sys.stderr.write(f"tiny_llm.elastic: error: {error}\n")
        return 2 if isinstance(error, DemoError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
