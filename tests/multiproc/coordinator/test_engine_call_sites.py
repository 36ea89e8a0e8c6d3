"""Call sites as engines write them: code for vLLM's class runs on ours after its import is changed.

There are two other changes: classes that are sent must be registered, and process groups must be the group's own.
"""

import contextlib
import dataclasses
import enum
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import embedding, linear

from coordinator import (
    ClosedError,
    GroupCoordinator,
    destroy_distributed_environment,
    ensure_model_parallel_initialized,
    get_dp_group,
    get_ep_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    model_parallel_is_initialized,
    parallel_state,
    register_type,
)
from tests.engines import engine, refusal
from tests.harness import RankPool


class Priority(enum.Enum):
    """An enumeration that is sent without registration."""

    HIGH = 1


class Sampling(msgspec.Struct):
    """A Struct that is a field of a dataclass."""

    temperature: float
    stop: list[str]


class Block(NamedTuple):
    """A named tuple that is a key of the cache."""

    layer: int
    slot: int


@dataclasses.dataclass
class SchedulerOutput:
    """What a scheduler sends to its workers every step."""

    step: int
    tokens: dict[str, int]
    sampling: Sampling
    blocks: list[Block]
    priority: Priority
    finished: set[str] = dataclasses.field(default_factory=set)
    mask: torch.Tensor | None = None


for _each in (Sampling, Block, SchedulerOutput):
    register_type(_each)


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return a random tensor that is the same on every rank. It holds small integers, whose sums are exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


# --- starting and stopping --------------------------------------------------------------------------------------


def positional(rank: int, world_size: int, directory: Path) -> None:
    where = f"file://{directory}/init"
    init_distributed_environment(world_size, rank, where, rank, "gloo", timedelta(seconds=30))
    assert get_world_group().settings.timeout_s == 30.0
    everyone = list(range(world_size))
    world = GroupCoordinator([everyone], rank, "gloo", False)
    tp = GroupCoordinator([[0, 1], [2, 3]], rank, dist.get_backend(world.device_group), True, True, "tp")
    pp = GroupCoordinator(
        group_ranks=[[0, 2], [1, 3]],
        local_rank=rank,
        torch_distributed_backend="gloo",
        use_device_communicator=True,
        use_message_queue_broadcaster=False,
        group_name="pp",
    )
    assert (tp.rank, tp.local_rank, tp.rank_in_group, tp.world_size) == (rank, rank, rank % 2, 2)
    assert tp.ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert (pp.first_rank, pp.last_rank) == (rank % 2, rank % 2 + 2)
    assert (pp.is_first_rank, pp.is_last_rank) == (rank < 2, rank >= 2)
    assert pp.next_rank == pp.prev_rank == (rank + 2) % 4
    assert (world.next_rank, world.prev_rank) == ((rank + 1) % 4, (rank - 1) % 4)
    assert tp.device == torch.device("cpu")
    assert tp.unique_name.startswith("tp:")
    assert tp.mq_broadcaster is not None
    assert pp.mq_broadcaster is None
    assert world.all_reduce(torch.ones(1)).item() == 4
    # Engines destroy the groups in any order, even after torch's own world.
    for group in (world, pp, tp):
        group.destroy()
        group.destroy()
        with pytest.raises(ClosedError):
            group.barrier()
    destroy_distributed_environment()


@pytest.mark.guarantee("G1")
def test_the_constructor_takes_what_engines_pass(ranks4: RankPool) -> None:
    """It takes positional and keyword arguments and a backend from torch, and has the attributes that engines read."""
    ranks4.run(positional)


def torch_goes_first(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=2):
        group = GroupCoordinator([[0, 1]], rank, "gloo", True)
        group.send_object("x", 1 - rank)
        assert group.recv_object(1 - rank) == "x"
        group.barrier()
        dist.destroy_process_group()
        group.destroy()
    assert not dist.is_initialized()


def test_groups_can_be_destroyed_after_torch_distributed(ranks2: RankPool) -> None:
    """An engine that shuts torch down first leaves nothing behind and gets no error."""
    ranks2.run(torch_goes_first)


