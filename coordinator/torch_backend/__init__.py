"""The backend `group_coordinator` of `torch.distributed`: importing this module registers it.

    import coordinator.torch_backend
    torch.distributed.init_process_group("group_coordinator")

Every function of `torch.distributed` for CPU tensors then uses shared memory on one host, and Gloo between hosts; so do
DDP, FSDP2, DTensor and pipelining, which call these functions. `"cpu:group_coordinator,cuda:nccl"` adds NCCL for CUDA
tensors. `new_group`, `DeviceMesh` and other ways to make groups use the backend of the default group, as with any
backend. `DESIGN.md` of `coordinator` says how its groups are made, and how they end.

The errors are those of `coordinator.errors`, each of which is a `torch.distributed.DistBackendError` here, too. After a
deadline has passed or a rank has died, the group is unusable.
"""

from coordinator.torch_backend import monitored_barrier
from coordinator.torch_backend.creation import BACKEND, register

__all__ = ["BACKEND"]

register()
monitored_barrier.offer(BACKEND)
