"""Tensor dicts between ranks: their contents arrive by every route, sliced or whole."""

import dataclasses
import gc
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coordinator import (
    DecodeError,
    DisagreementError,
    GroupBrokenError,
    GroupCoordinator,
    register_type,
)
from coordinator.host.tensor_dict_format import INLINE_BYTES
from shm_broadcast import codec
from tests.engines import refusal
from tests.harness import RankPool
from tests.unit.shm_broadcast.codec_samples import Key, same
from tests.worlds import ApartPool, world

WAYS = ["shared memory", "Gloo"]


@pytest.fixture(params=WAYS)
def place(request: pytest.FixtureRequest) -> str:
    """Run each test on one host, and once more on ranks that seem to be on several."""
    # The fixtures below have no parameters of their own: pytest passes those of a fixture on to the fixture that it
    # overrides, and would end the processes of the session and start new ones at every change.
    return str(request.param)


@pytest.fixture(name="ranks2")
def two_ranks_both_ways(place: str, ranks2: RankPool) -> RankPool | ApartPool:
    """Return two ranks that are on one host or seem to be on several."""
    return ranks2 if place == WAYS[0] else ApartPool(ranks2)


@pytest.fixture(name="ranks4")
def four_ranks_both_ways(place: str, ranks4: RankPool) -> RankPool | ApartPool:
    """Return four ranks that are on one host or seem to be on several."""
    return ranks4 if place == WAYS[0] else ApartPool(ranks4)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@dataclasses.dataclass
class Unknown:
    """A class that only the sender registers."""

    x: int = 0


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of this shape whose bytes depend on their position."""
    elements = torch.Size(shape).numel()
    raw = (torch.arange(elements * dtype.itemsize) * 37 + dtype.itemsize) % (
        2 if dtype == torch.bool else 120
    )
    return raw.to(torch.uint8).view(dtype).view(shape)


def small_and_large() -> dict[str, Any]:
    """Return a dict with tensors of every kind, both small enough to travel inside the metadata and too large."""
    tensors: dict[str, Any] = {}
    for dtype in DTYPES:
        tensors[f"small {dtype}"] = filled((3, 4), dtype)
        tensors[f"large {dtype}"] = filled((4, INLINE_BYTES), dtype)
    edge = INLINE_BYTES // 4
    for elements in (edge - 1, edge, edge + 1):
        tensors[f"{elements} elements"] = torch.arange(elements, dtype=torch.float32)
    wide = torch.arange(80_000, dtype=torch.float32).view(200, 400)
    return tensors | {
        "empty": torch.empty(0),
        "empty of a shape": torch.empty(0, 5, 3, dtype=torch.int64),
        "0-dim": torch.tensor(3.5),
        "0-dim integer": torch.tensor(7),
        "transposed": wide.t(),
        "strided": wide[::3, ::2],
        "a view": wide[5:190],
        "expanded": torch.arange(300.0).expand(200, 300),
        "small transposed": wide[:3, :4].t(),
        "conjugated": filled((4, 8000), torch.complex64).conj(),
        "small conjugated": filled((2, 2), torch.complex64).conj(),
        "with gradient": torch.ones(20_000, requires_grad=True),
        "small with gradient": torch.ones(3, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.full((20_000,), 2.0)),
        "small parameter": torch.nn.Parameter(torch.full((2,), 2.0)),
    }


def everything() -> dict[Any, Any]:
    """Return a dict of everything that a tensor dict may contain."""
    large = torch.arange(9000.0)
    return {
        **small_and_large(),
        "nested": {"x": large, "deeper": {"y": large + 1, "text": "z", "none": None}, "empty": {}},
        "in a list": [torch.arange(3), {"x": large}, (large.int(), "text")],
        "ordered": OrderedDict(b=large, a=1),
        "counter": Counter("hello"),
        "defaults": defaultdict(list, {"x": [torch.ones(2)]}),
        "values": [1, None, True, 2.5, "text", b"bytes", {1, 2}, (1, "x"), Key("a", 1), torch.float32],
        "size": torch.Size([1, 2]),
        5: "an integer key",
        ("a", "tuple"): torch.ones(2),
        "a.b": large * 2,
    }


def plain(value: Any) -> Any:
    """Return the part of a tensor that is sent, without its gradient and its subclass."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    return value


