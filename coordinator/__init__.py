"""Parallel groups for LLM serving: one `GroupCoordinator` per parallel dimension.

from coordinator import ParallelGroups, ParallelLayout, init_distributed_environment

init_distributed_environment()                      # under torchrun
with ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2)) as groups:
    groups.tp.all_reduce(tensor)
"""

from coordinator.bootstrap.timings import CreationReport, StartUpReport
from coordinator.collectives.point_to_point import P2POperation
from coordinator.elastic.joining import join_distributed_environment
from coordinator.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    CommTimeoutError,
    CudaError,
    DecodeError,
    DisagreementError,
    ExcludedError,
    GroupBrokenError,
    InternalError,
    NativeError,
    NcclError,
    PeerLostError,
    SettingsError,
    StaleGraphError,
    UsageError,
)
from coordinator.graph_capture import CapturedGraph, GraphCaptureContext
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups, current_groups
from coordinator.layout import ParallelLayout
from coordinator.parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_current_groups,
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
    maybe_get_current_groups,
    model_parallel_is_initialized,
)
from coordinator.queues.external_writer import ExternalWriter
from coordinator.settings import CoordinatorSettings
from coordinator.sharding import create_fsdp_groups, create_parallel_groups
from coordinator.stateless import create_stateless_group
from coordinator.torch_interop.profiling import profiling
from device_comm.all2all import DispatchForm, ExpertPlacement, RoutedTokens
from device_comm.async_calls import CallHandle
from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.derived_reductions import BitwiseOperation, PremulSum, Reduction, premul_sum
from device_comm.fused.rms_norm import rms_norm
from device_comm.handles import Handle
from device_comm.reduction import ReduceOperation
from device_comm.registry import register_communicator
from shm_broadcast.codec import CarriedError, register_package, register_type

__all__ = [
    "BitwiseOperation",
    "CallHandle",
    "CapabilityError",
    "CapturedGraph",
    "CarriedError",
    "ClosedError",
    "CommError",
    "CommTimeoutError",
    "CommunicatorContext",
    "CoordinatorSettings",
    "CreationReport",
    "CudaError",
    "DecodeError",
    "DeviceCommunicator",
    "DisagreementError",
    "DispatchForm",
    "ExcludedError",
    "ExpertPlacement",
    "ExternalWriter",
    "GraphCaptureContext",
    "GroupBrokenError",
    "GroupCoordinator",
    "Handle",
    "InternalError",
    "NativeError",
    "NcclError",
    "P2POperation",
    "ParallelGroups",
    "ParallelLayout",
    "PeerLostError",
    "PremulSum",
    "ReduceOperation",
    "Reduction",
    "RoutedTokens",
    "SettingsError",
    "StaleGraphError",
    "StartUpReport",
    "UsageError",
    "cleanup_dist_env_and_memory",
    "create_fsdp_groups",
    "create_parallel_groups",
    "create_stateless_group",
    "current_groups",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "ensure_model_parallel_initialized",
    "get_current_groups",
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
    "join_distributed_environment",
    "maybe_get_current_groups",
    "model_parallel_is_initialized",
    "premul_sum",
    "profiling",
    "register_communicator",
    "register_package",
    "register_type",
    "rms_norm",
]
