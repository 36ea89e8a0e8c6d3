"""Which ranks are lost when a host vanishes, or when others report one of its ranks."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, cast

import pytest

from coordinator.heartbeats import links, watching
from coordinator.heartbeats.links import Link, State
from shm_broadcast.errors import NativeError
from shm_broadcast.liveness import PeerWatch, this_process
from tests.heartbeat_links import LOST_AFTER_S, PROMPT_S, joined
from tests.waiting import wait_until


def test_all_ranks_of_a_vanished_host_are_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that any group has shown to be on that host, in each group; others are not. Later watches hear it too."""
    own = this_process()
    with joined(3) as beats, closing(PeerWatch(own, {})) as first, closing(PeerWatch(own, {})) as second:
        mine = beats[1]
        mine.learn((0, 5))
        mine.learn((5, 6))
        mine.learn((2, 7))
        mine.listen(first, (0, 1, 2, 5, 7))
        mine.listen(second, (1, 6, 7))
        mine.check_store()
        assert (first.lost(), second.lost()) == ((), ())
        look: Callable[[Link, float], State] = Link.look

        def vanish(link: Link, now: float) -> State:
            link.reason = "no answer"
            return State.VANISHED if link.partner == 0 else look(link, now)

        monkeypatch.setattr(Link, "look", vanish)
        wait_until(lambda: first.lost() == (0, 5), "the host is lost")
        assert second.lost() == (6,)
        assert first.describe(5).endswith("no answer")
        assert mine.names(range(3)).keys() == {2}
        with pytest.raises(NativeError, match="store has vanished"):
            mine.check_store()
        with closing(PeerWatch(own, {})) as third:
            mine.listen(third, (0, 2))
            assert third.lost() == (0,)


def let_kernel_say(link: Link, *said: tuple[int, float]) -> None:
    """Let `link` find each pair of unanswered bytes and seconds of silence in turn, and the last one ever after."""
    left = [links._Seen(*each) for each in said]
    link._seen = lambda: left.pop(0) if len(left) > 1 else left[0]  # type: ignore[method-assign]


@pytest.mark.guarantee("K10")
@pytest.mark.guarantee("V3")
def test_a_reported_rank_is_lost_alone_if_its_host_answers() -> None:
    """The report waits for the answer to a beat, whatever was on its way before, the handshake's last bytes too."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].learn((0, 2))
        beats[1].listen(watch, (0, 1, 2))
        (link,) = beats[1]._links.values()
        beats[1].lost_after_s = PROMPT_S
        let_kernel_say(link, (1, 0.0))
        watch.report(2, "says the driver")
        beats[1]._next_look = 0.0
        assert watch.lost() == ()
        assert watch.is_in_doubt()
        let_kernel_say(link, (0, 0.0))
        beats[1]._next_look = 0.0
        assert watch.lost() == (2,)
        assert watch.reported(2) == "says the driver"
        assert not watch.is_in_doubt()


@pytest.mark.guarantee("K10")
def test_the_answer_to_an_earlier_report_says_nothing_about_a_later_one() -> None:
    """A rank has died alone and nobody has looked since. When its host vanishes, the next report asks again."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].learn((0, 2, 3))
        beats[1].listen(watch, (0, 1, 2, 3))
        (link,) = beats[1]._links.values()
        beats[1].lost_after_s = PROMPT_S
        let_kernel_say(link, (0, 0.0), (0, 0.0), (1, 0.0))
        watch.report(2, "its connection has ended")
        watch.report(3, "its connection has ended")
        beats[1]._next_look = 0.0
        assert 3 not in watch.lost()


