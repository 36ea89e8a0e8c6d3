"""Rank 0 may open as many descriptors as the ranks need that connect to its store."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, resource
from coordinator.bootstrap.serving import options_of_server
from shm_broadcast.errors import UsageError
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    options = options_of_server("127.0.0.1", 0, {world_size})
    os.close(options["master_listen_fd"])
    print(resource.getrlimit(resource.RLIMIT_NOFILE), options["use_libuv"])
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "world_size", "expected"),
    [
        (1024, 4096, 8, "(1024, 4096) False"),
        (1024, 4096, 1000, "(3512, 4096) True"),
        (1024, 2048, 1000, "takes 3512 open descriptors, and this process may open 2048"),
    ],
)
def test_the_limit_of_descriptors_is_raised_where_many_ranks_need_it(
    soft: int, hard: int, world_size: int, expected: str
) -> None:
    """Few ranks change nothing; a hard limit that is too low is an error before anything listens."""
    program = PROGRAM.format(soft=soft, hard=hard, world_size=world_size)
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert expected in found.stdout
