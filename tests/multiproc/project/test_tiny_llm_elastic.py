"""The elastic demo loses a worker, goes on, takes new ones in, lets old ones go, and every answer is right."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import socketpair
from typing import Any

import pytest

from coordinator import PeerLostError
from coordinator.elastic.driver import Driver
from coordinator.elastic.protocol import Build, Operation
from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from examples.tiny_llm.checkpoint import Checkpoint
from examples.tiny_llm.config import ModelConfig
from examples.tiny_llm.elastic import serving, worker
from examples.tiny_llm.elastic.model import make_model
from examples.tiny_llm.elastic.options import ElasticOptions, LaunchedWorker
from examples.tiny_llm.elastic.wire import Wire
from examples.tiny_llm.group import ModelGroups
from examples.tiny_llm.model import LlamaStage, load_weights
from examples.tiny_llm.sampling import Sampler
from examples.tiny_llm.worker import StageWorker, run_step
from tests.harness import run_ranks
from tests.leaks import children_of
from tests.multiproc.project.test_tiny_llm_demo import (
    CONFIG,
    DEADLINE_S,
    REPOSITORY,
    leftovers,
    random_checkpoint,
)
from tests.waiting import has_ended, wait_until

DEMO = (sys.executable, "-m", "examples.tiny_llm.elastic")
RUN_S = 320.0
"""Longer than the demo's own deadline, which says what it waits for."""


