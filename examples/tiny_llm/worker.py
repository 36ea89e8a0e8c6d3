"""The work of every rank in a step: follow the plan, run its stage, pass the result on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .attention import Batch, Span
from .config import ModelConfig
from .group import ModelGroups
from .model import LlamaStage
from .sampling import Sampler
from .scheduler import Scheduler, StepPlan

__all__ = ["StageWorker", "run_step", "serve"]


@dataclass
class _Sequence:
    """A rank's state of a running request."""

    slot: int
    tokens: list[int]
    computed: int = 0


class StageWorker:
    """One rank's stage with its KV cache and the running requests.

    Attributes:
        groups: The groups of this rank.
    """

    def __init__(self, stage: LlamaStage, slots: int, sampler: Sampler) -> None:
        """Reserve the KV cache.

        Args:
            stage: This rank's share of the model, with its weights.
            slots: Maximal number of requests at the same time.
            sampler: Chooses tokens; used on one rank only.
        """
        self._stage = stage
        self.groups = stage.groups
        self._caches = stage.make_caches(slots)
        self._sampler = sampler
        self._sequences: dict[int, _Sequence] = {}

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._stage.config

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return self._stage.max_length

    def use(self, groups: ModelGroups) -> None:
        """Go on with other groups, in which this rank has the same place; weights, caches and requests stay.

        Args:
            groups: The new groups.
        """
        stage = LlamaStage(self._stage.config, groups, self._stage.max_length)
        # The tensors are handed over; nothing is copied.
        stage.load_state_dict(self._stage.state_dict(), assign=True)
        self._stage, self.groups = stage, groups

    def forget(self) -> None:
        """Drop all requests; their tokens must be computed again."""
        self._sequences.clear()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> dict[int, int]:
        """Run one step.

        Args:
            plan: The plan, equal on all ranks.

        Returns:
            The new tokens by request, on the rank that samples; empty on the others.
        """
        self._follow(plan)
        spans, tokens, rows = [], [], {}
        for number, count in plan.run.items():
            sequence = self._sequences[number]
            stop = sequence.computed + count
            spans.append(Span(sequence.slot, sequence.computed, count))
            tokens += sequence.tokens[sequence.computed : stop]
            sequence.computed = stop
            if stop == len(sequence.tokens):
                rows[number] = len(tokens) - 1
        outputs = self._run_stage(Batch(spans), torch.tensor(tokens))
        if outputs is None or not rows:
            return {}
        logits = self._stage.logits(outputs, list(rows.values()))
        if logits is None:
            return {}
        return {
            number: self._sampler.choose(logits[row], number, len(self._sequences[number].tokens))
            for row, number in enumerate(rows)
        }

    def _follow(self, plan: StepPlan) -> None:
        """Apply the plan to the running requests."""
        for number in plan.finished:
            del self._sequences[number]
        for number, token in plan.appended.items():
            self._sequences[number].tokens.append(token)
        for new in plan.admitted:
            self._sequences[new.number] = _Sequence(new.slot, list(new.prompt))

    def _run_stage(self, batch: Batch, tokens: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Receive from the previous stage, compute, and send to the next stage.

        Returns:
            The stage's outputs on the last stage, None on the others.
        """
        pipeline, tensor = self.groups.pipeline, self.groups.tensor
        received = None
        if not pipeline.is_first_rank:
            # All ranks of a stage hold equal tensors: each sends a part, and the next stage gathers the parts.
            received = pipeline.recv_tensor_dict(all_gather_group=tensor)
        outputs = self._stage(batch, self._caches, tokens, received)
        if pipeline.is_last_rank:
            return dict(outputs)
        pipeline.send_tensor_dict(outputs, all_gather_group=tensor)
        return None


def serve(
    worker: StageWorker, scheduler: Scheduler | None, on_step: Callable[[Scheduler], None] | None = None
) -> None:
    """Run steps until the scheduler has no more requests. Every rank of the world calls this.

    Args:
        worker: This rank's worker.
        scheduler: The scheduler on rank 0; None on the others.
        on_step: Called on rank 0 after each step.
    """
    while run_step(worker, scheduler) is not None:
        if scheduler is not None and on_step is not None:
            on_step(scheduler)


def run_step(worker: StageWorker, scheduler: Scheduler | None) -> dict[int, int] | None:
    """Run one step. Every rank of the world calls this.

    Args:
        worker: This rank's worker.
        scheduler: See `serve`.

    Returns:
        The new tokens by request on rank 0, and on the rank that sampled them; None if there was nothing to do.
    """
    message = None if scheduler is None else scheduler.next_plan().to_message()
    plan = StepPlan.from_message(worker.groups.world.broadcast_object(message, src=0))
    if plan.stop:
        return None
    tokens = _bring_to_scheduler(worker.groups, worker.execute(plan))
    if scheduler is not None:
        scheduler.take_tokens(tokens)
    return tokens


def _bring_to_scheduler(groups: ModelGroups, tokens: dict[int, int]) -> dict[int, int]:
    """Send the tokens from the rank that sampled them to rank 0.

    Returns:
        The tokens on rank 0; the argument on the other ranks.
    """
    world = groups.world
    if world.is_first_rank == groups.samples:
        return tokens  # rank 0 samples itself, or this rank is neither of the two
    if groups.samples:
        world.send_object([[number, token] for number, token in tokens.items()], dst=0)
        return tokens
    # The last member of rank 0's pipeline group samples.
    pairs = world.recv_object(src=world.ranks.index(groups.pipeline.ranks[-1]))
    return dict(pairs)
