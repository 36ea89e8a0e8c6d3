"""Conformance of the calls that move data without computing, of reserving buffers, and of destroy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from coordinator.testing.conformance import Checker
from coordinator.testing.conformance_inputs import LAYOUTS, Case, large_shape, raw
from coordinator.testing.conformance_reductions import SHAPES, first_dtype, uneven_sizes
from device_comm.handles import Handle

# ------------------------------------------------------------------ gathers and broadcast


def check_all_gather(check: Checker) -> None:
    """Check all_gather with every dtype, dimension and layout."""
    for dtype in check.dtypes:
        _all_gather(check, Case((3, 5), dtype, dim=-1, passes_dim=False))
        _all_gather(check, Case(large_shape(dtype), dtype))
        _all_gather(check, Case((3, 5), dtype, "conjugated"))
    for shape in SHAPES:
        dims = max(len(shape), 1)
        for dim in range(-dims, dims):
            for layout in LAYOUTS:
                _all_gather(check, Case(shape, check.dtypes[0], layout, dim=dim))


def _all_gather(check: Checker, case: Case) -> None:
    check.compute(
        f"all_gather(dim {case.dim})",
        case,
        lambda it: check.communicator.all_gather(it, *case.dims),
        _gathered(check, case),
    )


def _gathered(check: Checker, case: Case) -> torch.Tensor:
    """Return the ranks' inputs one after the other; a tensor without dimensions counts as one of shape [1]."""
    parts = check.inputs.all(case.shape, case.dtype)
    return torch.cat([part.reshape(case.shape or 1) for part in parts], case.dim)


def check_all_gatherv(check: Checker) -> None:
    """Check all_gatherv with uneven sizes, including zeros; a sequence of tensors gives a list."""
    for sizes in uneven_sizes(check.world_size):
        for dim in (0, 1, -1):
            for layout in ("contiguous", "strided", "transposed"):
                _all_gatherv(check, Case((4, 3), check.dtypes[0], layout, dim=dim), sizes)
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


def _all_gatherv(check: Checker, case: Case, sizes: tuple[int, ...]) -> None:
    parts = check.inputs.uneven(case.shape, case.dim % 2, sizes, case.dtype)
    check.compute(
        f"all_gatherv(dim {case.dim}, sizes {sizes})",
        dataclasses.replace(case, shape=tuple(parts[check.rank].shape)),
        lambda it: check.communicator.all_gatherv(it, case.dim, sizes),
        torch.cat(parts, case.dim),
    )


def check_gather(check: Checker) -> None:
    """Check gather to every rank, along every dimension; the other ranks get None."""
    for dst in range(check.world_size):
        for dim in (0, 1, -1):
            for layout in LAYOUTS:
                _gather(check, Case((3, 4), check.dtypes[0], layout, dim=dim, root=dst))
        for shape in ((), (0,), (2, 0)):
            _gather(check, Case(shape, check.dtypes[0], root=dst))
    for dtype in check.dtypes:
        _gather(check, Case(large_shape(dtype), dtype, root=check.world_size - 1))


def _gather(check: Checker, case: Case) -> None:
    check.compute(
        f"gather(dst {case.root}, dim {case.dim})",
        case,
        lambda it: check.communicator.gather(it, case.root, case.dim),
        _gathered(check, case) if check.rank == case.root else None,
    )


def check_broadcast(check: Checker) -> None:
    """Check broadcast from every rank, in place, into any layout."""
    for src in range(check.world_size):
        for shape in SHAPES:
            for layout in LAYOUTS:
                _broadcast(check, Case(shape, check.dtypes[0], layout, root=src))
    for dtype in check.dtypes:
        _broadcast(check, Case((3, 5), dtype, "strided"))
        _broadcast(check, Case((3, 5), dtype, "conjugated"))
        _broadcast(check, Case(large_shape(dtype), dtype, root=check.world_size - 1))


def _broadcast(check: Checker, case: Case) -> None:
    check.fill(
        f"broadcast(src {case.root})",
        case,
        lambda it: check.communicator.broadcast(it, case.root),
        check.inputs.of(case.root, case.shape, case.dtype),
    )