def run_demo(*arguments: str) -> dict[str, Any]:
    """Run the demo to its end, check that it left nothing and complained of nothing, and return its outcome."""
    done = subprocess.run(
        [*DEMO, "--json", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert not leftovers()
    assert (done.returncode, done.stderr) == (0, "")
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def check_outcome(outcome: dict[str, Any]) -> None:
    """Check that all has happened that the demo shows."""
    assert outcome["right"]
    epochs = outcome["epochs"]
    assert epochs == sorted(set(epochs))
    assert len(epochs) == 4
    assert outcome["asked_again"] > 0
    assert outcome["by_newcomers"] > 0
    assert outcome["steps_beside"] > 0, "the others serve while the new workers start"
    assert outcome["first_step_s"] > 0
    assert outcome["blocked_s"] > 0


@pytest.mark.thorough
def test_a_worker_is_killed_and_replaced_and_every_answer_is_right(tmp_path: Path) -> None:
    """Two replicas of one process each. The trained model, and replicas of two, are left to the thorough tests."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    check_outcome(run_demo("--tp", "1", "--model", str(model), "--prompts", "6", "--max-tokens", "40"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tensor", "victim", "seed"), [(1, 0, 1), (2, 0, 2), (2, 1, 3), (2, 2, 4), (2, 3, 5)]
)
def test_any_worker_may_be_killed_at_any_time(tmp_path: Path, tensor: int, victim: int, seed: int) -> None:
    """Rank 0 too, which has begun the rendezvous, and either part of a replica."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    arguments = ("--tp", str(tensor), "--victim", str(victim), "--seed", str(seed))
    check_outcome(run_demo(*arguments, "--model", str(model), "--prompts", "12"))


@pytest.mark.thorough
def test_make_demo_elastic_tells_what_happens() -> None:
    """Its lines come in the order of the events, and the last one says that all is right."""
    done = subprocess.run(
        ["make", "--no-print-directory", "demo-elastic"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("OK: all ")
    places = [
        done.stdout.index(text)
        for text in (
            "4 workers start",
            "the model is trained",
            "epoch 0:",
            "SIGKILL to worker 3",
            "first good step",
        )
    ]
    places += [
        done.stdout.index(text) for text in ("start of workers 4, 5", "epoch 2:", "has left, as planned")
    ]
    assert places == sorted(places)
    assert "worker 2 is left out, as its replica has lost a rank" in done.stdout


@contextlib.contextmanager
def running(tmp_path: Path, until: str) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start the demo, wait until it says `until`, and yield it with its workers."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    told, errors = tmp_path / "told", tmp_path / "errors"
    with told.open("w") as stdout, errors.open("w") as stderr:
        command = [*DEMO, "--tp", "1", "--model", str(model)]
        demo = subprocess.Popen(command, cwd=REPOSITORY, stdout=stdout, stderr=stderr)
    try:
        wait_until(lambda: until in told.read_text(), until, DEADLINE_S)
        yield demo, children_of(demo.pid)
    finally:
        demo.kill()
        demo.wait()


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("until", ["workers start", "epoch 0", "SIGKILL", "start of", "joins", "to leave"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, until: str, number: int) -> None:
    """Neither processes nor files, whatever happens at that moment."""
    with running(tmp_path, until) as (demo, workers):
        demo.send_signal(number)
        assert demo.wait(DEADLINE_S) == 128 + number
        assert all(map(has_ended, workers))
    assert not leftovers()
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.thorough
def test_the_workers_end_with_the_front_end(tmp_path: Path) -> None:
    """Killing it leaves no worker behind."""
    with running(tmp_path, "first good step") as (demo, workers):
        demo.kill()
        demo.wait()
        wait_until(lambda: all(map(has_ended, workers)), f"the end of workers {workers}", DEADLINE_S)
    for path in leftovers():  # no process was left to remove them
        shutil.rmtree(path)


@pytest.mark.thorough
def test_a_worker_that_fails_otherwise_is_named(tmp_path: Path) -> None:
    """The demo ends with status 1, and takes the others along."""
    with running(tmp_path, "start of worker 2") as (demo, workers):
        os.kill(max(workers), signal.SIGKILL)
        assert demo.wait(DEADLINE_S) == 1
        assert all(map(has_ended, workers))
    assert not leftovers()
    assert "worker 2 has ended with status -9" in (tmp_path / "errors").read_text()


STEP = 12
"""The step of the model in which a rank is disturbed."""


class FrontEnd:
    """The other end of a server's wire: asks three prompts, and tells the server to end when it is told so."""

    def __init__(self, model: str, groups: ParallelGroups, tensor: int) -> None:
        """Let the process answer the prompts by itself first."""
        self.options = ElasticOptions(model=Path(model), tensor=tensor, prompts=3, max_tokens=20, slots=2)
        self.made = make_model(self.options, Path(model), ModelGroups(groups.pp, groups.pp, groups.pp))
        self.front, self.back = (Wire(end) for end in socketpair())
        self.told: list[dict[str, Any]] = []
        self.answers: dict[int, list[int]] = {number: [] for number in range(self.options.prompts)}
        self.unfinished = set(self.answers)

    def say(self, **message: Any) -> None:
        """Hear what the server says."""
        self.told.append(message)
        for number, token in message.get("tokens", ()):
            self.answers[number].append(token)
        self.unfinished.difference_update(message.get("finished", ()))

    def ask(self) -> None:
        """Send the prompts."""
        for number, (_, prompt, _) in enumerate(self.made["prompts"]):
            self.front.send({"do": "serve", "number": number, "prompt": prompt})

    def make_server(self, groups: ParallelGroups) -> serving.ReplicaServer:
        """Return a server with its part of the model."""
        assert self.options.model is not None
        replica, config = serving.groups_of_replica(groups), ModelConfig.from_directory(self.options.model)
        stage = LlamaStage(config, replica, self.made["max_length"])
        with Checkpoint(self.options.model) as checkpoint:
            load_weights(stage, checkpoint)
        stage_worker = StageWorker(stage, self.options.slots, Sampler())
        return serving.ReplicaServer(groups, stage_worker, self.back, self.say, self.options)

    def close(self, server: serving.ReplicaServer) -> None:
        """Leave the groups, and close both ends."""
        server.groups.destroy()
        destroy_distributed_environment()
        self.front.close()
        self.back.close()

    def heard(self, told: str) -> list[dict[str, Any]]:
        """Return the messages of this kind."""
        return [message for message in self.told if message["told"] == told]

    @property
    def are_right(self) -> bool:
        """Whether all answers are those of this process alone."""
        return [self.answers[number] for number in self.answers] == [each[2] for each in self.made["prompts"]]


def elastic_groups(rank: int, layout: ParallelLayout, directory: Path) -> ParallelGroups:
    init_distributed_environment(
        layout.world_size, rank, f"file://{directory}/rendezvous", backend="gloo", elastic=True
    )
    return ParallelGroups.create(layout, extra_groups=["replica"])


def is_disturbed(
    rank: int, world_size: int, directory: Path, model: str, victim: int, is_late: bool
) -> dict[str, Any]:
    groups = elastic_groups(rank, ParallelLayout(tensor=world_size), directory)
    front_end = FrontEnd(model, groups, world_size)
    steps = itertools.count()

    def run_step_or_fail(*arguments: Any) -> Any:
        is_struck = rank == victim and next(steps) == STEP
        tokens = run_step(*arguments) if is_late or not is_struck else None
        if is_struck:
            raise PeerLostError("planted")
        return tokens

    def say(**message: Any) -> None:
        front_end.say(**message)
        if not front_end.unfinished:
            front_end.front.send({"do": "end"})

    if rank == 0:
        front_end.ask()
    server = front_end.make_server(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "run_step", run_step_or_fail)
        patch.setattr(server, "_say", say)
        server.serve()
    front_end.close(server)
    (rebuilt,) = front_end.heard("serving")
    are_right = rank > 0 or front_end.are_right
    return {"is_kept": rebuilt["is_kept"], "epoch": rebuilt["epoch"], "are_right": are_right}


@pytest.mark.parametrize(
    ("victim", "is_late"),
    [
        (1, True),
        pytest.param(0, False, marks=pytest.mark.thorough),
        pytest.param(1, False, marks=pytest.mark.thorough),
    ],
)
def test_ranks_that_end_in_different_steps_compute_their_tokens_again(
    tmp_path: Path, victim: int, is_late: bool
) -> None:
    """A rank fails before a step that the other one begins, or behind one whose end it has not noted."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    for found in run_ranks(is_disturbed, 2, str(model), victim, is_late):
        assert found == {"is_kept": False, "epoch": 1, "are_right": True}


NEWCOMER = 2
"""The rank of the harness that joins the two others."""


def dies_in_a_change(rank: int, world_size: int, directory: Path, model: str, victim: int) -> dict[str, Any]:
    do, told_by_newcomer = Driver._do, []

    def do_or_die(driver: Driver, wants: Operation) -> Any:
        if rank == victim and isinstance(wants, Build):
            os.kill(os.getpid(), signal.SIGKILL)
        return do(driver, wants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "_do", do_or_die)
        if rank < NEWCOMER:
            groups = elastic_groups(rank, ParallelLayout(data=NEWCOMER), directory)
            (directory / "serving").touch()
        else:
            wait_until((directory / "serving").exists, "the others", DEADLINE_S)
            launched = LaunchedWorker(rank, directory, os.getpid())
            groups = worker._become_member(launched, lambda **said: told_by_newcomer.append(said["told"]))
        front_end = FrontEnd(model, groups, 1)
        server = front_end.make_server(groups)

        def say(**message: Any) -> None:
            front_end.say(**message)
            if rank == 0 and (message["told"] == "given up" or message.get("how") == "grown"):
                front_end.ask()  # the newcomer is in, or it is gone
            if not front_end.unfinished:
                front_end.front.send({"do": "end"})

        patch.setattr(server, "_say", say)
        server.serve()
        front_end.close(server)
    told = [message.get("how", message["told"]) for message in front_end.told if message["told"] != "tokens"]
    return {"told": [*told_by_newcomer, *told], "are_right": front_end.are_right or rank > 0}


@pytest.mark.thorough
def test_a_worker_that_dies_while_it_joins_changes_nothing(tmp_path: Path) -> None:
    """The replicas give the change up, and serve on in their groups."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    found = run_ranks(dies_in_a_change, 3, str(model), NEWCOMER, expect_dead=[NEWCOMER])
    assert found[:2] == [{"told": ["given up"], "are_right": True}] * 2


@pytest.mark.thorough
def test_a_worker_that_dies_while_another_joins_is_lost_first(tmp_path: Path) -> None:
    """The change is given up, the groups are rebuilt, and then the newcomer is taken in, which has joined anew."""
    model = random_checkpoint(tmp_path / "model", CONFIG)
    first, _, newcomer = run_ranks(dies_in_a_change, 3, str(model), 1, expect_dead=[1])
    assert first == {"told": ["failure", "rebuilt", "grown"], "are_right": True}
    assert newcomer == {"told": ["given up"], "are_right": True}
