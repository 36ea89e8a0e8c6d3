"""`python -m coordinator metrics`: export what the ranks of this host do, until it is stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

from coordinator.cli.output import write_out
from coordinator.diagnosis.metrics.exporter import FILE_NAME, MetricsServer, write_metrics
from coordinator.diagnosis.metrics.reader import MetricsReader, read_host
from shm_broadcast.errors import UsageError

__all__ = ["export_metrics"]


def export_metrics(*, listen: str | None, textfile: Path | None, interval_s: float) -> int:
    """Export until SIGTERM or Ctrl-C, which are the ordinary end; return the exit status.

    Args:
        listen: "HOST:PORT" to serve GET /metrics on.
        textfile: Otherwise the directory of node_exporter's textfile collector.
        interval_s: Seconds between two files.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if listen is not None:
            _serve(listen)
        elif textfile is not None:
            _write(textfile, interval_s)
    except KeyboardInterrupt:
        return 0
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"the metrics cannot be written: {error}\n")
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _serve(listen: str) -> None:
    with MetricsServer(listen) as server:
        write_out(f"metrics of this host's ranks: {server.url}\n")
        server.serve_forever()


def _write(directory: Path, interval_s: float) -> None:
    if not directory.is_dir():
        raise UsageError(f"{str(directory)!r} is not a directory")
    reader = MetricsReader(read_host)
    ends: SimpleQueue[int] = SimpleQueue()  # a signal handler may add to it at any place
    file = directory / FILE_NAME
    with _told_of_signals(ends):
        try:
            write_metrics(directory, reader)
            write_out(f"metrics of this host's ranks: {file}, every {interval_s:g} s\n")
            while not _has_one(ends, interval_s):
                write_metrics(directory, reader)
        finally:
            # node_exporter would go on showing the last values as if they were today's.
            file.unlink(missing_ok=True)


@contextmanager
def _told_of_signals(ends: SimpleQueue[int]) -> Iterator[None]:
    """Put SIGINT and SIGTERM into `ends`: what a handler raises in the middle of a file could leave a part of it."""
    # A shell lets its background jobs ignore SIGINT.
    numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, lambda number, _: ends.put(number)) for each in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_one(ends: SimpleQueue[int], timeout_s: float) -> bool:
    """Wait for a signal for up to `timeout_s` seconds; return whether one has come."""
    try:
        ends.get(timeout=timeout_s)
    except Empty:
        return False
    return True
