"""The gradients of the collectives, as operations of `compile_ops`, so that a compiler can trace them too.

The loss that is differentiated is the sum of all ranks' losses. A rank's backward pass is collective like its forward
pass: every rank makes it, over the same calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

Given = dict[str, Any]
"""The arguments of an operation by name, without its input."""

_LINEAR: Final = ("sum", "mean", "avg")


def is_linear(op: object) -> bool:
    """Return whether the reduction that a graph holds as `op` has a gradient that needs no inputs: a sum or a mean."""
    return isinstance(op, str) and op.lower() in _LINEAR


def _all_reduce(grad: torch.Tensor, given: Given) -> torch.Tensor:
    ops = torch.ops.group_coordinator
    result: torch.Tensor = ops.all_reduce(grad, given["group_name"], given["op"], given["timeout_s"])
    return result


def _all_gather(grad: torch.Tensor, given: Given) -> torch.Tensor:
    ops, group, timeout_s = torch.ops.group_coordinator, given["group_name"], given["timeout_s"]
    result: torch.Tensor = ops.reduce_scatter(
        grad, group, given["world_size"], given["dim"], "sum", timeout_s
    )
    return result


def _reduce_scatter(grad: torch.Tensor, given: Given) -> torch.Tensor:
    ops, size = torch.ops.group_coordinator, given["world_size"]
    whole: torch.Tensor = ops.all_gather(grad, given["group_name"], size, given["dim"], given["timeout_s"])
    return whole if given["op"].lower() == "sum" else whole / size


def _all_gatherv(grad: torch.Tensor, given: Given) -> torch.Tensor:
    ops, group, timeout_s = torch.ops.group_coordinator, given["group_name"], given["timeout_s"]
    place = (group, given["world_size"], given["rank"], given["dim"], given["sizes"])
    result: torch.Tensor = ops.reduce_scatterv(grad, *place, "sum", timeout_s)
    return result


def _reduce_scatterv(grad: torch.Tensor, given: Given) -> torch.Tensor:
    ops, size, timeout_s = torch.ops.group_coordinator, given["world_size"], given["timeout_s"]
    place = (given["group_name"], size, given["rank"], given["dim"], given["sizes"])
    whole: torch.Tensor = ops.all_gatherv(grad, *place, timeout_s)
    return whole if given["op"].lower() == "sum" else whole / size


def _all_to_all(grad: torch.Tensor, given: Given) -> torch.Tensor:
    ops, sizes = torch.ops.group_coordinator, (given["recv_sizes"], given["send_sizes"])
    place = (given["group_name"], given["world_size"], given["dim"])
    result: torch.Tensor = ops.all_to_all(grad, *place, *sizes, given["timeout_s"])
    return result


def _broadcast(grad: torch.Tensor, given: Given) -> torch.Tensor:
    ops = torch.ops.group_coordinator
    result: torch.Tensor = ops.sum_on(grad, given["group_name"], given["src"], given["timeout_s"])
    return result


def _sum_on(grad: torch.Tensor, given: Given) -> torch.Tensor:
    ops = torch.ops.group_coordinator
    result: torch.Tensor = ops.broadcast(grad, given["group_name"], given["dst"], given["timeout_s"])
    return result


BACKWARD: Final[dict[str, Callable[[torch.Tensor, Given], torch.Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_gatherv": _all_gatherv,
    "reduce_scatterv": _reduce_scatterv,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "sum_on": _sum_on,
}
"""For each operation that carries a gradient: the gradient of its input from that of its result."""