def getters(rank: int, world_size: int, directory: Path) -> None:
    assert parallel_state.is_global_first_rank()
    for tp, pp in ((2, 2), (4, 1), (1, 4), (2, 1)):
        with engine(rank, world_size, directory, tp, pp):
            dp = world_size // tp // pp
            assert model_parallel_is_initialized()
            assert get_world_group().world_size == world_size
            assert parallel_state.is_global_first_rank() == (rank == 0)
            assert get_tensor_model_parallel_world_size() == tp
            assert get_tensor_model_parallel_rank() == rank % tp
            assert parallel_state.get_pipeline_model_parallel_world_size() == pp
            assert parallel_state.get_pipeline_model_parallel_rank() == rank // tp % pp
            assert parallel_state.get_data_parallel_world_size() == get_dp_group().world_size == dp
            assert parallel_state.get_data_parallel_rank() == rank // tp // pp
            assert parallel_state.get_expert_parallel_world_size() == get_ep_group().world_size == tp * dp
            assert parallel_state.get_expert_parallel_rank() == get_ep_group().rank_in_group
            assert parallel_state.get_tensor_model_parallel_group() is get_tp_group()
            assert parallel_state.get_pipeline_model_parallel_group() is get_pp_group()
            assert parallel_state.get_pcp_group().world_size == 1
            ensure_model_parallel_initialized(tp, pp)
            assert get_tp_group().all_reduce(torch.ones(2)).tolist() == [tp, tp]
        assert not model_parallel_is_initialized()


def test_an_engine_can_start_again_with_other_sizes(ranks4: RankPool) -> None:
    """The module's functions give the sizes and ranks of the present groups. One process creates groups four times."""
    ranks4.run(getters)


# --- layers -----------------------------------------------------------------------------------------------------


def layers(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=world_size):
        tp = get_tp_group()
        x, up, down = seeded(6, 8), seeded(16, 8, seed=1), seeded(8, 16, seed=2)
        hidden = linear(x, up.chunk(world_size, 0)[tp.rank_in_group])
        partial = linear(hidden, down.chunk(world_size, 1)[tp.rank_in_group])
        before = partial.clone()
        reduced = tp.all_reduce(partial)
        assert torch.equal(reduced, linear(linear(x, up), down))
        assert torch.equal(partial, before)

        table, ids = seeded(32, 8, seed=3), torch.tensor([0, 31, 5, 17, 8])
        per_rank = 32 // world_size
        start = tp.rank_in_group * per_rank
        mine = (ids >= start) & (ids < start + per_rank)
        local = embedding((ids - start).masked_fill(~mine, 0), table[start : start + per_rank])
        embedded = tp.all_reduce(local.masked_fill(~mine.unsqueeze(-1), 0))
        assert torch.equal(embedded, embedding(ids, table))

        logits = linear(embedded, table[start : start + per_rank])
        whole = linear(embedded, table)
        gathered = tp.gather(logits, dst=0, dim=-1)
        assert gathered is None if rank else torch.equal(gathered, whole)  # type: ignore[arg-type]
        assert torch.equal(tp.all_gather(logits), whole)
        assert torch.equal(tp.all_gather(logits.t(), dim=0), whole.t())
        # Sequence parallelism scatters after the row-parallel layer and gathers before the next one.
        shard = tp.reduce_scatter(torch.cat([partial, partial]), dim=0)
        assert torch.equal(tp.all_gather(shard, dim=0), torch.cat([reduced, reduced]))
        sizes = [1, 2, 0, 3]
        uneven = tp.reduce_scatterv(partial, dim=0, sizes=sizes)
        assert uneven.shape[0] == sizes[tp.rank_in_group]
        assert torch.equal(tp.all_gatherv(uneven, 0, sizes), reduced)
        (again, ids_again) = tp.all_gatherv([uneven, uneven[:, 0].long()], 0, sizes)
        assert torch.equal(again, reduced)
        assert torch.equal(ids_again, reduced[:, 0].long())
        output = torch.empty_like(uneven)
        assert tp.reduce_scatterv_into_output(partial, output, 0, sizes) is output
        assert torch.equal(output, uneven)


@pytest.mark.guarantee("G1")
def test_sharded_layers_give_what_whole_layers_give(ranks4: RankPool) -> None:
    """The layers are row-parallel linear, vocabulary-parallel embedding and logits, and sequence-parallel ones."""
    ranks4.run(layers)


def broadcasts(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=world_size):
        tp = get_tp_group()
        buffer = torch.full((3, 4), float(rank))
        assert tp.broadcast(buffer, src=1) is buffer
        assert bool((buffer == 1).all())
        size, dtype = torch.Size([5, 2]), torch.bfloat16
        if tp.is_first_rank:
            tp.send(torch.ones(size, dtype=dtype), dst=1)
            tp.send(torch.full((2,), 7))
        elif tp.rank_in_group == 1:
            first = tp.recv(size, dtype, src=0)
            assert (first.shape, first.dtype) == (size, dtype)
            assert tp.recv(torch.Size([2]), torch.int64).tolist() == [7, 7]
        tp.barrier()


