"""Nothing is pickled at run time: a whole run works in processes in which every pickler raises."""

import _pickle
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import msgspec
import pytest
import torch
import torch.distributed as dist

from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from coordinator.settings import CoordinatorSettings
from shm_broadcast.codec import register_type
from shm_broadcast.settings import BroadcastSettings
from tests.harness import run_ranks
from tests.worlds import new_group, small, world


class UsedError(Exception):
    """A pickler was used."""


def refuse(*_: Any, **__: Any) -> Never:
    raise UsedError("a pickler was used")


class Refused:
    """Replaces `Pickler` and `Unpickler`; raises when used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse()


def replace_all_picklers() -> None:
    """Replace the picklers of Python and torch in this process for good."""
    for module in (pickle, _pickle):
        for name in ("load", "loads", "dump", "dumps", "_load", "_loads", "_dump", "_dumps"):
            if hasattr(module, name):
                setattr(module, name, refuse)
        for name in ("Pickler", "Unpickler", "_Pickler", "_Unpickler"):
            if hasattr(module, name):
                setattr(module, name, Refused)
    for name in ("_pickler", "_unpickler"):
        # torch holds its own references to them.
        assert hasattr(dist.distributed_c10d, name)
        setattr(dist.distributed_c10d, name, Refused)
    torch.save = torch.load = refuse


def picklers_bite() -> list[str]:
    """Return the ways to pickle that still work; there must be none."""
    ways: dict[str, Callable[[], Any]] = {
        "dumps": lambda: pickle.dumps(1),
        "loads": lambda: pickle.loads(b"N."),
        "torch objects": lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
        "torch.save": lambda: torch.save(1, "/dev/null"),
    }
    working = []
    for name, way in ways.items():
        try:
            way()
        except UsedError:
            continue
        working.append(name)
    return working


@register_type(name="tests.security.Step")
class Step(msgspec.Struct, frozen=True):
    number: int
    tokens: list[int]


STEP = {"step": Step(1, [1, 2]), "nested": {"t": (1, {2}, None)}, "b": b"x" * 200_000}


def same_tensors(received: Any, sent: Any) -> bool:
    return (
        all(torch.equal(received[key], sent[key]) for key in ("large", "small"))
        and received["n"] == sent["n"]
    )


def use_everything(rank: int, world_size: int, directory: Path) -> list[str]:
    replace_all_picklers()
    with world(rank, world_size, directory) as first:
        groups = ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2), world=first)
        tp = groups.tp
        peer = 1 - tp.rank_in_group
        assert tp.broadcast_object(STEP, 0) == STEP
        assert tp.broadcast_object_list([STEP, 2], 1) == [STEP, 2]
        assert tp.all_gather_object((rank, STEP)) == [(other, STEP) for other in tp.ranks]
        assert tp.gather_object(rank, 0) in (tp.ranks, None)
        tp.isend_object(STEP, peer)
        assert tp.recv_object(peer) == STEP
        tensors = {"large": torch.arange(40_000.0), "small": small(), "n": {"a": 1}}
        received = tp.broadcast_tensor_dict(tensors, 0)
        assert same_tensors(received, tensors)
        tp.isend_tensor_dict(tensors, peer)
        assert same_tensors(tp.recv_tensor_dict(peer), tensors)
        if groups.pp.is_first_rank:
            groups.pp.send_tensor_dict(tensors, all_gather_group=tp)
        else:
            assert same_tensors(groups.pp.recv_tensor_dict(all_gather_group=tp), tensors)
        queue: Any = tp.mq_broadcaster
        if tp.rank_in_group == 0:
            queue.enqueue(STEP)
        else:
            assert queue.dequeue() == STEP
        answer, answers = tp.create_single_reader_mq_broadcasters(0)
        answer.enqueue(STEP)
        assert [each.dequeue() for each in answers] == ([STEP, STEP] if tp.rank_in_group == 0 else [])
        tp.all_reduce(small())
        tp.all_gather(small())
        tp.broadcast(small())
        tp.make_sibling_device_group()
        with new_group(first) as other:
            other.barrier()
        # Last, because torch's own collectives fail half-way.
        first.barrier()
        working = picklers_bite()
        groups.destroy()
        return working


@pytest.mark.guarantee("G2")
def test_every_operation_works_where_every_pickler_raises() -> None:
    """Rendezvous, groups, objects, tensor dicts and queues neither pickle nor unpickle."""
    assert run_ranks(use_everything, 4, check_leaks=False) == [[]] * 4


def fields(settings: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(settings)]


def test_no_setting_turns_pickle_on() -> None:
    """No setting enables pickle, and unknown settings are refused."""
    names = fields(CoordinatorSettings) + fields(BroadcastSettings)
    for word in ("pickle", "unsafe", "insecure", "trust", "allow", "cloud", "serial"):
        assert [name for name in names if word in name] == []
    for name in ("ALLOW_PICKLE", "USE_PICKLE", "BROADCAST__PICKLE", "ALLOW_INSECURE_SERIALIZATION"):
        with pytest.raises(ValueError, match="unknown"):
            CoordinatorSettings.from_env({f"GROUP_COORDINATOR_{name}": "1"})
