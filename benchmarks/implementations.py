"""The measured implementations behind one interface: ours, plain torch.distributed, and installed peers."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.results import BenchmarkError
from coordinator.group import GroupCoordinator
from device_comm.base import CallPath

__all__ = ["Ours", "Plain", "Verbs", "Vllm", "plain_name", "vllm_class"]

TensorDict = dict[str, Any]

# torch 2.13 renamed these functions and warns about the names that earlier versions have.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Verbs(Protocol):
    """The operations that all implementations have."""

    def barrier(self) -> Any: ...
    def broadcast_object(self, obj: Any = None) -> Any: ...
    def send_tensor_dict(self, tensors: TensorDict, dst: int) -> Any: ...
    def recv_tensor_dict(self, src: int) -> Any: ...
    def broadcast_tensor_dict(self, tensors: TensorDict | None = None) -> Any: ...


class Ours:
    """A `GroupCoordinator` of this package."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group
        self.barrier = group.barrier
        self.broadcast_object = group.broadcast_object
        self.send_tensor_dict: Callable[..., Any] = group.send_tensor_dict
        self.recv_tensor_dict: Callable[..., Any] = group.recv_tensor_dict
        self.broadcast_tensor_dict: Callable[..., Any] = group.broadcast_tensor_dict

    def path(self, operation: str, tensor: torch.Tensor) -> CallPath:
        """Return the communicator's algorithm for this call, and its reason."""
        return self.group.device_communicator.path(operation, tensor.nbytes, tensor.dtype)


def plain_name(device: torch.device) -> str:
    """Return the name of plain torch.distributed in the tables."""
    return "torch gloo" if device.type == "cpu" else "torch nccl"


class Plain:
    """Plain torch.distributed, as an engine without a coordinator would call it."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, host: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.device = device
        # NCCL cannot carry objects.
        self.host = host or group
        self.world_size = group.size()
        name = plain_name(device).removeprefix("torch ")
        self.path = CallPath(name, "torch.distributed's backend for this device")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum into a new tensor, as ours does."""
        result = tensor.clone()
        dist.all_reduce(result, group=self.group)
        return result

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate along the first dimension."""
        result = tensor.new_empty((self.world_size * tensor.shape[0], *tensor.shape[1:]))
        _gather_into(result, tensor, group=self.group)
        return result

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum, and keep this rank's part of the first dimension."""
        result = tensor.new_empty((tensor.shape[0] // self.world_size, *tensor.shape[1:]))
        _reduce_into(result, tensor, group=self.group)
        return result

    def all_reduce_add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum, add and normalise in separate steps."""
        total = self.all_reduce(tensor) + residual
        return torch.nn.functional.rms_norm(total, weight.shape, weight, 1e-6), total

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.host)

    def broadcast_object(self, obj: Any = None) -> Any:
        """Return rank 0's object."""
        box = [obj]
        dist.broadcast_object_list(box, group_src=0, group=self.host)
        return box[0]

    def send_tensor_dict(self, tensors: TensorDict, dst: int) -> None:
        """Send the metadata as an object and then each tensor, as engines do."""
        metadata = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
        dist.send_object_list([metadata], group_dst=dst, group=self.host)
        for value in tensors.values():
            dist.send(value, group_dst=dst, group=self.group)

    def recv_tensor_dict(self, src: int) -> TensorDict:
        """Receive a dict sent by `send_tensor_dict`."""
        box: list[Any] = [None]
        dist.recv_object_list(box, group_src=src, group=self.host)
        received = {name: self._empty(*each) for name, each in box[0].items()}
        for value in received.values():
            dist.recv(value, group_src=src, group=self.group)
        return received

    def broadcast_tensor_dict(self, tensors: TensorDict | None = None) -> TensorDict:
        """Broadcast the metadata and all values that are not tensors as an object, then each tensor."""
        metadata = None
        if tensors is not None:
            metadata = {
                name: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
                for name, value in tensors.items()
            }
        metadata = self.broadcast_object(metadata)
        result: TensorDict = {}
        for name, each in metadata.items():
            if isinstance(each, tuple):
                result[name] = self._empty(*each) if tensors is None else tensors[name]
                dist.broadcast(result[name], group_src=0, group=self.group)
            else:
                result[name] = each
        return result

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


class Vllm:
    """vLLM's GroupCoordinator with its message queue."""

    path = CallPath("message queue", "vLLM's shared-memory broadcast; tensors over Gloo")

    def __init__(self, kind: Any, ranks: list[int], rank: int) -> None:
        self.group = kind([ranks], rank, "gloo", False, True, "bench")
        self.barrier: Callable[[], None] = self.group.barrier
        self.broadcast_object: Callable[..., Any] = self.group.broadcast_object
        self.send_tensor_dict: Callable[..., Any] = self.group.send_tensor_dict
        self.recv_tensor_dict: Callable[..., Any] = self.group.recv_tensor_dict
        self.broadcast_tensor_dict: Callable[..., Any] = self.group.broadcast_tensor_dict


def vllm_class(home: Path | None) -> Any:
    """Return vLLM's GroupCoordinator from a folder of peers.

    The peers' environment is appended to the import path after ours, so both run on the same torch.

    Args:
        home: Folder with `venv/` and `vllm/`; None if there are no peers.

    Raises:
        BenchmarkError: vLLM is not there, or this interpreter cannot import it.
    """
    if home is None:
        raise BenchmarkError("not installed (--peers HOME names a folder with peers)")
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = [home / "vllm", home / "venv" / "lib" / minor / "site-packages"]
    missing = [str(each) for each in folders if not each.is_dir()]
    if missing:
        raise BenchmarkError(f"not installed: there is no {missing[0]}")
    # We cannot fix vLLM's warnings about its buffers, and they would disturb the output.
    warnings.filterwarnings("ignore", module="vllm")
    sys.path += [str(each) for each in folders if str(each) not in sys.path]
    try:
        timeouts = importlib.import_module("vllm.distributed.utils")
        state = importlib.import_module("vllm.distributed.parallel_state")
    except ImportError as error:
        raise BenchmarkError(f"cannot be imported: {error}") from error
    # These functions need a configuration of the whole engine, which does not exist here.
    for name in ("get_cpu_distributed_timeout_or_none", "get_distributed_timeout_or_none"):
        setattr(timeouts, name, lambda: None)
    return state.GroupCoordinator
