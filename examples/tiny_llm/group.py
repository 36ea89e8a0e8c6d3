"""The methods of `coordinator.GroupCoordinator` that the demo uses; `TimedGroup` has them too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Group", "ModelGroups"]


class Group(Protocol):
    """The methods of a group coordinator that the model and its serving loop use."""

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members, in the group's order."""

    @property
    def world_size(self) -> int:
        """Number of members."""

    @property
    def rank_in_group(self) -> int:
        """Rank of this process in the group."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the first member."""

    @property
    def is_last_rank(self) -> bool:
        """Whether this process is the last member."""

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the sum of all members' tensors."""

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenate all members' tensors on one member; return None on the others."""

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any:
        """Return one member's object on every member."""

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return all members' objects on one member, and None on the others."""

    def send_object(self, obj: Any, dst: int) -> None:
        """Send an object to one member."""

    def recv_object(self, src: int) -> Any:
        """Receive an object from one member."""

    def send_tensor_dict(
        self, tensor_dict: dict[str, Any], dst: int | None = None, all_gather_group: Any | None = None
    ) -> Any:
        """Send named tensors to one member, by default the next."""

    def recv_tensor_dict(
        self, src: int | None = None, all_gather_group: Any | None = None
    ) -> Mapping[str, Any] | None:
        """Receive named tensors from one member, by default the previous."""


@dataclass(frozen=True)
class ModelGroups:
    """The groups of one replica of a model.

    Attributes:
        world: All ranks that serve the model; rank 0 schedules.
        tensor: The ranks that share this rank's layers.
        pipeline: The ranks with the same share of each stage's layers, in the order of the stages.
    """

    world: Group
    tensor: Group
    pipeline: Group

    @property
    def samples(self) -> bool:
        """Whether this rank samples tokens: it is the first rank of the last stage."""
        return self.pipeline.is_last_rank and self.tensor.is_first_rank
