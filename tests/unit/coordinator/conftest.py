"""A fake group for the tests of fakes."""

from typing import Any

import pytest

from coordinator.testing import FakeGroupCoordinator


@pytest.fixture
def group() -> Any:
    """Return rank 5 of ranks 3, 5 and 9, the second of three."""
    with FakeGroupCoordinator(5, 3, ranks=(3, 5, 9)) as fake:
        yield fake
