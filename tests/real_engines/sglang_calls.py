"""What a call of each method of a group is given, and what must come of it, by plain arithmetic.

The arguments are small CPU tensors and, where the call site states them, its own numbers.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from shm_broadcast.errors import UsageError

ROWS, COLUMNS = 4, 6


def values(rank: int) -> torch.Tensor:
    """Return what rank `rank` contributes: small whole numbers, which add up exactly."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) * (rank + 1) + rank


def total(size: int) -> torch.Tensor:
    """Return the sum over all ranks."""
    return torch.stack([values(rank) for rank in range(size)]).sum(0)


class Call:
    """The values for one call, and what must come of it."""

    def __init__(self, rank: int, size: int, group: Any, given: dict[str, Any]) -> None:
        self.rank, self.size, self.group, self.given = rank, size, group, given
        self.peer = 1 - rank

    def dim(self, default: int = -1) -> int:
        """Return the dimension that the site passes."""
        return int(self.given.get("dim", default))


def _same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        if not isinstance(found, torch.Tensor) or not torch.equal(found, wanted):
            raise AssertionError(f"the result is {found!r}, not {wanted!r}")
    elif found != wanted:
        raise AssertionError(f"the result is {found!r}, not {wanted!r}")


Case = tuple[dict[str, Any], Callable[[Any], None]]


def _all_reduce(call: Call) -> Case:
    mine = values(call.rank)

    def check(result: Any) -> None:
        _same(result, total(call.size))
        _same(mine, total(call.size))

    return {"input_": mine}, check


def _in_place(call: Call) -> Case:
    mine = values(call.rank)
    return {"input_": mine}, lambda result: _same(mine, total(call.size))


def _norm(call: Call) -> Case:
    arguments = {
        "input_": values(call.rank),
        "residual_inp_": torch.ones(ROWS, COLUMNS),
        "weight_": torch.full((COLUMNS,), 2.0),
        "eps": 1e-5,
    }

    def check(result: Any) -> None:
        summed = total(call.size) + 1
        normed = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5) * 2
        _same(result[1], summed)
        torch.testing.assert_close(result[0], normed)

    return arguments, check


def _norm_quantised(call: Call) -> Case:
    arguments, _ = _norm(call)
    extra = {"group_size": 128, "emit_bf16": False, "transpose_scale": False}
    return {**arguments, **extra}, lambda result: _same(result, None)


def _all_gather(call: Call) -> Case:
    every = [values(rank) for rank in range(call.size)]
    outputs = [torch.zeros(ROWS, COLUMNS) for _ in every]

    def check(result: Any) -> None:
        if "output_tensor_list" in call.given:
            for output, wanted in zip(outputs, every, strict=True):
                _same(output, wanted)
        else:
            _same(result, torch.cat(every, call.dim()))

    return {"input_": values(call.rank), "dim": call.dim(), "output_tensor_list": outputs}, check


def _gather_into(call: Call) -> Case:
    output = torch.zeros(call.size * ROWS, COLUMNS)
    wanted = torch.cat([values(rank) for rank in range(call.size)])
    return {"output": output, "input": values(call.rank)}, lambda result: _same(output, wanted)


