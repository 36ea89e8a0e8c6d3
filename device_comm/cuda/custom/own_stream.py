"""A stream for what is written while a group is built, beside the work of all other streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from device_comm.cuda.driver import Driver

__all__ = ["own_stream"]


@contextmanager
def own_stream(driver: Driver) -> Iterator[int]:
    """Yield a new stream, and wait at the end until what was queued on it is done, and for nothing else.

    Waiting for the whole device would include kernels of other groups, which may wait for a rank in here.
    """
    stream = driver.stream_create()
    try:
        yield stream
        driver.stream_synchronize(stream)
    finally:
        driver.stream_destroy(stream)