def test_broadcast_fills_its_input_and_returns_it(ranks4: RankPool) -> None:
    """Engines expect this. By default `send` and `recv` use the neighbours."""
    ranks4.run(broadcasts)


def experts(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=2, pp=1):
        ep = get_ep_group()
        assert ep.world_size == world_size
        sizes = [3, 0, 5, 1]
        mine = sizes[ep.rank_in_group]
        hidden, logits = seeded(mine, 4, seed=rank), seeded(mine, 6, seed=10 + rank)
        scale = torch.full((mine, 1), rank, dtype=torch.int64)
        everyone = torch.cat([seeded(size, 4, seed=each) for each, size in enumerate(sizes)])
        for stated in (False, True):
            with ep.token_counts(sizes) if stated else contextlib.nullcontext():
                result = ep.dispatch(hidden, logits, is_sequence_parallel=True)
                assert len(result) == 2
                assert torch.equal(result[0], everyone)
                # Each rank's experts did a part of the work for every token.
                assert torch.equal(ep.combine(result[0] * (rank + 1), True), hidden * 10)
                x, router, extra = ep.dispatch(hidden, logits, True, extra_tensors=[scale])  # type: ignore[misc]
                assert torch.equal(x, everyone)
                assert router.shape == (9, 6)
                assert extra[0].flatten().tolist() == [0] * 3 + [2] * 5 + [3]
        with ep.token_counts([7, 7, 7, 7]):
            assert "holds" in refusal(lambda: ep.dispatch(hidden, logits, True))
        # Tokens that are not sharded are the same on both ranks of a tensor-parallel group.
        replica = seeded(2, 4, seed=get_dp_group().rank_in_group)
        both = torch.cat([seeded(2, 4, seed=each) for each in range(2)])
        gathered, _ = ep.dispatch(replica, torch.ones(2, 6))  # type: ignore[misc]
        assert torch.equal(gathered, both)
        assert torch.equal(ep.combine(gathered), replica * 2)
        ep.barrier()


def test_tokens_are_dispatched_and_combined(ranks4: RankPool) -> None:
    """Ranks hold different numbers of tokens, which are stated or exchanged. Extra tensors are optional.

    Tokens that are not sharded go to the replicas.
    """
    ranks4.run(experts)


# --- step inputs ------------------------------------------------------------------------------------------------


def step_output(step: int) -> SchedulerOutput:
    return SchedulerOutput(
        step=step,
        tokens={"request-a": 17, "request-b": 1},
        sampling=Sampling(0.7, ["\n"]),
        blocks=[Block(0, 1), Block(1, step)],
        priority=Priority.HIGH,
        finished={"request-z"},
    )


def step_inputs(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=world_size):
        tp = get_tp_group()
        sent = step_output(3)
        assert tp.broadcast_object(sent if tp.is_first_rank else None, src=0) == sent
        assert tp.broadcast_object(sent) == sent
        objects = [sent, "text", 5] if rank == 1 else [None] * 3
        assert tp.broadcast_object_list(objects, src=1) is objects
        assert objects == [sent, "text", 5]
        data = {"ids": torch.arange(70_000), "step": sent, "n": 3, "none": None}
        for kwargs in (
            {},
            {"src": 0},
            {"src": 0, "group": tp.device_group, "metadata_group": tp.cpu_group},
        ):
            got = tp.broadcast_tensor_dict(data if rank == 0 else None, **kwargs)
            assert got is not None
            assert torch.equal(got["ids"], data["ids"])  # type: ignore[arg-type]
            assert got["step"] == sent
            assert list(got) == list(data)
        world = dist.group.WORLD
        for call in (
            lambda: tp.broadcast_tensor_dict(data, 0, group=world),
            lambda: tp.broadcast_tensor_dict(data, 0, metadata_group=world),
            lambda: tp.broadcast_tensor_dict(data, 0, None, tp.device_group),
            lambda: tp.broadcast_object_list([1], 0, group=world),
        ):
            assert "own process groups" in refusal(call)
        assert tp.broadcast_object_list([rank], 0, tp.cpu_group) == [0]


@pytest.mark.guarantee("G16")
def test_step_inputs_reach_every_worker(ranks2: RankPool) -> None:
    """They are objects, lists and tensor dicts with metadata. A process group of another group is refused."""
    ranks2.run(step_inputs)


