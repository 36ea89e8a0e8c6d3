"""Entry point of the demo: runs the launcher, one of its ranks, or one rank under torchrun."""

import os
import sys
from collections.abc import Sequence

from shm_broadcast.errors import SettingsError, UsageError

from .config import ModelConfig
from .errors import DemoError
from .launcher import die_with_launcher, launch, leave_failure
from .lessons import SEEDED_CONFIG
from .options import Options, parse_options

__all__ = ["main"]

# torchrun sets them. `coordinator.settings` knows more, but importing it imports torch: seconds that our own launcher
# does not need.
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


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
        if options.init_method is None:
            if not LAUNCHER_VARIABLES & os.environ.keys():
                return launch(options, arguments)
            _check_launcher(options)
        return _run_rank(options)
    except (DemoError, SettingsError, UsageError) as error:
        sys.stderr.write(f"tiny_llm: error: {error}\n")
        return 2


def _check_model(options: Options) -> None:
    """Check the model before any process is started.

    Raises:
        DemoError: The model is unreadable, or cannot be split as asked.
    """
    config = SEEDED_CONFIG if options.model is None else ModelConfig.from_directory(options.model)
    config.check_layout(options.tensor, options.pipeline)


def _check_launcher(options: Options) -> None:
    """Check what torchrun says about the ranks that it started.

    Raises:
        DemoError: The number of ranks is not the one that the options need.
        SettingsError: A variable of the launcher is missing or malformed.
    """
    from coordinator.settings import LaunchEnvironment

    environment = LaunchEnvironment.from_env()
    if environment is not None:
        options.check_world_size(environment.world_size)


def _run_rank(options: Options) -> int:
    """Run one rank. The import is late because it takes seconds and the launcher does not need it."""
    from .rank import run_rank

    return run_rank(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
