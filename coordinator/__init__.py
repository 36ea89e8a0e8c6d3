"""Parallel groups for LLM serving: a `GroupCoordinator` for each parallel dimension.

from coordinator import ParallelGroups, ParallelLayout, init_distributed_environment

init_distributed_environment()                      # under torchrun
with ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2)) as groups:
    groups.tp.all_reduce(tensor)
"""

from coordinator.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    CommTimeoutError,
    CudaError,
    DecodeError,
    DisagreementError,
    GroupBrokenError,
    InternalError,
    NativeError,
    NcclError,
    PeerLostError,
    SettingsError,
    UsageError,
)
from coordinator.external_writer import ExternalWriter
from coordinator.graph_capture import GraphCaptureContext
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups, current_groups
from coordinator.layout import ParallelLayout
from coordinator.parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_dp_group,
    get_ep_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    get_world_group,
    graph_capture,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from coordinator.settings import CoordinatorSettings
from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.handles import Handle
from device_comm.reduction import ReduceOperation
from device_comm.registry import register_communicator
from shm_broadcast.codec import register_type

__all__ = [
    "CapabilityError",
    "ClosedError",
    "CommError",
    "CommTimeoutError",
    "CommunicatorContext",
    "CoordinatorSettings",
    "CudaError",
    "DecodeError",
    "DeviceCommunicator",
    "DisagreementError",
    "ExternalWriter",
    "GraphCaptureContext",
    "GroupBrokenError",
    "GroupCoordinator",
    "Handle",
    "InternalError",
    "NativeError",
    "NcclError",
    "ParallelGroups",
    "ParallelLayout",
    "PeerLostError",
    "ReduceOperation",
    "SettingsError",
    "UsageError",
    "cleanup_dist_env_and_memory",
    "current_groups",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "ensure_model_parallel_initialized",
    "get_dp_group",
    "get_ep_group",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "graph_capture",
    "init_distributed_environment",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "register_communicator",
    "register_type",
]
