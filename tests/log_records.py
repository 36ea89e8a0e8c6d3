"""The fields of log records, as tests compare them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PREFIX", "fields_of", "records_of"]

PREFIX = "comm_"


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return our fields of a record, without the prefix of their names."""
    return {
        name.removeprefix(PREFIX): value for name, value in vars(record).items() if name.startswith(PREFIX)
    }


@contextmanager
def records_of(name: str, level: int = logging.INFO) -> Iterator[list[logging.LogRecord]]:
    """Yield a list that receives the records of a logger and those below it within the block, in a rank's process."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment, method-assign]
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
