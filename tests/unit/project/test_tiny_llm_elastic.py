"""What the front end of the elastic demo knows and says; no process is started and no model made."""

import json
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from examples.tiny_llm.elastic.account import Account
from examples.tiny_llm.elastic.model import beginnings
from examples.tiny_llm.elastic.options import ElasticOptions, parse_options
from examples.tiny_llm.elastic.requests import Prompt, Requests
from examples.tiny_llm.elastic.wire import Wire
from examples.tiny_llm.lessons import LESSONS
from examples.tiny_llm.scheduler import Request, Scheduler

REPOSITORY = Path(__file__).parents[3]
PROMPTS = [Prompt("a", (1,), (5, 6)), Prompt("b", (2,), (7,)), Prompt("c", (3,), (8, 9))]


def asking(prompts: list[Prompt], at_a_time: int) -> Requests:
    """Return requests that ask these prompts."""
    requests = Requests(at_a_time)
    requests.prompts += prompts
    return requests


def test_requests_go_to_the_replica_that_has_the_fewest() -> None:
    """Each gets as many as it may have, the prompts are asked in turn, and again from the first."""
    requests = asking(PROMPTS, at_a_time=2)
    assert [(each.number, each.by) for each in requests.hand_out([0, 2], more=True)] == [
        (0, 0),
        (1, 2),
        (2, 0),
        (3, 2),
    ]
    assert requests.hand_out([0, 2], more=True) == []
    requests.take(2, {1: 7}, [1])
    (fifth,) = requests.hand_out([0, 2], more=True)
    assert (fifth.number, fifth.by, fifth.prompt.text) == (4, 2, "b")
    assert requests.answers[1].is_right


def test_the_requests_of_a_lost_replica_are_asked_again_from_their_beginning() -> None:
    """They come before others, lose the tokens that had come, and keep their number; finished answers stay."""
    requests = asking(PROMPTS, at_a_time=3)
    requests.hand_out([0, 2], more=True)
    requests.take(2, {1: 7, 3: 5}, [1])
    assert [each.number for each in requests.lose(2)] == [3, 5]
    assert requests.answers[1].is_right
    requests.take(0, {0: 5}, [])
    requests.take(0, {0: 6, 2: 8}, [0])
    assert requests.finished_by(0) == 1
    again = requests.hand_out([0], more=True)
    assert [(each.number, each.by, each.tokens, each.times_lost) for each in again] == [(3, 0, [], 1)]
    requests.take(0, {2: 9, 3: 5}, [2])
    assert [each.number for each in requests.hand_out([0], more=False)] == [5]
    assert requests.unfinished == 3


@pytest.mark.parametrize(
    ("tokens", "finished", "text"),
    [
        ({}, [], "number 0 has no end"),
        ({0: 5}, [0], "number 0 ('a') differs in length"),
        ({0: 4}, [0], "number 0 ('a') differs from token 0 on"),
    ],
)
def test_one_wrong_answer_is_a_failure_that_says_where(
    capsys: pytest.CaptureFixture[str], tokens: dict[int, int], finished: list[int], text: str
) -> None:
    """Answers that are cut off, too short or different are all wrong."""
    requests = asking(PROMPTS[:1], at_a_time=1)
    requests.hand_out([0], more=True)
    requests.take(0, tokens, finished)
    assert not Account(is_quiet=False).close(requests, [])
    assert capsys.readouterr().out.splitlines()[-1] == f"FAILED: 1 of 1 answers are wrong; {text}"
    assert not Account(is_quiet=True).close(requests, [])
    assert json.loads(capsys.readouterr().out)["right"] is False


def test_right_answers_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line says so; the figures name who has given them."""
    requests = asking(PROMPTS[:1], at_a_time=1)
    requests.hand_out([3], more=True)
    requests.take(3, {0: 5}, [])
    requests.take(3, {0: 6}, [0])
    assert Account(is_quiet=True).close(requests, [3])
    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["right"], outcome["answers"], outcome["tokens"], outcome["by_newcomers"]) == (
        True,
        1,
        2,
        1,
    )
    assert Account(is_quiet=False).close(requests, [])
    assert capsys.readouterr().out.splitlines()[-1].startswith("OK: all 1 answers are right")


def test_prompts_are_different_beginnings_of_known_sentences() -> None:
    """The shortest come first, and each leaves something to say."""
    texts = beginnings(24)
    assert len(set(texts)) == len(texts) == 24
    assert texts[:2] == [prompt for prompt, _ in LESSONS[:2]]
    sentences = [prompt + rest for prompt, rest in LESSONS]
    for text in beginnings(10_000):
        assert any(sentence.startswith(text) and sentence != text for sentence in sentences)


def test_a_scheduler_goes_on_with_what_another_has_begun() -> None:
    """The tokens that were generated become part of the prompt, so that all positions stay as they were."""
    limited = partial(Scheduler, slots=1, tokens_per_step=8, max_length=16)
    first = limited([])
    assert first.next_plan().stop
    first.submit(Request(0, (1, 2), 3))
    first.submit(Request(1, (4,), 2))
    assert first.next_plan().run == {0: 2}
    first.take_tokens({0: 9})
    assert first.is_running(0)
    assert not first.is_running(1)
    first.next_plan()  # whose tokens never come
    left = first.unfinished()
    assert left == [Request(0, (1, 2, 9), 2), Request(1, (4,), 2)]
    second = limited(left)
    plan = second.next_plan()
    assert plan.run == {0: 3}
    assert plan.admitted[0].prompt == (1, 2, 9)
    second.take_tokens({0: 8})
    second.next_plan()
    second.take_tokens({0: 7})
    assert not second.is_running(0)


def test_objects_cross_the_wire_whole() -> None:
    """A part of a line waits for the rest; the end of the stream is no object."""
    ours, theirs = socket.socketpair()
    wire = Wire(ours)
    theirs.sendall(b'{"a": 1}\n{"b"')
    assert wire.receive() == [{"a": 1}]
    assert wire.receive() == []
    theirs.sendall(b": 2}\n")
    assert wire.receive(None) == [{"b": 2}]
    wire.send({"c": [1, 2]})
    assert theirs.recv(100) == b'{"c": [1, 2]}\n'
    theirs.close()
    assert wire.receive(None) == []
    assert not wire.is_open
    wire.close()


def test_the_victim_is_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """By default it is the last one, and one that is not there is refused."""
    assert parse_options([]) == ElasticOptions()
    assert parse_options(["--tp", "1"]).victim == 1
    assert parse_options(["--tp", "1", "--victim", "0"]).victim == 0
    with pytest.raises(SystemExit):
        parse_options(["--tp", "1", "--victim", "2"])
    assert "there is no rank 2" in capsys.readouterr().err


@pytest.mark.slow
def test_the_front_end_needs_no_torch() -> None:
    """It starts at once, and the workers pay for the import."""
    code = "import sys, examples.tiny_llm.elastic.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