def queues(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=2, pp=2):
        tp, everyone = get_tp_group(), get_world_group()
        assert tp.mq_broadcaster is not None
        for step in range(5):
            if tp.is_first_rank:
                tp.mq_broadcaster.enqueue(step_output(step))  # type: ignore[union-attr]
            else:
                assert tp.mq_broadcaster.dequeue() == step_output(step)  # type: ignore[union-attr]
        inputs: Any = everyone.create_mq_broadcaster(writer_rank=1, blocking=False)
        answer, answers = everyone.create_single_reader_mq_broadcasters(reader_rank_in_group=0)
        if rank == 1:
            inputs.enqueue(("run", [1, 2]))
        else:
            assert inputs.dequeue() == ("run", [1, 2])
        # The reader is a worker too, and its own answer goes through the queue as well.
        answer.enqueue(rank)
        if rank == 0:
            assert [queue.dequeue() for queue in answers] == [0, 1, 2, 3]
        else:
            assert answers == []
        wrong: Any = object()
        assert "external_writer_handle must be an ExternalWriter" in refusal(
            lambda: everyone.create_mq_broadcaster(external_writer_handle=wrong)
        )
        everyone.barrier()


def test_queues_carry_steps_and_answers(ranks4: RankPool) -> None:
    """One writer has many readers, and one reader has many writers and gets the pair that engines unpack."""
    ranks4.run(queues)


# --- stages -----------------------------------------------------------------------------------------------------


def stages(rank: int, world_size: int, directory: Path) -> None:
    """Run a pipeline of two stages with two ranks each. The residual is sharded over a stage's ranks."""
    with engine(rank, world_size, directory, tp=2, pp=2):
        pp, tp = get_pp_group(), get_tp_group()
        overrides = {"residual": False}
        for step in range(3):
            hidden = seeded(24, 512, seed=step)
            residual = seeded(12, 512, seed=100 + step + tp.rank_in_group)
            if pp.is_first_rank:
                tensors = {"hidden_states": hidden, "residual": residual}
                assert (
                    pp.send_tensor_dict(
                        tensors, all_gather_group=get_tp_group(), all_gather_tensors=overrides
                    )
                    is None
                )
            else:
                received = pp.recv_tensor_dict(all_gather_group=get_tp_group(), all_gather_tensors=overrides)
                assert received is not None
                assert torch.equal(received["hidden_states"], hidden)
                assert torch.equal(received["residual"], residual)
            logits = {"logits": hidden[:3] + 1} if pp.is_last_rank else {}
            result = pp.broadcast_tensor_dict(logits, src=len(pp.ranks) - 1)
            assert result is not None
            assert torch.equal(result["logits"], hidden[:3] + 1)


def test_stages_hand_on_their_tensors(ranks4: RankPool) -> None:
    """Hidden states travel in slices and a sharded residual whole. The last stage sends its logits to all."""
    ranks4.run(stages)


def overlapped(rank: int, world_size: int, directory: Path) -> None:
    """Receive the next step while this one is computed. Wait for a step's sends before those of the next one."""
    with engine(rank, world_size, directory, tp=1, pp=world_size):
        pp = get_pp_group()
        sending: list[Any] = []
        buffer = torch.empty(9, 1024)
        for step in range(4):
            for handle in sending:
                handle.wait()
            if pp.is_first_rank:
                buffer.copy_(seeded(9, 1024, seed=step))
            else:
                tensors, handles, callbacks = pp.irecv_tensor_dict(all_gather_group=get_tp_group())
                assert tensors is not None
                for handle in handles:
                    handle.wait()
                for callback in callbacks:
                    callback()
                assert tensors["step"] == step
                buffer.copy_(tensors["hidden_states"])
            if pp.is_last_rank:
                assert torch.equal(buffer, seeded(9, 1024, seed=step) + (world_size - 1))
                continue
            buffer += 1
            handles = pp.isend_tensor_dict(
                {"hidden_states": buffer, "step": step}, all_gather_group=get_tp_group()
            )
            # The first handle is that of the metadata. It is waited for later.
            sending = handles[1:]
            note = pp.isend_object({"step": step}, dst=(pp.rank_in_group + 1) % pp.world_size)
            note.wait()
            assert note.is_completed()
        if not pp.is_first_rank:
            notes = [pp.recv_object(src=pp.rank_in_group - 1) for _ in range(4)]
            assert notes == [{"step": step} for step in range(4)]


@pytest.mark.guarantee("G1")
def test_stages_overlap_sending_and_computing(ranks4: RankPool) -> None:
    """The engine's loop uses handles, callbacks, and one buffer that every step reuses."""
    ranks4.run(overlapped)