@pytest.mark.guarantee("V1")
def test_a_group_that_is_made_later_hears_of_a_silent_host() -> None:
    """Of which a rank was reported, and no beat was answered; all of its ranks are lost for that group too."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as first:
        beats[1].learn((0, 2))
        beats[1].listen(first, (0, 1, 2))
        (link,) = beats[1]._links.values()
        let_kernel_say(link, (1, LOST_AFTER_S / 2))
        link._waited_s = LOST_AFTER_S / 2
        first.report(2, "its connection has ended")
        wait_until(lambda: first.lost() == (0, 2), "the host is lost")
        with closing(PeerWatch(this_process(), {})) as later:
            beats[1].listen(later, (0, 1, 2))
            assert later.lost() == (0, 2)


@pytest.mark.guarantee("D10")
def test_what_a_handler_raises_leaves_a_loss_to_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """It strikes while the watches are told."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].listen(watch, (0, 1))
        tell, strikes = watch.report_all, iter([True])

        def struck(how: Mapping[int, str]) -> None:
            if next(strikes, False):
                raise KeyboardInterrupt
            tell(how)

        monkeypatch.setattr(watch, "report_all", struck)
        monkeypatch.setattr(Link, "look", lambda _link, _now: State.VANISHED)
        with pytest.raises(KeyboardInterrupt):
            watch.lost()
        assert watch.lost() == (0,)


def test_a_link_that_a_handler_closes_meanwhile_has_ended() -> None:
    """The handler destroys the last group that used it, while this thread asks the kernel."""
    with joined(2) as beats:
        (link,) = beats[1]._links.values()
        seen = link._seen

        def closed() -> links._Seen:
            link.close()
            return seen()

        link._seen = closed  # type: ignore[method-assign]
        assert link.look(time.monotonic()) is State.ENDED
        link._waited_s = LOST_AFTER_S
        assert not link.is_silent()


