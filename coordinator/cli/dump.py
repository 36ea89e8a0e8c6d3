"""`python -m coordinator dump`: all that the ranks on this host show, as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

from coordinator.cli.output import write_out
from coordinator.diagnosis.dump import encode_dump, take_dump, write_privately

__all__ = ["write_dump"]


def write_dump(*, out: Path | None, pids: list[int]) -> int:
    """Write a dump to `out`, or print it; return the exit status.

    Args:
        out: The file, which is replaced as a whole and which only its user may read; None for standard output.
        pids: Only what these processes hold, or all.
    """
    dump = take_dump(pids or None)
    if not dump.pages:
        where = f"process {', '.join(map(str, pids))} has" if pids else "the processes on this host have"
        sys.stderr.write(f"{where} no status page that can be read\n")
        for pid in dump.refused if pids else ():
            sys.stderr.write(f"process {pid} may not be read: see ptrace(2), PTRACE_MODE_READ_FSCREDS\n")
        for pid, fault in dump.faults.items():
            sys.stderr.write(f"process {pid}: {fault}\n")
        return 1
    data = encode_dump(dump) + b"\n"
    if out is None:
        write_out(data)
        return 0
    try:
        write_privately(out, data)
    except OSError as error:
        sys.stderr.write(f"cannot write {out}: {error.strerror}\n")
        return 1
    return 0
