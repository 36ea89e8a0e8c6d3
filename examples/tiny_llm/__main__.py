"""Entry point of the demo: runs the launcher, one of its ranks, or one rank under torchrun."""

import sys
from collections.abc import Sequence

from coordinator.errors import SettingsError
from coordinator.settings import LaunchEnvironment

from .config import ModelConfig
from .errors import DemoError
from .launcher import die_with_launcher, launch, leave_failure
from .lessons import SEEDED_CONFIG
from .options import Options, parse_options

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
        try:
            return _run_rank(options)
        except Exception as error:  # noqa: BLE001 - the launcher shows any error
            leave_failure(options.launched, error)
            return 1
    try:
        _check_model(options)
        launcher = LaunchEnvironment.from_env()
        if launcher is None:
            return launch(options, arguments)
        options.check_world_size(launcher.world_size)
        return _run_rank(options)
    except (DemoError, SettingsError) as error:
        sys.stderr.write(f"tiny_llm: error: {error}\n")
        return 2


def _check_model(options: Options) -> None:
    """Check the model before any process is started.

    Raises:
        DemoError: The model is unreadable, or cannot be split as asked.
    """
    config = SEEDED_CONFIG if options.model is None else ModelConfig.from_directory(options.model)
    config.check_layout(options.tensor, options.pipeline)


def _run_rank(options: Options) -> int:
    """Run one rank. The import is late because it takes seconds and the launcher does not need it."""
    from .rank import run_rank

    return run_rank(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
