"""How a step's module is run as a program: `python -m tests.gpu.step_x NOTES SECONDS`."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.notes import Notes, SkipCheckError

if TYPE_CHECKING:
    from tests.gpu.device import GpuDriver

__all__ = ["open_gpu", "run_module"]


def open_gpu() -> GpuDriver:
    """Return the driver of the first device; skip where there is none, which the probe has told."""
    from shm_broadcast.errors import CapabilityError
    from tests.gpu.device import GpuDriver

    try:
        return GpuDriver(0)
    except CapabilityError as error:
        raise SkipCheckError(str(error)) from error


def run_module(run: Callable[[Notes], None], arguments: Sequence[str]) -> int:
    """Run a step; its checks are in the notes, and what escapes them is a failed check of its own."""
    path, seconds = Path(arguments[0]), float(arguments[1])
    # Where it hangs is seen in the output, before the runner ends it.
    faulthandler.dump_traceback_later(seconds + 2.0)
    notes = Notes(path, seconds)
    with notes.check("the step as a whole"):
        run(notes)
    faulthandler.cancel_dump_traceback_later()
    return 0
