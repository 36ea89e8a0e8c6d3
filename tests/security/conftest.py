"""What the tests of hostile frames check after each test."""

from typing import Any

import pytest

from shm_broadcast.codec import decode, encode
from tests.hostile_frames import GOOD
from tests.unit.shm_broadcast.codec_samples import same


@pytest.fixture
def the_next_message_arrives() -> Any:
    """Check after each test that a good message arrives."""
    yield
    assert same(decode(encode(GOOD).to_bytes()), GOOD)