def _scatter_into(call: Call) -> Case:
    output = torch.zeros(ROWS // call.size, COLUMNS)
    wanted = total(call.size).chunk(call.size)[call.rank]
    return {"output": output, "input": values(call.rank)}, lambda result: _same(output, wanted)


def _scatter_along(call: Call) -> Case:
    wanted = total(call.size).chunk(call.size, call.dim())[call.rank]
    return {"input_": values(call.rank), "dim": call.dim()}, lambda result: _same(result, wanted)


def _exchange(call: Call) -> Case:
    output = torch.zeros(ROWS * COLUMNS)
    wanted = torch.cat([values(rank).reshape(-1).chunk(call.size)[call.rank] for rank in range(call.size)])
    return {"output": output, "input": values(call.rank).reshape(-1)}, lambda result: _same(output, wanted)


def _scatterv(call: Call) -> Case:
    sizes = [1, ROWS - 1]
    wanted = total(call.size).split(sizes)[call.rank]
    output = torch.zeros_like(wanted)

    def check(result: Any) -> None:
        _same(result, wanted)
        if "output" in call.given:
            _same(output, wanted)

    return {"input_": values(call.rank), "output": output, "sizes": sizes}, check


def _gatherv(call: Call) -> Case:
    sizes = [1, ROWS]
    parts = [values(rank)[: sizes[rank]] for rank in range(call.size)]
    wanted, output = torch.cat(parts), torch.zeros(sum(sizes), COLUMNS)
    mine = parts[call.rank]
    single = "output" in call.given
    tensors = mine if single else [mine, mine.to(torch.int32)]

    def check(result: Any) -> None:
        _same(result[0], wanted)
        if single:
            _same(output, wanted)
        else:
            _same(result[1], wanted.to(torch.int32))

    return {"input_": tensors, "sizes": sizes, "output": output}, check


def _gather(call: Call) -> Case:
    dim, dst = call.dim(), int(call.given.get("dst", 0))
    wanted = torch.cat([values(rank) for rank in range(call.size)], dim) if call.rank == dst else None
    return {"input_": values(call.rank), "dst": dst, "dim": dim}, lambda result: _same(result, wanted)


def _broadcast(call: Call) -> Case:
    source, mine = int(call.given.get("src", 0)), values(call.rank)

    def check(result: Any) -> None:
        _same(result, values(source))
        _same(mine, values(source))

    return {"input_": mine, "src": source}, check


def _broadcast_object(call: Call) -> Case:
    source = int(call.given.get("src", 0))
    sent = {"host": "127.0.0.1", "port": source}
    return {"obj": sent if call.rank == source else None, "src": source}, lambda result: _same(result, sent)


def _broadcast_dict(call: Call) -> Case:
    source = int(call.given.get("src", 0))

    def check(result: Any) -> None:
        _same(result["x"], values(source))
        _same(result["n"], source)

    given = {"x": values(source), "n": source} if call.rank == source else None
    return {"tensor_dict": given, "src": source}, check


def _gather_objects(call: Call) -> Case:
    wanted = [(rank, None) for rank in range(call.size)]
    return {"obj": (call.rank, None)}, lambda result: _same(result, wanted)


def _send_object(call: Call) -> Case:
    """Both ranks send, then both receive."""

    def check(result: Any) -> None:
        _same(call.group.recv_object(src=call.peer, tag=3), {call.peer})
        for open_send in result:
            open_send.work.wait()

    return {"obj": {call.rank}, "dst": call.peer, "async_send": True, "tag": 3}, check


def _recv_object(call: Call) -> Case:
    sends = call.group.send_object({call.rank}, dst=call.peer, async_send=True, tag=3)

    def check(result: Any) -> None:
        _same(result, {call.peer})
        for open_send in sends:
            open_send.work.wait()

    return {"src": call.peer, "tag": 3}, check


def _send_dict(call: Call) -> Case:
    def check(result: Any) -> None:
        received = call.group.recv_tensor_dict(all_gather_group=None)
        _same(received["x"], values(call.peer))
        for open_send in result:
            open_send.work.wait()

    arguments = {"tensor_dict": {"x": values(call.rank)}, "all_gather_group": None, "async_send": True}
    return arguments, check


def _recv_dict(call: Call) -> Case:
    sends = call.group.send_tensor_dict({"x": values(call.rank)}, async_send=True)

    def check(result: Any) -> None:
        _same(result["x"], values(call.peer))
        for open_send in sends:
            open_send.work.wait()

    return {"all_gather_group": None}, check


def _send_and_recv_dict(call: Call) -> Case:
    arguments = {
        "send_tensor_dict": {"x": values(call.rank)},
        "send_all_gather_group": None,
        "recv_all_gather_group": None,
    }
    return arguments, lambda result: _same(result["x"], values(call.peer))


def _send(call: Call) -> Case:
    """Rank 0 makes the call, and rank 1 receives; then the other way round inside `check`."""

    def check(result: Any) -> None:
        received = call.group.recv(size=torch.Size((ROWS, COLUMNS)), dtype=torch.float32, src=call.peer)
        _same(received, values(call.peer))

    return {"tensor": values(call.rank), "dst": call.peer}, check


def _recv(call: Call) -> Case:
    call.group.isend(values(call.rank), call.peer)
    size = torch.Size((ROWS, COLUMNS))
    return {"size": size, "dtype": torch.float32, "src": call.peer}, lambda result: _same(
        result, values(call.peer)
    )


def _capture(call: Call) -> Case:
    def check(result: Any) -> None:
        with contextlib.ExitStack() as entered:
            _same(entered.enter_context(result).stream, None)

    return {"graph_capture_context": None, "stream": None}, check


def _destroy(call: Call) -> Case:
    """The group is gone, and to destroy it again does nothing."""

    def check(result: Any) -> None:
        _same(result, None)
        call.group.destroy()
        try:
            call.group.all_reduce(values(call.rank))
        except UsageError:
            return
        raise AssertionError("the group can still be used")

    return {}, check


def _asks(wanted: Any) -> Callable[[Call], Case]:
    return lambda call: ({"input_": values(call.rank)}, lambda result: _same(result, wanted))


CASES: dict[str, Callable[[Call], Case]] = {
    "all_reduce": _all_reduce,
    "quant_all_reduce": _all_reduce,
    "_all_reduce_in_place": _in_place,
    "fused_allreduce_rmsnorm": _norm,
    "fused_allreduce_rmsnorm_quant_per_group": _norm_quantised,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _gather_into,
    "_all_gather_into_tensor": _gather_into,
    "reduce_scatter_tensor": _scatter_into,
    "_reduce_scatter_tensor": _scatter_into,
    "reduce_scatter_along_dim": _scatter_along,
    "reduce_scatterv": _scatterv,
    "all_gatherv": _gatherv,
    "all_to_all_single": _exchange,
    "_all_to_all_single": _exchange,
    "gather": _gather,
    "broadcast": _broadcast,
    "broadcast_object": _broadcast_object,
    "broadcast_tensor_dict": _broadcast_dict,
    "all_gather_object": _gather_objects,
    "send_object": _send_object,
    "recv_object": _recv_object,
    "send_tensor_dict": _send_dict,
    "recv_tensor_dict": _recv_dict,
    "send_recv_tensor_dict": _send_and_recv_dict,
    "send": _send,
    "recv": _recv,
    "barrier": lambda call: ({}, lambda result: _same(result, None)),
    "destroy": _destroy,
    "graph_capture": _capture,
    "_can_use_flashinfer_allreduce": _asks(False),
    "_resolve_outplace_all_reduce_method": _asks(None),
}
