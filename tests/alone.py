"""A group of one for the demo's model."""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Alone"]


class Alone:
    """A group of one, or a rank of a larger group that sends nothing."""

    def __init__(self, rank_in_group: int = 0, world_size: int = 1) -> None:
        self.rank_in_group = rank_in_group
        self.world_size = world_size
        self.ranks = list(range(world_size))
        self.is_first_rank = rank_in_group == 0
        self.is_last_rank = rank_in_group == world_size - 1

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return input_

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        del dst, dim
        return input_

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any:
        raise NotImplementedError

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        raise NotImplementedError

    def send_object(self, obj: Any, dst: int) -> None:
        raise NotImplementedError

    def recv_object(self, src: int) -> Any:
        raise NotImplementedError

    def send_tensor_dict(
        self, tensor_dict: dict[str, Any], dst: int | None = None, all_gather_group: Any | None = None
    ) -> Any:
        raise NotImplementedError

    def recv_tensor_dict(
        self, src: int | None = None, all_gather_group: Any | None = None
    ) -> Mapping[str, Any] | None:
        raise NotImplementedError
