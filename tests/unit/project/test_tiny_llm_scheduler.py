"""The demo's scheduler, sampler, tokenizer and report; none of them needs a model."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.tiny_llm.config import ModelConfig
from examples.tiny_llm.errors import DemoError
from examples.tiny_llm.launcher import leave_failure
from examples.tiny_llm.options import LaunchedRank, Options, parse_options
from examples.tiny_llm.report import Continuation, Report, printable
from examples.tiny_llm.sampling import Sampler
from examples.tiny_llm.scheduler import Request, Scheduler, StepPlan
from examples.tiny_llm.timing import summarize
from examples.tiny_llm.tokenizer import ByteTokenizer, open_tokenizer

EOS = 99


def make_scheduler(*requests: Request, slots: int = 2, tokens_per_step: int = 8) -> Scheduler:
    """Create a scheduler with small limits."""
    return Scheduler(requests, slots=slots, tokens_per_step=tokens_per_step, max_length=32, eos_tokens=(EOS,))


def request(number: int, length: int, max_tokens: int = 4, arrival_step: int = 0) -> Request:
    """Create a request whose prompt repeats its number `length` times."""
    return Request(number, (number,) * length, max_tokens, arrival_step)


def test_a_plan_survives_its_message() -> None:
    """A plan is broadcast as plain lists and reads back as the same plan."""
    scheduler = make_scheduler(request(0, 3), request(1, 2))
    scheduler.take_tokens({} if scheduler.next_plan().stop else {0: 5, 1: EOS})
    plan = scheduler.next_plan()
    assert plan.finished == (1,)
    assert plan.appended == {0: 5}
    message = json.loads(json.dumps(plan.to_message()))
    assert StepPlan.from_message(message) == plan


def test_requests_join_and_leave_at_different_steps() -> None:
    """A later request's prefill shares a step with the decode of an earlier one."""
    scheduler = make_scheduler(request(0, 3, max_tokens=3), request(1, 5, max_tokens=1, arrival_step=1))
    assert scheduler.next_plan().run == {0: 3}
    scheduler.take_tokens({0: 7})
    mixed = scheduler.next_plan()
    assert mixed.run == {0: 1, 1: 5}
    assert [new.number for new in mixed.admitted] == [1]
    scheduler.take_tokens({0: 8, 1: 9})
    last = scheduler.next_plan()
    assert last.finished == (1,)
    assert last.run == {0: 1}
    scheduler.take_tokens({0: 6})
    assert scheduler.next_plan().stop
    assert scheduler.generated == {0: [7, 8, 6], 1: [9]}


def test_a_slot_is_used_again_once_its_request_is_finished() -> None:
    """The third request waits for the two slots and gets the one that is free first."""
    scheduler = make_scheduler(request(0, 1), request(1, 1), request(2, 1))
    first = scheduler.next_plan()
    slots = {new.number: new.slot for new in first.admitted}
    assert set(slots) == {0, 1}
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    scheduler.take_tokens({0: 5, 1: EOS})
    second = scheduler.next_plan()
    assert second.finished == (1,)
    assert [(new.number, new.slot) for new in second.admitted] == [(2, slots[1])]


def test_a_long_prompt_takes_several_steps_and_decodes_go_first() -> None:
    """A step never exceeds its token limit; decodes go first and a prompt fills the rest."""
    scheduler = make_scheduler(request(0, 1), request(1, 12), tokens_per_step=6)
    assert scheduler.next_plan().run == {0: 1, 1: 5}
    scheduler.take_tokens({0: 3})
    assert scheduler.next_plan().run == {0: 1, 1: 5}
    scheduler.take_tokens({0: 3})
    assert scheduler.next_plan().run == {0: 1, 1: 2}
    scheduler.take_tokens({0: 3, 1: 4})
    assert scheduler.next_plan().run == {0: 1, 1: 1}


def test_an_idle_scheduler_moves_on_to_the_next_arrival() -> None:
    """While nothing runs, no empty steps are broadcast."""
    scheduler = make_scheduler(request(0, 2, arrival_step=40))
    assert scheduler.next_plan().run == {0: 2}
    assert scheduler.step == 41


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (Request(3, (), 1), "request 3 needs a prompt"),
        (Request(3, (1,), 0), "at least one token"),
        (Request(3, (1,) * 30, 3), "request 3 needs 33 tokens, prompt included; at most 32 fit"),
    ],
)
def test_a_request_that_can_never_run_is_refused(bad: Request, text: str) -> None:
    """A request that can never run is refused at once, by number, instead of waiting for ever."""
    with pytest.raises(DemoError, match=text):
        make_scheduler(bad)


def test_more_slots_than_tokens_per_step_are_refused() -> None:
    """Such limits are refused, as a running request could be left out of a step."""
    with pytest.raises(DemoError, match="4 slots need at least as many tokens"):
        make_scheduler(request(0, 1), slots=4, tokens_per_step=3)


