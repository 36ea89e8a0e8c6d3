"""What tests pass to fake groups: a table, and a dict of values that are sent in different ways."""

from collections import OrderedDict
from typing import Any

import torch

from coordinator.host.tensor_dict_format import INLINE_BYTES

__all__ = ["TABLE", "tensor_dict"]

TABLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def tensor_dict() -> dict[str, Any]:
    """Return a new dict of tensors large, small and of odd size, a nested dict and a number."""
    return {
        "hidden": torch.arange(INLINE_BYTES, dtype=torch.float32).view(2, -1),
        "small": torch.arange(6).view(2, 3),
        "odd": torch.arange(7),
        "nested": OrderedDict(residual=torch.arange(12.0).view(3, 4), n=1),
        "step": 5,
    }
