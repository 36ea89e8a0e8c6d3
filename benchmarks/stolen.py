"""How long the host of a virtual machine withholds its cores: this makes everything slow and nothing comparable."""

import os
from pathlib import Path
from typing import Final

__all__ = ["stolen_s"]

# The place of "steal" among the fields of the first line of /proc/stat, behind its name; see proc_stat(5).
STEAL: Final = 8


def stolen_s() -> float:
    """Return the time in seconds that the host has withheld from all cores together since the start of this machine."""
    fields = Path("/proc/stat").read_text().split(maxsplit=STEAL + 1)
    return int(fields[STEAL]) / os.sysconf("SC_CLK_TCK")
