"""Frames over Gloo that no call waits for: none is lost when another one is sent meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from coordinator.host import gloo
from coordinator.host.gloo import _EagerSends


class Works:
    """Stands for the wait for frames; `meanwhile` runs while a thread for it is started."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, _threads: object, works: Sequence[tuple[int, object]], keep: list[Any]) -> None:
        self.newest, self.keep = works[0][1], keep
        type(self).meanwhile()


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> _EagerSends:
    """Return the open frames to a peer, of which there are two."""
    monkeypatch.setattr(gloo, "PointToPointWorks", Works)
    made = _EagerSends()
    for name in ("first", "second"):
        made.add(name, torch.zeros(3, dtype=torch.uint8))  # type: ignore[arg-type] # stands for a work
    return made


def settle(sends: _EagerSends) -> Any:
    return sends.settle(None, 1)  # type: ignore[arg-type] # no thread is needed


def names(frames: Sequence[tuple[Any, object]]) -> list[str]:
    return [work for work, _ in frames]


def test_a_frame_that_is_sent_while_others_are_settled_stays_open(
    sends: _EagerSends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread, or a signal handler, sends it. Gloo would drop it if its memory went with the others'."""
    third = torch.zeros(5, dtype=torch.uint8)
    monkeypatch.setattr(Works, "meanwhile", lambda: sends.add("third", third))  # type: ignore[arg-type]
    works = settle(sends)
    assert (works.newest, names(works.keep), names(sends.open)) == ("second", ["first", "second"], ["third"])
    sends.settled(works)
    assert sends.nbytes == 5


def test_frames_stay_open_if_no_thread_can_wait_for_them(
    sends: _EagerSends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt finds them all."""

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Works, "meanwhile", refuse)
    with pytest.raises(RuntimeError):
        settle(sends)
    assert names(sends.open) == ["first", "second"]


def test_frames_are_accounted_for_once(sends: _EagerSends) -> None:
    """Two threads may have waited for the same frames, and others are settled when the second one comes."""
    first = settle(sends)
    sends.settled(first)
    sends.add("third", torch.zeros(5, dtype=torch.uint8))  # type: ignore[arg-type]
    second = settle(sends)
    sends.settled(first)
    assert sends.settling is second