def differences(sent: dict[Any, Any], received: Any) -> list[str]:
    """Return the keys whose values did not arrive as they were sent."""
    assert type(received) is dict
    assert list(received) == list(sent)
    assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in received.values())
    return [str(key) for key, value in sent.items() if not same(plain(value), received[key])]


def received_by(group: GroupCoordinator, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Receive a tensor dict; fail if there is none."""
    received = group.recv_tensor_dict(*args, **kwargs)
    assert received is not None
    return received


def every_content(rank: int, world_size: int, directory: Path) -> list[str]:
    sent = everything()
    wrong = []
    with world(rank, world_size, directory) as group:
        for src in range(world_size):
            got = group.broadcast_tensor_dict(sent if rank == src else None, src=src)
            if rank == src:
                assert got is sent
            else:
                wrong += differences(sent, got)
        if rank == 0:
            assert group.send_tensor_dict(sent) is None
            wrong += differences(sent, group.recv_tensor_dict())
        else:
            wrong += differences(sent, group.recv_tensor_dict(src=0))
            assert group.send_tensor_dict(sent, dst=0) is None
    return wrong


@pytest.mark.guarantee("G5")
def test_everything_in_a_tensor_dict_arrives_unchanged(ranks2: RankPool) -> None:
    """This holds for every dtype, shape and layout, nested and other dicts, and other values. Nothing is aliased."""
    assert ranks2.run(every_content) == [[], []]


def every_source(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for src in range(world_size):
            sent = {"large": torch.full((70_000,), float(src)), "small": torch.tensor([src]), "src": src}
            got = group.broadcast_tensor_dict(sent if rank == src else None, src=src)
            assert got is not None
            assert differences(sent, got) == []
            got["large"].fill_(rank + 10)
            assert group.broadcast_tensor_dict({} if rank == src else None, src=src) == {}


def test_every_rank_may_broadcast_a_tensor_dict(ranks4: RankPool) -> None:
    """The receivers own the tensors, and an empty dict arrives as an empty dict."""
    ranks4.run(every_source)


def much_metadata(rank: int, world_size: int, directory: Path) -> None:
    sent = {f"key {number}": (number, "x" * 100) for number in range(3000)}
    sent |= {f"tensor {number}": torch.full((100,), float(number)) for number in range(1000)}  # type: ignore[misc]
    sent |= {f"large {number}": torch.full((9000,), float(number)) for number in range(20)}  # type: ignore[misc]
    with world(rank, world_size, directory) as group:
        got = group.broadcast_tensor_dict(sent if rank == 0 else None)
        assert got is not None
        assert differences(sent, got) == []
        if rank == 0:
            group.send_tensor_dict(sent)
        else:
            assert differences(sent, group.recv_tensor_dict()) == []


def test_metadata_may_be_larger_than_the_first_message(ranks2: RankPool) -> None:
    """A dict with hundreds of KiB of metadata, and with tensors inside and outside of it, arrives whole."""
    ranks2.run(much_metadata)


def sliced(rank: int, world_size: int, directory: Path) -> list[str]:
    """Let ranks 0 and 1, which are one stage, send to ranks 2 and 3, which are the next one."""
    wrong = []
    with (
        world(rank, world_size, directory),
        GroupCoordinator([[0, 1], [2, 3]], rank, "gloo", True, group_name="tp") as tp,
        GroupCoordinator([[0, 2], [1, 3]], rank, "gloo", True, group_name="pp") as pp,
    ):
        # The residual differs between the ranks of a stage and must not be sliced.
        residual = torch.full((5000,), float(tp.rank_in_group))
        sent = {**everything(), "hidden": torch.randn(64, 512, generator=torch.Generator().manual_seed(1))}
        sent |= {"odd": torch.arange(9001.0), "residual": residual, "one": torch.ones(1)}
        sent["inner"] = {"residual": residual + 7, "shared": torch.arange(10_000)}
        overrides = {"residual": False, "inner.residual": False, "odd": True}
        for asynchronous in (False, True):
            if pp.is_first_rank:
                handles = pp.isend_tensor_dict(sent, all_gather_group=tp, all_gather_tensors=overrides)
                for handle in handles if not asynchronous else [*handles, *handles]:
                    handle.wait()
                continue
            if asynchronous:
                received, handles, callbacks = pp.irecv_tensor_dict(0, tp, overrides)
                for handle in [*handles, *handles]:
                    handle.wait()
                    assert handle.is_completed()
                for callback in callbacks:
                    callback()
                assert len(callbacks) > 30
            else:
                received = pp.recv_tensor_dict(all_gather_group=tp, all_gather_tensors=overrides)
            wrong += differences(sent, received)
    return wrong


@pytest.mark.guarantee("G5")
def test_tensors_that_a_stage_shares_travel_in_slices(ranks4: RankPool) -> None:
    """Each rank sends its slice, and the receivers gather the whole. Tensors that differ between ranks travel whole."""
    assert ranks4.run(sliced) == [[], [], [], []]


def bad_arguments(rank: int, world_size: int, directory: Path) -> list[str]:
    x = {"x": torch.arange(8.0), "n": {"y": torch.ones(2)}, "z": 1}
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with world(rank, world_size, directory) as group:
        texts: list[str] = []
        if rank == 0:
            calls: list[Callable[[], Any]] = [
                lambda: group.send_tensor_dict(x, 1, group, {"y": True}),
                lambda: group.send_tensor_dict(x, 1, group, {"z": True}),
                lambda: group.send_tensor_dict([1], 1),  # type: ignore[arg-type]
                lambda: group.send_tensor_dict(x, 0),
                lambda: group.send_tensor_dict(x, 2),
                lambda: group.send_tensor_dict(x, 1, object()),  # type: ignore[arg-type]
                lambda: group.send_tensor_dict(loop, 1),
                lambda: group.send_tensor_dict({"x": torch.eye(3).to_sparse()}, 1),
                lambda: group.broadcast_tensor_dict(None),
                lambda: group.broadcast_tensor_dict(x, src=2),
                lambda: group.isend_tensor_dict(x, 1, timeout_s=-1.0),
            ]
            texts = [refusal(call) for call in calls]
            group.send_tensor_dict(x, 1, None, {"y": False})
            group.send_tensor_dict(x, 1)
        else:
            refusal(lambda: group.recv_tensor_dict(1))
            for _ in range(2):
                assert differences(x, group.recv_tensor_dict()) == []
        group.barrier()
    return texts


def test_mistakes_are_found_before_anything_is_sent(ranks2: RankPool) -> None:
    """A key without a tensor, a wrong rank or a dict that contains itself raises a UsageError. The group goes on."""
    texts, _ = ranks2.run(bad_arguments)
    assert "all_gather_tensors names ['y'], the dict's tensors are ['n.y', 'x']" in texts[0]
    assert "contains itself" in texts[6]


@pytest.mark.parametrize("what", ["group", "overrides"])
def test_different_slicing_of_sender_and_receiver_is_a_disagreement(ranks2: RankPool, what: str) -> None:
    """The receiver's error names the tensor. Both groups are broken, because the tensors have been sent."""
    receiver, sender = ranks2.run(mismatch, what)
    assert receiver[0] == "DisagreementError"
    assert "tensor 'inner.x' was sent in 2 slice(s), this rank expects 1" in receiver[1]
    assert receiver[2] == "GroupBrokenError"
    assert "inner.x" in receiver[3]
    assert sender[2] == "GroupBrokenError"
    assert "inner.x" in sender[3]


def mismatch(rank: int, world_size: int, directory: Path, what: str) -> list[str]:
    sent = {"whole": torch.ones(3), "inner": {"x": torch.zeros(50_000)}}
    with world(rank, world_size, directory, timeout_s=10.0) as group:
        outcome = ["", ""]
        if rank == 1:
            group.isend_tensor_dict(sent, all_gather_group=group)
        else:
            arguments = (group, {"inner.x": False}) if what == "overrides" else (None, None)
            with pytest.raises(DisagreementError) as raised:
                group.recv_tensor_dict(1, *arguments)
            outcome = [type(raised.value).__name__, str(raised.value)]
        with pytest.raises(GroupBrokenError) as broken:
            group.barrier()
        return [*outcome, type(broken.value).__name__, str(broken.value)]


def dropped(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            for number in range(20):
                sent = {"x": torch.full((60_000,), float(number)), "pad": "p" * 70_000}
                group.isend_tensor_dict(sent, 1)
                del sent
                gc.collect()
            junk = [torch.full((60_000,), -1.0) for _ in range(40)]
            group.barrier()
            del junk
        else:
            group.barrier()
            for number in range(20):
                got = received_by(group)
                assert bool((got["x"] == number).all())
                assert len(got["pad"]) == 70_000
        group.barrier()


def test_the_handles_of_a_send_may_be_dropped(ranks2: RankPool) -> None:
    """The sender keeps the memory until the receiver has the data, although no one holds the handles or tensors."""
    ranks2.run(dropped)


def reused(rank: int, world_size: int, directory: Path) -> None:
    """Overwrite a persistent buffer after waiting for each step's handles."""
    buffer = torch.empty(40_000)
    small = torch.empty(8)
    with world(rank, world_size, directory) as group:
        for step in range(30):
            if rank == 0:
                buffer.fill_(step)
                small.fill_(step)
                handles = group.isend_tensor_dict({"x": buffer, "small": small})
                # Tensors inside the metadata were copied. The others are waited for.
                small.fill_(-1)
                for handle in handles[1:]:
                    handle.wait()
            else:
                got = received_by(group)
                assert bool((got["x"] == step).all())
                assert bool((got["small"] == step).all())


def test_a_buffer_may_be_reused_after_its_handles_were_waited_for(ranks2: RankPool) -> None:
    """Small tensors may be overwritten even earlier. Engines wait for `handles[1:]` alone."""
    ranks2.run(reused)


def many_open(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            for number in range(40):
                group.isend_tensor_dict({"x": torch.full((5000,), float(number))}, 1)
            group.barrier()
        else:
            group.barrier()
            for number in range(40):
                assert received_by(group)["x"][-1] == number


def test_open_sends_are_received_in_order(ranks2: RankPool) -> None:
    """Forty dicts whose handles are not waited for arrive one after the other."""
    ranks2.run(many_open)


def half_known(rank: int, world_size: int, directory: Path) -> list[str]:
    """Send dicts that the receiver cannot decode, with tensors outside of the metadata, and good ones after them."""
    x = torch.arange(50_000.0)
    texts = []
    with world(rank, world_size, directory) as group:
        if rank == 0:
            register_type(Unknown)
            try:
                for bad in ({"bad": Unknown(), "x": x, "y": x.int()}, {"bad": Unknown()}):
                    group.broadcast_tensor_dict(bad)
                    group.send_tensor_dict(bad, 1)
            finally:
                codec.unregister_type(Unknown)
            group.broadcast_tensor_dict({"x": x + 1})
            group.send_tensor_dict({"x": x + 2}, 1)
        else:
            for _ in range(2):
                texts.append(refusal(group.broadcast_tensor_dict, DecodeError))
                texts.append(refusal(group.recv_tensor_dict, DecodeError))
            got = group.broadcast_tensor_dict()
            assert got is not None
            assert torch.equal(got["x"], x + 1)
            assert torch.equal(received_by(group)["x"], x + 2)
    return texts


@pytest.mark.guarantee("G4")
def test_a_dict_that_cannot_be_decoded_leaves_the_group_intact(ranks2: RankPool) -> None:
    """The receiver discards its tensors, and the next dict arrives with its own tensors."""
    _, texts = ranks2.run(half_known)
    assert len(texts) == 4
    assert all("test_tensor_dicts.Unknown" in text for text in texts)


def without_memory(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Send two dicts to a rank that cannot allocate the tensor of the first one."""
    found: list[Any] = []
    empty = torch.empty

    def refuse_large(shape: Any, **options: Any) -> torch.Tensor:
        if shape == (50_000,) and not found:
            raise RuntimeError("can't allocate memory")
        return empty(shape, **options)

    with world(rank, world_size, directory) as group:
        if rank == 0:
            for value in (1.0, 2.0):
                group.isend_tensor_dict({"x": torch.full((50_000,), value)}, 1)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "empty", refuse_large)
                for _ in range(2):
                    try:
                        found.append(received_by(group)["x"][0].item())
                    except (DecodeError, GroupBrokenError) as error:
                        found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_dict_for_which_there_is_no_memory_hands_out_no_tensors_of_another(
    place: str, ranks2: RankPool
) -> None:
    """Over Gloo its tensors are on their way, and would be those of the next dict; so the group ends."""
    _, found = ranks2.run(without_memory)
    if place == WAYS[0]:
        # The tensors are in the message, and it is its decoder that allocates.
        assert found == [1.0, 2.0]
    else:
        assert found[0].startswith("DecodeError: a tensor of shape (50000,)")
        assert "tensors of the dict are on their way" in found[0]
        assert found[1].startswith("GroupBrokenError")


def no_dict(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            group.broadcast_object([1, 2])
            group.broadcast_tensor_dict({"x": 1})
        else:
            refusal(group.broadcast_tensor_dict, DecodeError)
            assert group.broadcast_tensor_dict() == {"x": 1}


def test_an_object_received_as_a_tensor_dict_raises(ranks2: RankPool) -> None:
    """A rank that calls another broadcast than the sender gets a DecodeError and no wrong object."""
    ranks2.run(no_dict)


def out_of_order(rank: int, world_size: int, directory: Path) -> None:
    """Receive the broadcast dict first, although the other dict was sent earlier."""
    with world(rank, world_size, directory) as group:
        if rank == 0:
            handles = group.isend_tensor_dict({"x": torch.full((8192,), 1.0)}, 1)
            group.broadcast_tensor_dict({"x": torch.full((8192,), 2.0)})
            for handle in handles:
                handle.wait()
        else:
            broadcast = group.broadcast_tensor_dict()
            assert broadcast is not None
            assert broadcast["x"][0] == 2
            assert received_by(group)["x"][0] == 1


def test_sent_and_broadcast_dicts_do_not_mix(ranks2: RankPool) -> None:
    """Tensors of equal size arrive in their own dict, in whatever order the dicts are received."""
    ranks2.run(out_of_order)


def test_a_message_of_another_protocol_is_refused() -> None:
    """Slots that do not match the data after them raise a DecodeError and allocate nothing."""
    from coordinator.host.tensor_dict_format import Slicing, TensorSlot, join

    good = TensorSlot(0, (4,), "float32", "host", 1)
    for bad in (
        msgspec.structs.replace(good, index=1),
        msgspec.structs.replace(good, dtype="float33"),
        msgspec.structs.replace(good, dtype="nn"),
        msgspec.structs.replace(good, shape=(-4,)),
        msgspec.structs.replace(good, shape=(1 << 60,)),
    ):
        refusal(lambda slot=bad: join({"x": slot}, torch.device("cpu"), Slicing()), DecodeError)  # type: ignore[misc]
    refusal(lambda: join([good], torch.device("cpu"), Slicing()), DecodeError)
