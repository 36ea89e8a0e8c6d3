"""One worker: joins the others, loads its part of the model, serves, and goes on when the members change."""

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any

import torch

from coordinator import (
    DisagreementError,
    ExcludedError,
    ParallelGroups,
    ParallelLayout,
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
    join_distributed_environment,
)
from coordinator.testing import fake_groups
from examples.tiny_llm.checkpoint import Checkpoint
from examples.tiny_llm.config import ModelConfig
from examples.tiny_llm.group import ModelGroups
from examples.tiny_llm.model import LlamaStage, load_weights
from examples.tiny_llm.sampling import Sampler
from examples.tiny_llm.wiring import CPU_BACKEND
from examples.tiny_llm.worker import StageWorker

from .model import make_model
from .options import REPLICAS, ElasticOptions, LaunchedWorker
from .serving import ReplicaServer, groups_of_replica
from .wire import Wire

__all__ = ["run_worker"]

JOIN_TIMEOUT_S = 60.0
TRAINING_TOLD_S = 2.0


def run_worker(options: ElasticOptions, launched: LaunchedWorker) -> int:
    """Be one worker, until the front end ends it or the others go on without it.

    Args:
        options: The user's options.
        launched: Which worker.

    Returns:
        The exit status.
    """
    torch.set_num_threads(1)
    wire = Wire(socket(fileno=launched.socket))

    def say(**message: Any) -> None:
        wire.send({**message, "at_s": time.monotonic()})

    try:
        begin = _begin if launched.replaces is None else _join
        server = begin(options, launched, wire, say)
        try:
            server.serve()
        except ExcludedError as error:
            say(told="excluded", error=str(error))
        server.groups.destroy()
    except Exception as error:  # noqa: BLE001 - the front end shows any error
        say(told="error", error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        return 1
    finally:
        destroy_distributed_environment()
    return 0


def _begin(
    options: ElasticOptions, launched: LaunchedWorker, wire: Wire, say: Callable[..., None]
) -> ReplicaServer:
    """Begin together with the other first workers; the first one makes the model."""
    init_distributed_environment(
        world_size=options.world_size,
        rank=launched.rank,
        distributed_init_method=_rendezvous(launched),
        backend=CPU_BACKEND,
        elastic=True,  # the rendezvous is outside of the ranks, so that each of them may end
    )
    groups = ParallelGroups.create(
        ParallelLayout(tensor=options.tensor, data=REPLICAS),
        backend=CPU_BACKEND,
        world=get_world_group(),
        extra_groups=["replica"],
    )
    if groups.world.is_first_rank:
        alone = groups.pp  # without pipeline stages it has one member
        directory = launched.directory / "checkpoint"
        made = make_model(options, directory, ModelGroups(alone, alone, alone), _loss_teller(say))
        say(told="model", **made)
    stage_worker = _load(options, wire, groups_of_replica(groups))
    say(told="ready")
    return ReplicaServer(groups, stage_worker, wire, say, options)


def _join(
    options: ElasticOptions, launched: LaunchedWorker, wire: Wire, say: Callable[..., None]
) -> ReplicaServer:
    """Load the weights first, and then join replicas that serve: they count on this worker once it is a member."""
    # The place says which part of the model it will hold.
    assert launched.replaces is not None
    place = fake_groups(ParallelLayout(tensor=options.tensor), launched.replaces % options.tensor)
    stage_worker = _load(options, wire, ModelGroups(place.tp, place.tp, place.pp))
    say(told="joining")
    groups = _become_member(launched, say)
    stage_worker.use(groups_of_replica(groups))
    server = ReplicaServer(groups, stage_worker, wire, say, options)
    server.say_place("joined")
    return server


def _become_member(launched: LaunchedWorker, say: Callable[..., None]) -> ParallelGroups:
    """Join, as often as it takes: a change is given up if a member ends meanwhile."""
    while True:
        try:
            return join_distributed_environment(
                _rendezvous(launched), replaces=launched.replaces, timeout_s=JOIN_TIMEOUT_S
            )
        except DisagreementError as error:
            say(told="given up", error=str(error))


def _loss_teller(say: Callable[..., None]) -> Callable[[float], None]:
    """Return what tells the loss of the training to the front end, now and then."""
    told_s = time.monotonic()

    def tell(loss: float) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= TRAINING_TOLD_S:
            told_s = time.monotonic()
            say(told="training", loss=loss)

    return tell


def _rendezvous(launched: LaunchedWorker) -> str:
    return f"file://{launched.directory / 'rendezvous'}"


def _load(options: ElasticOptions, wire: Wire, groups: ModelGroups) -> StageWorker:
    """Load this worker's part of the model, once the front end says from where."""
    (told,) = wire.receive(None)
    directory = Path(told["directory"])
    stage = LlamaStage(ModelConfig.from_directory(directory), groups, told["max_length"])
    with Checkpoint(directory) as checkpoint:
        load_weights(stage, checkpoint)
    return StageWorker(stage, options.slots, Sampler())
