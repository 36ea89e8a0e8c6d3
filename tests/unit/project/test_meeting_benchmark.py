"""The benchmark of meetings of actors: what it prints without Ray, and how it sums up."""

import sys

import pytest

from benchmarks.meeting import Times, main, summary


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with status 2 and one line."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", ["meeting"])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'group-coordinator[ray]'" in line
    assert "make test-ray" in line


def test_what_a_meeting_adds_is_taken_from_each_meeting() -> None:
    """The median of the differences is not the difference of the medians."""
    times = [Times(0.5, 0.1), Times(0.3, 0.25), Times(0.9, 0.8)]
    found = summary(times)
    assert found["count"] == 3
    assert found["meeting"] == {"median_s": 0.5, "most_s": 0.9}
    assert found["joining"] == {"median_s": 0.25, "most_s": 0.8}
    assert found["added"]["median_s"] == pytest.approx(0.1)
    assert found["added"]["most_s"] == pytest.approx(0.4)
