"""A fake group for the tests of fakes, and another secret for those of handles."""

import multiprocessing.process
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.testing import FakeGroupCoordinator


@pytest.fixture
def group() -> Any:
    """Return rank 5 of ranks 3, 5 and 9, the second of three."""
    with FakeGroupCoordinator(5, 3, ranks=(3, 5, 9)) as fake:
        yield fake


@pytest.fixture
def other_family(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which this process belongs to another family."""

    def leave() -> None:
        process: Any = multiprocessing.process.current_process()
        monkeypatch.setattr(process, "_config", {**process._config, "authkey": b"another secret"})

    return leave