def test_greedy_sampling_takes_the_likeliest_token() -> None:
    """At temperature 0 sampling is not random."""
    assert Sampler().choose(torch.tensor([0.1, 3.0, 2.9]), request=0, position=1) == 1


def test_sampling_is_seeded_per_request_and_position() -> None:
    """A draw depends only on seed, request and position, and follows the probabilities."""
    logits = torch.tensor([0.0, 1.0, -40.0])
    draws = [Sampler(1.0, seed=3).choose(logits, request=1, position=place) for place in range(600)]
    again = [Sampler(1.0, seed=3).choose(logits, request=1, position=place) for place in range(600)]
    other = [Sampler(1.0, seed=3).choose(logits, request=2, position=place) for place in range(600)]
    assert draws == again
    assert draws != other
    assert set(draws) == {0, 1}
    assert 0.6 < sum(draws) / len(draws) < 0.86  # softmax gives 0.73


def test_the_byte_tokenizer_gives_back_what_it_got() -> None:
    """Any text survives; special tokens are dropped, and broken UTF-8 shows as escapes."""
    tokenizer = ByteTokenizer(bos=256)
    text = "Grüße, 世界\n\0"
    tokens = tokenizer.encode(text)
    assert tokens[0] == 256
    assert tokenizer.decode([*tokens, 257]) == text
    assert tokenizer.decode([0xFF, 0x41]) == "\\xffA"
    assert ByteTokenizer().encode("A") == [65]


def test_a_tokenizer_file_beats_bytes(tmp_path: Path) -> None:
    """The directory's `tokenizer.json` is used if it exists; a broken one is named."""
    config = ModelConfig(101, 32, 40, 3, 4, 2, 8)
    with pytest.raises(DemoError, match=r"no tokenizer\.json"):
        open_tokenizer(tmp_path, config)
    words = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path, config)
    assert tokenizer.encode("world hello") == [1, 0]
    assert tokenizer.decode([1, 0]) == "world hello"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DemoError, match=r"cannot read .*tokenizer\.json"):
        open_tokenizer(tmp_path, config)


def make_report(ours: list[int], theirs: list[int]) -> Report:
    """Create a report of one prompt."""
    rows = summarize([{"tp": {"all_reduce": [1.0, 3.0]}}, {"tp": {"all_reduce": [2.0]}}])
    return Report(2, 2, 5, 0.5, 1.0, [Continuation("a", "b", ours, theirs)], rows)


def test_the_verdict_follows_the_tokens() -> None:
    """Equal tokens pass; otherwise the first difference is named."""
    assert make_report([1, 2], [1, 2]).verdict.startswith("OK: all 2 tokens of TP 2 x PP 2 are identical")
    assert not make_report([1, 2], [1, 3]).is_identical
    assert "prompt 0 differ from those of one process from token 1 on" in make_report([1, 2], [1, 3]).verdict
    assert "in length" in make_report([1, 2], [1]).verdict


def test_the_table_merges_the_ranks() -> None:
    """Counts are summed, and quantiles are taken over the calls of all ranks."""
    row = make_report([1], [1]).operations[0]
    assert (row.group, row.operation, row.count, row.p50_us, row.p99_us) == ("tp", "all_reduce", 3, 2.0, 3.0)


def test_text_cannot_command_the_terminal() -> None:
    """Control characters in a model's output are escaped."""
    assert printable("a\x1b[2Jb\nß") == "a\\x1b[2Jb\nß"


def test_the_command_line_has_the_defaults_of_the_options() -> None:
    """Without arguments the demo runs with its defaults."""
    assert parse_options([]) == Options()
    parsed = parse_options(["--tp", "1", "--prompt", "a", "--prompt", "b", "--launched", "3", "/d", "42"])
    assert (parsed.tensor, parsed.prompts) == (1, ("a", "b"))
    assert parsed.launched == LaunchedRank(3, Path("/d"), 42)


@pytest.mark.parametrize(
    "arguments", [["--tp", "0"], ["--temperature", "-1"], ["--pp", "x"], ["--deadline", "nan"]]
)
def test_a_bad_number_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A bad number exits with status 2 and names the option."""
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_failure_is_left_for_the_launcher(tmp_path: Path) -> None:
    """The file holds the error with its traceback."""
    with pytest.raises(DemoError) as caught:
        make_scheduler(Request(3, (), 1))
    leave_failure(LaunchedRank(1, tmp_path, 1), caught.value)
    reason = json.loads((tmp_path / "rank-1.failure").read_text())
    assert reason["kind"] == "DemoError"
    assert "request 3 needs a prompt" in reason["message"]
    assert "in make_scheduler" in reason["traceback"]