@pytest.mark.guarantee("D7")
def test_a_forked_child_keeps_no_link_open() -> None:
    """The other end learns that the process has died although a child of it lives on."""
    with joined(2) as beats:
        (link,) = beats[1]._links.values()
        child = os.fork()
        if child == 0:
            os._exit(0 if link._connection.fileno() == -1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert link.look(time.monotonic()) is State.OPEN


@pytest.mark.guarantee("K10")
def test_an_answer_of_before_the_report_says_nothing() -> None:
    """A beat that was sent and answered before shows no host that vanished since: the report asks for another one."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].learn((0, 2))
        beats[1].listen(watch, (0, 1, 2))
        (link,) = beats[1]._links.values()
        beats[1].lost_after_s = PROMPT_S
        assert watch.lost() == ()
        let_kernel_say(link, (0, 0.0), (1, 0.0))
        watch.report(2, "its connection has ended")
        beats[1]._next_look = 0.0
        assert watch.lost() == ()


@pytest.mark.guarantee("K10")
def test_a_reported_rank_takes_its_host_along_if_no_beat_is_answered() -> None:
    """The store of a job with a secret reports rank by rank. No rank of a vanished host is named alone."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].learn((0, 2, 3))
        beats[1].listen(watch, (0, 1, 2))
        (link,) = beats[1]._links.values()
        beats[1].lost_after_s = PROMPT_S
        let_kernel_say(link, (1, 0.0))
        watch.report(2, "its connection has ended")
        beats[1]._next_look = 0.0
        assert watch.lost() == ()
        let_kernel_say(link, (1, LOST_AFTER_S / 2))
        link._waited_s = LOST_AFTER_S / 2
        beats[1]._next_look = 0.0
        assert watch.lost() == (0, 2)
        assert watch.reported(0) == "its connection has ended"


@pytest.mark.guarantee("V1")
def test_a_suspected_rank_takes_its_host_along_if_no_beat_is_answered() -> None:
    """The connection of a queue may fail before anybody has looked at the link: the host is asked, and in doubt."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].learn((0, 2))
        beats[1].listen(watch, (0, 1, 2))
        (link,) = beats[1]._links.values()
        let_kernel_say(link, (1, 9.0))
        assert not watch.is_in_doubt()
        watch.suspect(2, "a connection has failed")
        assert watch.is_in_doubt()
        wait_until(lambda: watch.lost() == (0, 2), "the host is lost")
        assert watch.reported(2) == "a connection has failed"


@pytest.mark.guarantee("V3")
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_suspected_rank_is_not_lost_if_its_host_answers(has_ended: bool) -> None:
    """The doubt ends with the answer. A report that its process has ended counts, also behind the suspicion."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].learn((0, 2))
        beats[1].listen(watch, (0, 1, 2))
        (link,) = beats[1]._links.values()
        beats[1].lost_after_s = PROMPT_S
        let_kernel_say(link, (1, 0.0))
        watch.suspect(2, "a connection has failed")
        if has_ended:
            watch.report(2, "says the driver")
        watch.suspect(2, "another one has failed")
        assert watch.is_in_doubt()
        let_kernel_say(link, (0, 0.0))
        wait_until(lambda: not watch.is_in_doubt(), "the host has answered")
        assert watch.lost() == ((2,) if has_ended else ())
        assert watch.reported(2) == ("says the driver" if has_ended else None)


@pytest.mark.guarantee("V3")
def test_a_suspicion_without_a_link_that_can_tell_is_no_doubt() -> None:
    """Of a rank on this host, or where the process at the other end has gone."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].learn((0, 2))
        beats[1].listen(watch, (0, 1, 2))
        watch.suspect(1, "a connection has failed")
        assert not watch.is_in_doubt()
        beats[0].release("first")
        wait_until(lambda: watch.lost() == () and not beats[1].names((0,)), "the link has ended")
        watch.suspect(2, "a connection has failed")
        assert not watch.is_in_doubt()
        assert watch.lost() == ()


@pytest.mark.guarantee("K10")
@pytest.mark.parametrize("end", ["closed", "released", "full"])
def test_a_report_is_not_held_back_without_a_link_that_can_tell(end: str) -> None:
    """The process at the other end has gone, the group has, or its kernel answers and takes no beat."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].learn((0, 2))
        beats[1].listen(watch, (0, 1, 2))
        (link,) = beats[1]._links.values()
        let_kernel_say(link, (1, 0.0))
        beats[1].lost_after_s = LOST_AFTER_S if end == "full" else PROMPT_S
        watch.report(2, "gone")
        assert watch.lost() == () or end == "full"
        if end == "closed":
            beats[0].release("first")
        elif end == "released":
            beats[1].release("first")
        wait_until(lambda: watch.lost() == (2,), "the report is passed on")


def test_a_link_without_beats_beats_once_more_if_its_host_is_in_doubt() -> None:
    """A rank that finds a connection closed asks; keepalives would find a vanished host only after ten seconds."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].listen(watch, (0, 1))
        (link,) = beats[1]._links.values()
        link._beats_left = 0
        assert watch.lost() == ()
        assert link._seen().silent_s >= 0
        sent = list[bytes]()
        connection = link._connection
        link._connection = cast("socket.socket", Sending(connection, sent))
        time.sleep(2 * watching._LOOK_EVERY_S)
        assert watch.lost() == ()
        assert sent == []
        time.sleep(2 * watching._LOOK_EVERY_S)
        assert not watch.is_in_doubt()
        assert sent == [b"."]
        assert link._beats_left == 0
        # From now on the other host does not answer.
        link._seen = lambda: links._Seen(1, 9.0)  # type: ignore[method-assign]
        wait_until(watch.is_in_doubt, "the beat has had no answer for the time of one")
        wait_until(lambda: watch.lost() == (0,), "the host is lost")
        assert not watch.is_in_doubt()


def test_a_host_whose_kernel_answers_is_in_doubt_for_a_limited_time() -> None:
    """Its process reads nothing, and the window of its connection is full: that is no lost host, ever."""
    with joined(2) as beats, closing(PeerWatch(this_process(), {})) as watch:
        beats[1].listen(watch, (0, 1))
        (link,) = beats[1]._links.values()
        link._seen = lambda: links._Seen(1, 0.0)  # type: ignore[method-assign]
        wait_until(watch.is_in_doubt, "the beat has had no answer for the time of one")
        wait_until(lambda: not watch.is_in_doubt(), "it has had none for twice the time of a lost host")
        assert watch.lost() == ()


class Sending:
    """Stands for a socket, and notes what is sent."""

    def __init__(self, connection: socket.socket, sent: list[bytes]) -> None:
        self._connection, self._sent = connection, sent

    def send(self, data: bytes) -> int:
        self._sent.append(data)
        return self._connection.send(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_a_watch_that_is_closed_looks_no_more() -> None:
    """Its group may have released the links."""
    looks = list[int]()
    watch = PeerWatch(this_process(), {})
    watch.look_with(lambda: looks.append(1))
    assert watch.lost() == ()
    watch.close()
    assert (watch.lost(), looks) == ((), [1])
