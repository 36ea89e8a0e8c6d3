"""Whatever keeps a rank from making or taking shared memory is a reason that all ranks get."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest

from device_comm import _core
from device_comm.cpu.shared_memory import Preparation
from device_comm.health import GroupHealth
from shm_broadcast.errors import CapabilityError
from tests.queues import segments_of
from tests.unit.device_comm.test_health import FakeStatusStore, FakeWatch

Patch = Callable[[pytest.MonkeyPatch], None]


def fail(error: Exception) -> Callable[..., Any]:
    """Return a function that raises `error`."""
    return mock.Mock(side_effect=error)


def no_mapping(patch: pytest.MonkeyPatch) -> None:
    """Let the kernel have no memory for page tables."""
    patch.setattr(mmap, "mmap", fail(OSError(12, "Cannot allocate memory")))


def no_size(patch: pytest.MonkeyPatch) -> None:
    """Let the file be larger than this process may have one."""
    patch.setattr(os, "ftruncate", fail(OSError(27, "File too large")))


def no_socket(patch: pytest.MonkeyPatch) -> None:
    """Let this process have no descriptor left when it listens."""
    patch.setattr(socket, "socket", fail(OSError(24, "Too many open files")))


def no_pages(patch: pytest.MonkeyPatch) -> None:
    """Let a signal end the reservation of pages."""
    patch.setattr(os, "posix_fallocate", fail(OSError(4, "Interrupted system call")))


def without_thread(name: str) -> Patch:
    """Let this process be at the limit of its threads when it starts the thread `name`."""

    def no_thread(patch: pytest.MonkeyPatch) -> None:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == name:
                raise RuntimeError("can't start new thread")
            start(thread)

        patch.setattr(threading.Thread, "start", refuse)

    return no_thread


def foreign_memory(patch: pytest.MonkeyPatch) -> None:
    """Let the first rank offer memory without our magic number."""
    patch.setattr(_core, "lay_out", lambda *_: None)


@contextmanager
def two_ranks() -> Iterator[tuple[Preparation, Preparation]]:
    """Yield what two ranks prepare, both in this process."""
    with ExitStack() as stack:
        regions = Preparation(2, 0), Preparation(2, 1)
        for region in regions:
            stack.callback(region.close)
        yield regions


def health(rank: int) -> GroupHealth:
    """Return the health of one of two ranks."""
    return GroupHealth("tp:0", rank, (0, 1), FakeWatch(), FakeStatusStore())  # type: ignore[arg-type]


@pytest.mark.guarantee("D16")
@pytest.mark.parametrize(
    ("failing", "text"),
    [
        (no_mapping, "Cannot allocate memory"),
        (no_size, "File too large"),
        (no_socket, "Too many open files"),
        (without_thread("group-coordinator-descriptors"), "can't start new thread"),
        (without_thread("group-coordinator-handover"), "can't start new thread"),
    ],
    ids=["mapping", "size", "socket", "thread", "handover"],
)
def test_a_failure_of_the_first_rank_is_what_it_offers(
    monkeypatch: pytest.MonkeyPatch, failing: Patch, text: str
) -> None:
    """`prepare` raises nothing, and each rank that takes or maps the offer raises the reason."""
    with two_ranks() as regions:
        with monkeypatch.context() as patch:
            failing(patch)
            regions[0].prepare()
        for rank, region in enumerate(regions):
            segment, failure = region.take(regions[0].offer, 30.0)
            assert segment is None
            assert text in failure
            with pytest.raises(CapabilityError, match=rf"create shared memory on 'tp:0' .*{text}"):
                region.map(health(rank), regions[0].offer, 30.0)
    assert segments_of() == []


@pytest.mark.guarantee("D71")
@pytest.mark.parametrize(
    ("failing", "text"),
    [
        (no_mapping, "Cannot allocate memory"),
        (no_pages, "Interrupted system call"),
        (no_socket, "Too many open files"),
        (without_thread("group-coordinator-descriptors"), "can't start new thread"),
    ],
    ids=["mapping", "pages", "socket", "thread"],
)
@pytest.mark.parametrize("maps", [False, True])
def test_a_failure_of_a_later_rank_is_its_reason(
    monkeypatch: pytest.MonkeyPatch, failing: Patch, text: str, maps: bool
) -> None:
    """It has the type and the text that the other ranks are told."""
    with two_ranks() as regions:
        regions[0].prepare()
        with monkeypatch.context() as patch:
            failing(patch)
            if maps:
                with pytest.raises(
                    CapabilityError, match=rf"create shared memory.*: rank 1 of the group: .*{text}"
                ):
                    regions[1].map(health(1), regions[0].offer, 30.0)
            else:
                segment, failure = regions[1].take(regions[0].offer, 30.0)
                assert segment is None
                assert failure.startswith("rank 1 of the group: ")
                assert text in failure
    assert segments_of() == []


@pytest.mark.parametrize("maps", [False, True])
def test_offered_memory_that_is_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch, maps: bool) -> None:
    """A wrong magic number is found before all ranks confirm that they have the memory."""
    with two_ranks() as regions:
        with monkeypatch.context() as patch:
            foreign_memory(patch)
            regions[0].prepare()
        text = "rank 1 of the group: .*no shared region of this version"
        if maps:
            with pytest.raises(CapabilityError, match=rf"create shared memory.*: {text}"):
                regions[1].map(health(1), regions[0].offer, 30.0)
        else:
            segment, failure = regions[1].take(regions[0].offer, 30.0)
            assert segment is None
            assert "no shared region of this version" in failure
    assert segments_of() == []
