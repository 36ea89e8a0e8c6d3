"""The demo gives one process's tokens in several, runs as a user starts it, and its failures leave nothing."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.tiny_llm.__main__ import main
from examples.tiny_llm.checkpoint import write_checkpoint
from examples.tiny_llm.config import ModelConfig, RopeConfig
from examples.tiny_llm.group import ModelGroups
from examples.tiny_llm.model import LlamaStage
from tests.alone import Alone
from tests.harness import RankPool
from tests.leaks import TEMP_PREFIX, children_of
from tests.ports import free_port
from tests.printed_command import pids_shown_by
from tests.waiting import has_ended, wait_until

REPOSITORY = Path(__file__).parents[3]
DEMO = (sys.executable, "-m", "examples.tiny_llm")
DEADLINE_S = 90.0

CONFIG = ModelConfig(
    vocab_size=301,  # it is odd, which pads one rank's part of the vocabulary
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,  # it is odd, which makes the stages differ
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=4096,
    bos_token_id=300,
    eos_token_ids=(7, 11),
    rope=RopeConfig(5000.0, "llama3", 4.0, 1.0, 4.0, 64),
)

PROMPTS = (
    "Hi",
    "A prompt that is longer than what fits into one step of the scheduler",
    "x",
    "three words here",
    "?",
)


def random_checkpoint(directory: Path, config: ModelConfig) -> Path:
    """Write a model with random weights that are large enough to keep its logits well apart."""
    alone = Alone()
    stage = LlamaStage(config, ModelGroups(alone, alone, alone), 1)
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: torch.randn(weight.shape, generator=generator) * 0.3 + float("norm" in name)
        for name, weight in stage.state_dict().items()
    }
    write_checkpoint(directory, config, weights, files=2)
    return directory


def prompts(texts: Sequence[str]) -> list[str]:
    """Return the arguments that pass these prompts."""
    return [argument for text in texts for argument in ("--prompt", text)]


def run_demo(*arguments: str, command: Sequence[str] = DEMO) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end, and check that it left no directory."""
    done = subprocess.run(
        [*command, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert not leftovers()
    return done


def leftovers() -> list[Path]:
    """List the temporary directories that the demo made and did not remove."""
    return list(Path(tempfile.gettempdir()).glob(f"{TEMP_PREFIX}demo-*"))


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the report that the demo printed with `--json`."""
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["identical"]
    return report


def rank_of_demo(rank: int, world_size: int, directory: Path, port: int, arguments: list[str]) -> list[Any]:
    """Run one rank of the demo in this process, with torchrun's variables; return its status and output."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    printed, complaints = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, str(value))
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
            status = main(arguments)
    return [status, printed.getvalue(), complaints.getvalue()]


def run_in_pool(pool: RankPool, *arguments: str) -> dict[str, Any]:
    """Run the demo in the ranks of `pool`; return the report of rank 0. The others print nothing."""
    (status, printed, complaints), *others = pool.run(
        rank_of_demo, free_port(), list(arguments), timeout_s=DEADLINE_S
    )
    assert [other[:2] for other in others] == [[0, ""]] * len(others)
    return report_of(subprocess.CompletedProcess(arguments, status, printed, complaints))


def test_four_processes_give_the_tokens_of_one(ranks4: RankPool, tmp_path: Path) -> None:
    """TP 2 x PP 2 gives the tokens of one process; prompts outnumber the slots and begin and end at different steps."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    report = run_in_pool(
        ranks4,
        *("--model", str(model), "--json", "--max-tokens", "30", "--slots", "3", "--tokens-per-step", "16"),
        *prompts(PROMPTS),
    )
    assert len(report["continuations"]) == len(PROMPTS)
    assert all(len(one["tokens"]) >= 1 for one in report["continuations"])
    counts = {(row["group"], row["operation"]): row["count"] for row in report["operations"]}
    steps = report["steps"]
    assert counts["world", "broadcast_object"] == 4 * (steps + 1)
    assert counts["pp", "send_tensor_dict"] == counts["pp", "recv_tensor_dict"] == 2 * steps
    # Each layer has two all-reduces and the embedding has one, on both ranks that share them.
    assert counts["tp", "all_reduce"] == 2 * steps * (2 * CONFIG.num_hidden_layers + 1)


def test_a_single_kv_head_is_replicated_and_sampling_is_reproducible(
    ranks2: RankPool, tmp_path: Path
) -> None:
    """TP 2 over one KV head, with tied embeddings and a temperature, gives the tokens of one process."""
    fields = {field: getattr(CONFIG, field) for field in CONFIG.__dataclass_fields__}
    config = ModelConfig(**{**fields, "num_key_value_heads": 1, "tie_word_embeddings": True})
    model = random_checkpoint(tmp_path / "model", config)
    report = run_in_pool(
        ranks2,
        *("--model", str(model), "--json", "--tp", "2", "--pp", "1", "--max-tokens", "25"),
        *("--temperature", "0.9", *prompts(PROMPTS[:3])),
    )
    texts = [one["text"] for one in report["continuations"]]
    assert len(set(texts)) == len(texts)


@pytest.mark.thorough
def test_torchrun_can_start_the_ranks(tmp_path: Path) -> None:
    """Under torchrun each process is a rank, and rank 0 reports."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        DEMO[2],
    )
    report_of(
        run_demo(
            *(
                "--model",
                str(model),
                "--json",
                "--tp",
                "1",
                "--pp",
                "2",
                "--max-tokens",
                "8",
                *prompts(PROMPTS[:2]),
            ),
            command=torchrun,
        )
    )


@pytest.mark.thorough
def test_the_demo_trains_its_own_model_and_ends_with_ok() -> None:
    """Without a model it prints the texts, the table and the speed, and a last line that says OK.

    `make demo` starts four ranks; two show the same with less processor time.
    """
    done = run_demo("--tp", "1", "--pp", "2", "--hold", "0.5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("OK: all ")
    assert "tokens/s" in lines[-2]
    assert "A barrier | waits for everyone." in lines
    assert "broadcast_object" in done.stdout
    assert "training a tiny model" in done.stderr
    assert "generating with TP 1 x PP 2 again" in done.stderr


def test_the_printed_command_watches_a_demo_that_holds(tmp_path: Path) -> None:
    """The command, run as printed while the demo serves again and again, shows calls of all ranks."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    errors = tmp_path / "errors"
    command = [*DEMO, "--tp", "2", "--pp", "1", "--model", str(model), "--hold", "120", *prompts(PROMPTS[:2])]
    with errors.open("w") as stderr:
        demo = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            wait_until(lambda: "again" in errors.read_text(), "the second time", DEADLINE_S, 0.05)
            assert pids_shown_by(errors.read_text()) == set(children_of(demo.pid))
        finally:
            demo.send_signal(signal.SIGINT)
            status = demo.wait(DEADLINE_S)
        assert status == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--pp", "5"), "4 layers cannot fill 5 pipeline stages (--pp)"),
        (("--tp", "3"), "4 attention heads cannot be split over 3 ranks (--tp)"),
        (("--model", "/no/such"), "cannot read /no/such/config.json"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(arguments: tuple[str, ...], text: str) -> None:
    """The demo ends with status 2 before it starts any rank."""
    done = run_demo(*arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_launcher_needs_no_torch() -> None:
    """The launcher does not import torch, which takes seconds; only the ranks import it."""
    code = "import sys, examples.tiny_llm.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


def test_an_error_of_rank_0_is_said_in_one_line(tmp_path: Path) -> None:
    """An error that only a rank can find also reaches the user without a traceback."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    (model / "model-00002-of-00002.safetensors").unlink()
    done = run_demo("--model", str(model), "--tp", "1", "--pp", "2")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1
    assert "cannot read" in errors[0]
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def generating(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a long run, wait until its two ranks generate, and yield the launcher and their process ids."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        launcher = subprocess.Popen(
            [
                *DEMO,
                "--model",
                str(model),
                "--tp",
                "2",
                "--pp",
                "1",
                "--max-tokens",
                "1500",
                "--prompt",
                "long",
            ],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
        )
    try:
        wait_until(lambda: "generating with TP" in errors.read_text(), "the first tokens", DEADLINE_S, 0.05)
        yield launcher, sorted(children_of(launcher.pid))
    finally:
        launcher.kill()
        launcher.wait()


def test_a_killed_rank_is_named_and_takes_the_others_along(tmp_path: Path) -> None:
    """The launcher says which rank died and how, ends the others, and removes its files."""
    with generating(tmp_path) as (launcher, ranks):
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert launcher.wait(DEADLINE_S) == 1
        assert all(map(has_ended, ranks))
    assert "rank 1 was killed by SIGKILL" in (tmp_path / "errors").read_text()
    assert not leftovers()


def test_the_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """Killing the launcher leaves no rank behind."""
    with generating(tmp_path) as (launcher, ranks):
        launcher.kill()
        launcher.wait()
        wait_until(lambda: all(map(has_ended, ranks)), f"the end of ranks {ranks}", DEADLINE_S, 0.05)
    for path in leftovers():  # no process was left to remove them
        shutil.rmtree(path)


def test_the_launcher_gives_up_at_its_deadline(tmp_path: Path) -> None:
    """A run that takes too long ends with status 1, and its ranks end too."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    done = run_demo("--model", str(model), "--tp", "1", "--pp", "1", "--deadline", "0.5")
    assert done.returncode == 1
    assert "not finished within 0.5 s (--deadline); ranks [0] were still running" in done.stderr