# ------------------------------------------------------------------ point to point


def check_point_to_point(check: Checker) -> None:
    """Check send and recv with every dtype, shape and layout, handles in any order, and default peers."""
    if check.world_size == 1:
        own = check.inputs.own((3,), check.dtypes[0])
        check.check_refusals(
            {
                "send(no peer)": lambda: check.communicator.send(own),
                "recv(no peer)": lambda: check.communicator.recv((3,), check.dtypes[0]),
                "isend(no peer)": lambda: check.communicator.isend(own, 0),
                "irecv(no peer)": lambda: check.communicator.irecv(own, 0),
            }
        )
        return
    for sender in [check.rank] if check.alike else range(check.world_size):
        for dtype in check.dtypes:
            _transfer(check, Case((3, 5), dtype, root=sender))
            _transfer(check, Case(large_shape(dtype), dtype, root=sender))
        for shape in SHAPES:
            _transfer(check, Case(shape, check.dtypes[0], root=sender))
    for dtype in check.dtypes:
        _handles(check, dtype)
    _default_peers(check)


def _transfer(check: Checker, case: Case) -> None:
    """Check transfers from rank `case.root` to the next rank; in a fake group what is sent to a peer comes back."""
    sender, receiver = case.root, (case.root + 1) % check.world_size
    for layout, lay_out in LAYOUTS.items():
        check.begin(f"send() of {case.dtype} {case.shape} {layout}")
        if check.rank == sender:
            own = lay_out(check.inputs.own(case.shape, case.dtype))
            before = raw(own)
            check.communicator.send(own, receiver)
            check.check_unchanged(own, before)
        check.begin(f"recv() of {case.dtype} {case.shape}")
        if check.alike or check.rank == receiver:
            src = receiver if check.alike else sender
            result = check.communicator.recv(case.shape, case.dtype, src, timeout_s=check.timeout_s)
            check.check_result(result, check.inputs.of(sender, case.shape, case.dtype))


def _handles(check: Checker, dtype: torch.dtype) -> None:
    """Check several transfers at once, posted and waited for in different orders."""
    communicator = check.communicator
    dst = (check.rank + 1) % check.world_size
    src = dst if check.alike else (check.rank - 1) % check.world_size
    shapes = ((4,), (2, 3), (), large_shape(dtype), (0,))
    for order in ("receive first", "send first"):
        for layout in ("contiguous", "strided", "transposed", "conjugated"):
            check.begin(f"irecv({order}) of {dtype} into {layout}")
            owns = [check.inputs.own(shape, dtype, salt) for salt, shape in enumerate(shapes)]
            targets = [LAYOUTS[layout](torch.zeros_like(own)) for own in owns]
            sends: list[Handle] = []
            if order == "send first":
                sends = [communicator.isend(own, dst) for own in owns]
            receives = [communicator.irecv(each, src, timeout_s=check.timeout_s) for each in targets]
            sends = sends or [communicator.isend(own, dst) for own in owns]
            for handle in [*reversed(receives), *sends, *receives, *reversed(sends)]:
                handle.wait()
            on_host = communicator.device.type == "cpu"
            if on_host and not all(handle.is_completed() for handle in [*sends, *receives]):
                check.fail("handle", "is_completed() is False after wait()")
            for salt, (target, shape) in enumerate(zip(targets, shapes, strict=True)):
                check.check_values(target, check.inputs.of(src, shape, dtype, salt))


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


# ------------------------------------------------------------------ life


def check_prepare_buffers(check: Checker) -> None:
    """Check that reserving buffers does not change the results of later calls."""
    for message_bytes in (0, 1 << 20, 16):
        check.begin(f"prepare_buffers({message_bytes})")
        check.communicator.prepare_buffers(message_bytes)
        _all_gather(check, Case((5,), first_dtype(check)))


def check_destroy(check: Checker) -> None:
    """Check that destroy is idempotent."""
    for _ in range(2):
        check.begin("destroy()")
        check.communicator.destroy()
