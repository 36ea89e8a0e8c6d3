"""Which calls carry gradients, and the refusal of those that would lose one.

A call loses a gradient if grad mode is on, its input requires grad, and its result does not. Engines run in inference
mode or under `torch.no_grad()`, where nothing requires a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from shm_broadcast.errors import UsageError

# Which argument a call writes to. A leaf may be overwritten, as under `torch.no_grad()`: no gradient passes through it.
_WRITTEN: Final = {
    "all_reduce_": 0,
    "broadcast": 0,
    "scatter": 0,
    "all_reduce_into_output": 1,
    "reduce_scatterv_into_output": 1,
    "all_gatherv_into_output": 1,
    "all_to_all_into_output": 1,
}


# Calls that give a group of one its input back, and with it the gradient.
_IDENTITIES: Final = frozenset(
    {
        *("all_reduce", "all_reduce_", "reduce", "reduce_scatter", "reduce_scatterv", "broadcast"),
        *("all_gather", "all_gatherv", "gather", "all_to_all"),
        *("all_reduce_coalesced", "all_gather_coalesced", "reduce_scatter_coalesced"),
    }
)


def wants_gradient(value: object) -> bool:
    """Return whether `value` is a tensor for which autograd would record an operation now."""
    return torch.is_grad_enabled() and isinstance(value, torch.Tensor) and value.requires_grad


def refuse_lost_gradient(name: str, arguments: Sequence[object], world_size: int) -> None:
    """Raise if the call `name` would lose the gradient of one of its arguments.

    Args:
        name: The method.
        arguments: Its arguments, which may be tensors or sequences of them.
        world_size: How many ranks the group has.

    Raises:
        UsageError: It would. Nothing was sent, the group is intact.
    """
    if world_size == 1 and name in _IDENTITIES:
        return
    written = _WRITTEN.get(name)
    for at, argument in enumerate(arguments):
        is_many = not isinstance(argument, torch.Tensor) and isinstance(argument, Sequence)
        many: Sequence[Any] = argument if is_many else (argument,)  # type: ignore[assignment]
        for each in many:
            if wants_gradient(each) and not (at == written and each.is_leaf):
                raise lost_gradient(name)


def lost_gradient(name: str, remedy: str = "") -> UsageError:
    """Return the refusal of a call that has no gradient for an argument that requires one."""
    return UsageError(
        f"{name}: an argument requires grad, but this call carries no gradient; "
        + (remedy or "make it under torch.no_grad(), or pass tensor.detach()")
    )
