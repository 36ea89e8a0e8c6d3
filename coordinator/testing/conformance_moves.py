"""Conformance of the calls that move data without computing, of refusals, and of destroy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from coordinator.testing.conformance import Checker
from coordinator.testing.conformance_exchanges import exchange_refusals, rank_refusals
from coordinator.testing.conformance_inputs import LAYOUTS, large_shape, raw
from coordinator.testing.conformance_reductions import SHAPES, first_dtype, uneven_sizes

# ------------------------------------------------------------------ gathers and broadcast


def check_all_gather(check: Checker) -> None:
    """Check all_gather with every dtype, dimension and layout."""
    for dtype in check.dtypes:
        _all_gather(check, (3, 5), dtype, None)
        _all_gather(check, large_shape(dtype), dtype, 0)
        _all_gather(check, (3, 5), dtype, 0, "conjugated")
    for shape in SHAPES:
        dims = max(len(shape), 1)
        for dim in range(-dims, dims):
            for layout in ("", *LAYOUTS):
                _all_gather(check, shape, check.dtypes[0], dim, layout)


def _all_gather(
    check: Checker, shape: tuple[int, ...], dtype: torch.dtype, dim: int | None, layout: str = ""
) -> None:
    at = -1 if dim is None else dim
    parts = [part.reshape(shape or 1) for part in check.inputs.all(shape, dtype)]
    own = check.inputs.own(shape, dtype)
    arguments = () if dim is None else (dim,)
    check.compute(
        f"all_gather(dim {at}) of {dtype} {shape} {layout}".rstrip(),
        LAYOUTS[layout](own) if layout else own,
        lambda it: check.communicator.all_gather(it, *arguments),
        torch.cat(parts, at),
        same_everywhere=True,
    )


def check_all_gatherv(check: Checker) -> None:
    """Check all_gatherv with uneven sizes, including zeros; a sequence of tensors gives a list."""
    for sizes in uneven_sizes(check.world_size):
        for dim in (0, 1, -1):
            parts = check.inputs.uneven((4, 3), dim % 2, sizes, check.dtypes[0])
            for layout in ("", "strided", "transposed"):
                own = parts[check.rank].to(check.communicator.device)
                check.compute(
                    f"all_gatherv(dim {dim}, sizes {sizes}) {layout}".rstrip(),
                    LAYOUTS[layout](own) if layout else own,
                    lambda it, dim=dim, sizes=sizes: check.communicator.all_gatherv(  # type: ignore[misc]
                        it, dim, sizes
                    ),
                    torch.cat(parts, dim),
                    same_everywhere=True,
                )
    stated = uneven_sizes(check.world_size)[0]
    for given in (None, stated):
        counts = given or (2,) * check.world_size
        all_parts = [check.inputs.uneven((4, 3), 0, counts, dtype) for dtype in check.dtypes]
        own_parts = [parts[check.rank].to(check.communicator.device) for parts in all_parts]
        check.begin(f"all_gatherv(list, sizes {given})")
        results: Any = check.communicator.all_gatherv(own_parts, 0, given)
        if not isinstance(results, list) or len(results) != len(own_parts):
            check.fail("shape", f"a sequence of {len(own_parts)} tensors must give a list of as many")
            continue
        for result, parts in zip(results, all_parts, strict=True):
            check.check_result(result, torch.cat(parts, 0))


def check_gather(check: Checker) -> None:
    """Check gather to every rank, along every dimension; the other ranks get None."""
    for dst in range(check.world_size):
        for dim in (0, 1, -1):
            for layout in ("", *LAYOUTS):
                _gather(check, (3, 4), check.dtypes[0], dst, dim, layout)
        for shape in ((), (0,), (2, 0)):
            _gather(check, shape, check.dtypes[0], dst, 0)
    for dtype in check.dtypes:
        _gather(check, large_shape(dtype), dtype, check.world_size - 1, 0)


def _gather(
    check: Checker, shape: tuple[int, ...], dtype: torch.dtype, dst: int, dim: int, layout: str = ""
) -> None:
    parts = [part.reshape(shape or 1) for part in check.inputs.all(shape, dtype)]
    own = check.inputs.own(shape, dtype)
    check.compute(
        f"gather(dst {dst}, dim {dim}) of {dtype} {shape} {layout}".rstrip(),
        LAYOUTS[layout](own) if layout else own,
        lambda it: check.communicator.gather(it, dst, dim),
        torch.cat(parts, dim) if check.rank == dst else None,
    )


def check_broadcast(check: Checker) -> None:
    """Check broadcast from every rank, in place, into any layout."""
    for src in range(check.world_size):
        for shape in SHAPES:
            for layout in ("contiguous", *LAYOUTS):
                _broadcast(check, shape, check.dtypes[0], src, layout)
    for dtype in check.dtypes:
        _broadcast(check, (3, 5), dtype, 0, "strided")
        _broadcast(check, (3, 5), dtype, 0, "conjugated")
        _broadcast(check, large_shape(dtype), dtype, check.world_size - 1, "contiguous")


def _broadcast(check: Checker, shape: tuple[int, ...], dtype: torch.dtype, src: int, layout: str) -> None:
    check.begin(f"broadcast(src {src}) of {dtype} {shape} {layout}")
    own = check.inputs.own(shape, dtype)
    target = own.clone() if layout == "contiguous" else LAYOUTS[layout](own)
    result = check.communicator.broadcast(target, src)
    if result is not target:
        check.fail("returns its argument", "another tensor was returned")
    check.check_values(target, check.inputs.of(src, shape, dtype))


# ------------------------------------------------------------------ point to point


@dataclasses.dataclass(frozen=True)
class Edge:
    """One transfer as this rank sees it.

    Attributes:
        dst: Rank to which this rank sends; None if it does not send.
        src: Rank from which this rank receives; None if it does not receive.
        origin: Rank whose inputs arrive.
    """

    dst: int | None
    src: int | None
    origin: int


def edges(check: Checker) -> list[Edge]:
    """Return the transfers around the ring, one after the other; in a fake group, one that loops back."""
    size, me = check.world_size, check.rank
    if check.alike:
        peer = (me + 1) % size
        return [Edge(peer, peer, me)]
    return [
        Edge((me + 1) % size if me == sender else None, sender if me == (sender + 1) % size else None, sender)
        for sender in range(size)
    ]


def check_point_to_point(check: Checker) -> None:
    """Check send and recv with every dtype, shape and layout, handles in any order, and default peers."""
    if check.world_size == 1:
        own = check.inputs.own((3,), check.dtypes[0])
        peerless: dict[str, Callable[[], object]] = {
            "send": lambda: check.communicator.send(own),
            "recv": lambda: check.communicator.recv((3,), check.dtypes[0]),
            "isend": lambda: check.communicator.isend(own, 0),
            "irecv": lambda: check.communicator.irecv(own, 0),
        }
        check.check_refusals("send", peerless)
        return
    for edge in edges(check):
        for dtype in check.dtypes:
            _transfer(check, edge, (3, 5), dtype)
            _transfer(check, edge, large_shape(dtype), dtype)
        for shape in SHAPES:
            _transfer(check, edge, shape, check.dtypes[0])
    ring = edges(check)
    next_, previous = (check.rank + 1) % check.world_size, (check.rank - 1) % check.world_size
    around = ring[0] if check.alike else Edge(next_, previous, previous)
    for dtype in check.dtypes:
        _handles(check, around, dtype)
    _default_peers(check)


def _transfer(check: Checker, edge: Edge, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    own = check.inputs.own(shape, dtype)
    bits = raw(own)
    for layout in ("", *LAYOUTS):
        check.begin(f"send() of {dtype} {shape} {layout}".rstrip())
        if edge.dst is not None:
            sent = LAYOUTS[layout](own) if layout else own
            check.communicator.send(sent, edge.dst)
            if not torch.equal(raw(sent), bits):
                check.fail("input unchanged", "the call changed its input")
        check.begin(f"recv() of {dtype} {shape}")
        if edge.src is not None:
            result = check.communicator.recv(shape, dtype, edge.src, timeout_s=check.timeout_s)
            check.check_result(result, check.inputs.of(edge.origin, shape, dtype))


def _handles(check: Checker, edge: Edge, dtype: torch.dtype) -> None:
    """Check several transfers at once, posted and waited for in different orders."""
    communicator = check.communicator
    shapes = ((4,), (2, 3), (), large_shape(dtype), (0,))
    if edge.dst is None or edge.src is None:
        return
    for order in ("receive first", "send first"):
        for layout in ("contiguous", "strided", "transposed", "conjugated"):
            check.begin(f"irecv({order}) of {dtype} into {layout}")
            owns = [check.inputs.own(shape, dtype, salt) for salt, shape in enumerate(shapes)]
            targets = [torch.zeros_like(own) for own in owns]
            if layout != "contiguous":
                targets = [LAYOUTS[layout](target) for target in targets]
            if order == "receive first":
                receives = [
                    communicator.irecv(target, edge.src, timeout_s=check.timeout_s) for target in targets
                ]
                sends = [communicator.isend(own, edge.dst) for own in owns]
            else:
                sends = [communicator.isend(own, edge.dst) for own in owns]
                receives = [
                    communicator.irecv(target, edge.src, timeout_s=check.timeout_s) for target in targets
                ]
            for handle in [*reversed(receives), *sends, *receives, *reversed(sends)]:
                handle.wait()
            if communicator.device.type == "cpu" and not all(
                handle.is_completed() for handle in [*sends, *receives]
            ):
                check.fail("handle", "is_completed() is False after wait()")
            for salt, (target, shape) in enumerate(zip(targets, shapes, strict=True)):
                check.check_values(target, check.inputs.of(edge.origin, shape, dtype, salt))


def _default_peers(check: Checker) -> None:
    """Check that by default sends go to the next rank and receives come from the previous one."""
    communicator, dtype = check.communicator, check.dtypes[0]
    next_, previous = (check.rank + 1) % check.world_size, (check.rank - 1) % check.world_size
    target = torch.zeros_like(check.inputs.own((6,), dtype))
    check.begin("irecv(default src)")
    sent = communicator.isend(check.inputs.own((6,), dtype), previous if check.alike else None)
    communicator.irecv(target, timeout_s=check.timeout_s).wait()
    sent.wait()
    check.check_values(target, check.inputs.of(previous, (6,), dtype))
    if check.alike:
        check.begin("isend(default dst)")
        communicator.isend(check.inputs.own((6,), dtype)).wait()
        received = communicator.recv((6,), dtype, next_, timeout_s=check.timeout_s)
        check.check_result(received, check.inputs.of(next_, (6,), dtype))


# ------------------------------------------------------------------ refusals


def check_refusals(check: Checker) -> None:
    """Check that bad arguments raise UsageError before anything is sent, and that the group stays usable."""
    it: Any = check.communicator
    size, device = check.world_size, check.communicator.device
    t = check.inputs.own((2 * size, 3), torch.float32)
    whole = check.inputs.own((2 * size, 3), torch.int32)
    expanded = t[:1].expand(4, 3)
    elsewhere = torch.empty(3, device="meta")
    sparse = torch.eye(2, device=device).to_sparse()
    attempts: dict[str, dict[str, Callable[[], object]]] = {
        "all_reduce": {
            "a list": lambda: it.all_reduce([1.0]),
            "a sparse tensor": lambda: it.all_reduce(sparse),
            "a tensor elsewhere": lambda: it.all_reduce(elsewhere),
            "an unknown op": lambda: it.all_reduce(t, "xor"),
            "MEAN of integers": lambda: it.all_reduce(whole, "mean"),
            "MIN of complex": lambda: it.all_reduce(torch.complex(t, t), "min"),
            "timeout_s 0": lambda: it.all_reduce(t, timeout_s=0),
            "timeout_s NaN": lambda: it.all_reduce(t, timeout_s=float("nan")),
        },
        "all_reduce_": {"a tensor that overlaps itself": lambda: it.all_reduce_(expanded)},
        "reduce_scatter": {
            "dim 2 of 2": lambda: it.reduce_scatter(t, 2),
            "dim -3 of 2": lambda: it.reduce_scatter(t, -3),
            "dim True": lambda: it.reduce_scatter(t, True),
            "dim 0.0": lambda: it.reduce_scatter(t, 0.0),
        },
        "reduce_scatterv": {
            "too few sizes": lambda: it.reduce_scatterv(t, 0, (2,) * (size - 1)),
            "a negative size": lambda: it.reduce_scatterv(t, 0, (2 * size + 1, -1, *(0,) * (size - 2))),
            "sizes that add up to more": lambda: it.reduce_scatterv(t, 0, (3,) * size),
            "sizes 2": lambda: it.reduce_scatterv(t, 0, 2),
        },
        "reduce_scatterv_into_output": {
            "another shape": lambda: it.reduce_scatterv_into_output(t, torch.empty_like(t[:1]), 0),
            "another dtype": lambda: it.reduce_scatterv_into_output(t, torch.empty_like(whole[:2]), 0),
            "an output in the input": lambda: it.reduce_scatterv_into_output(t, t[:2], 0),
            "an output that overlaps itself": lambda: it.reduce_scatterv_into_output(
                t, torch.empty_like(t[:1]).expand(2, 3), 0
            ),
        },
        "all_gather": {"dim 2 of 2": lambda: it.all_gather(t, 2), "no tensor": lambda: it.all_gather(None)},
        "all_gatherv": {
            "other sizes than its own": lambda: it.all_gatherv(t, 0, (2 * size + 1,) * size),
            "too many sizes": lambda: it.all_gatherv(t, 0, (2 * size,) * (size + 1)),
            "numbers": lambda: it.all_gatherv([1, 2]),
            "nothing": lambda: it.all_gatherv(None),
        },
        "gather": rank_refusals(lambda rank: it.gather(t, rank), size),
        "broadcast": {
            **rank_refusals(lambda rank: it.broadcast(t, rank), size),
            "a tensor that overlaps itself": lambda: it.broadcast(expanded),
        },
    }
    if size > 1:
        odd = torch.ones(size + 1, device=device)
        attempts["reduce_scatter"]["an uneven split"] = lambda: it.reduce_scatter(odd)
        attempts |= _point_to_point_refusals(check, t, expanded)
    attempts |= exchange_refusals(check, t)
    for method, each in attempts.items():
        check.check_refusals(method, each)


def _point_to_point_refusals(
    check: Checker, t: torch.Tensor, expanded: torch.Tensor
) -> dict[str, dict[str, Callable[[], object]]]:
    it: Any = check.communicator
    me, size = check.rank, check.world_size
    peer = (me + 1) % size
    return {
        "send": {**rank_refusals(lambda rank: it.send(t, rank), size), "itself": lambda: it.send(t, me)},
        "isend": {
            "no tensor": lambda: it.isend(1, peer),
            "timeout_s -1": lambda: it.isend(t, peer, timeout_s=-1),
        },
        "recv": {
            **rank_refusals(lambda rank: it.recv((2,), t.dtype, rank), size),
            "itself": lambda: it.recv((2,), t.dtype, me),
            "a negative size": lambda: it.recv((-1,), t.dtype, peer),
            "size 3": lambda: it.recv(3, t.dtype, peer),
            "no dtype": lambda: it.recv((2,), "float32", peer),
        },
        "irecv": {"a tensor that overlaps itself": lambda: it.irecv(expanded, peer)},
    }


# ------------------------------------------------------------------ life


def check_prepare_buffers(check: Checker) -> None:
    """Check that reserving buffers does not change the results of later calls."""
    for message_bytes in (0, 1 << 20, 16):
        check.begin(f"prepare_buffers({message_bytes})")
        check.communicator.prepare_buffers(message_bytes)
        _all_gather(check, (5,), first_dtype(check), 0)


def check_destroy(check: Checker) -> None:
    """Check that destroy is idempotent."""
    for _ in range(2):
        check.begin("destroy()")
        check.communicator.destroy()
