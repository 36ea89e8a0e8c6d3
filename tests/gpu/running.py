"""What a test of `tests/gpu` uses: its mark, its share of the time, and processes with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.gpu.notes import Notes
from tests.harness import run_ranks
from tests.probes import requires_gpus, skip

__all__ = ["GpuRun", "on_gpu"]


def on_gpu(least_s: float, most_s: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test that needs a GPU, is not begun with less than `least_s`, and is ended after `most_s`."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        marked: Callable[..., None] = requires_gpus(1)(pytest.mark.gpu_seconds(least_s, most_s)(test))
        return marked

    return mark


class GpuRun(Notes):
    """What a test has of its GPU: processes to run bodies in, the time that is left, and the report."""

    def __init__(self, item: pytest.Item, notes: Path, cache: Path, seconds: float) -> None:
        super().__init__(notes)
        self.cache = cache
        self._item = item
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds until the deadline of the test."""
        return max(1.0, self._end - time.monotonic())

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        ranks: int = 1,
        environ: Mapping[str, str] | None = None,
        fresh: bool = False,
        expect_dead: Collection[int] = (),
    ) -> list[Any]:
        """Run a `gpu_body` on every rank until the deadline of the test; return what each rank returned.

        The ranks are forked from a process that has torch imported and has never used CUDA. A variable that torch reads
        when it is imported needs `fresh`: a new interpreter for each rank.
        """
        __tracebackhide__ = True
        return run_ranks(
            body,
            ranks,
            str(self.path),
            str(self.cache),
            self.left(),
            *args,
            timeout_s=self.left(),
            expect_dead=expect_dead,
            environ=environ,
            fresh=fresh,
            # The CUDA driver keeps files and threads of its own until the process ends.
            check_leaks=False,
        )

    def skip(self, reason: str) -> NoReturn:
        """Skip the test: this machine cannot show what it is about."""
        skip(self._item, reason)
