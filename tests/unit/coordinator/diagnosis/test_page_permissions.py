"""Who may read a status page: the kernel's rule for ptrace decides, and what it refuses is counted."""

import os
from collections.abc import Callable

import pytest

from coordinator.diagnosis.pages import find_pages
from coordinator.diagnosis.processes import look_at
from coordinator.diagnosis.top.sampling import Sampler
from shm_broadcast.status.page import own_page

NOBODY = 65534


def as_nobody(body: Callable[[], bool]) -> bool:
    """Return what `body` returns in a child that belongs to another user."""
    child = os.fork()
    if not child:
        status = 2
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            status = 0 if body() else 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1), "the child failed"
    return status == 0


def test_the_page_of_this_process_is_found() -> None:
    """Where nothing forbids it, which is what the next test differs from."""
    own_page()
    search = find_pages([os.getpid()])
    assert [found.pid for found in search.found] == [os.getpid()]
    assert search.refused == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.guarantee("S4")
def test_another_user_is_refused() -> None:
    """Neither a search nor a sample shows the page; both count the process. Its numbers in /proc are public."""
    own_page()
    owner = os.getpid()

    def looks() -> bool:
        search = find_pages([owner])
        sampler = Sampler()
        sample = sampler.sample()
        sampler.close()
        process = look_at(owner)
        return (
            (search.found, search.refused) == ((), (owner,))
            and owner not in [seen.pid for seen in sample.seen]
            and owner in sample.refused
            and process is not None
            and process.read_bytes is None
        )

    assert as_nobody(looks)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.guarantee("S4")
def test_another_user_cannot_open_the_memory() -> None:
    """The kernel refuses the descriptor itself, by the number that the page's process has."""
    link = f"/proc/{os.getpid()}/fd/{own_page().segment.descriptor}"

    def opens() -> bool:
        try:
            os.close(os.open(link, os.O_RDONLY))
        except PermissionError:
            return False
        return True

    assert not as_nobody(opens)
