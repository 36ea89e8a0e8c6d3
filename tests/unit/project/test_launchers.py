"""Launchers end by a signal wherever it strikes, and take their ranks along."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks import launching
from coordinator.cli import local_ranks
from coordinator.cli.kept_signals import kept_signals
from examples.tiny_llm import launcher


class StruckChild:
    """A child that runs on. A signal comes within its first `poll`, which holds a lock then."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.is_locked = False

    def poll(self) -> None:
        """Do as `Popen.poll`."""
        self.is_locked = True
        signal.raise_signal(self._number)
        self.is_locked = False


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Put the handlers back that were there before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def by_command(child: Any) -> None:
    with kept_signals() as signals:
        local_ranks._watch({0: child}, 10.0, signals)


def by_benchmark(child: Any) -> None:
    with kept_signals() as signals:
        launching._watch([child], 10.0, signals)


def by_demo(child: Any) -> None:
    launcher._watch({0: child}, 10.0, launcher.Signals())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("watch", [by_command, by_benchmark, by_demo])
def test_a_signal_within_a_poll_ends_the_launcher_behind_it(
    watch: Callable[[Any], None], number: int
) -> None:
    """It leaves no lock held for which the end of the child would then be waited for ever."""
    child = StruckChild(number)
    with pytest.raises(SystemExit) as ended:
        watch(child)
    assert ended.value.code == 128 + number
    assert not child.is_locked


def test_a_signal_that_is_ignored_stays_so_and_the_others_get_their_handlers_back() -> None:
    """As in a shell that runs a command in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    with kept_signals() as signals:
        signal.raise_signal(signal.SIGINT)
        signals.check()
        assert signal.getsignal(signal.SIGTERM) == signals.keep
    assert signal.getsignal(signal.SIGTERM) is before
