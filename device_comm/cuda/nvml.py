"""Ask NVML, the management library of NVIDIA's driver, for what CUDA does not tell.

Of cuda-bindings, the versions 12.9.10 and 13.4.4 have NVML; 12.9.0, 13.0.1 and 13.1.0 do not.
"""

from __future__ import annotations

from typing import Any

from shm_broadcast.errors import CapabilityError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["links_of"]


def links_of(nvml: Any, uuid: str) -> dict[str, tuple[bool, bool]]:
    """Return, by UUID, whether a device can access each other device of the host, and whether that is over NVLink.

    NVML also shows the devices that CUDA_VISIBLE_DEVICES hides from this process, as in engines that give each worker
    one device. In a container it shows those of the container.

    Args:
        nvml: The bindings, `cuda.bindings.nvml`.
        uuid: The device, as `Driver.uuid` returns it.

    Raises:
        CapabilityError: NVML is missing, its bindings are others than we know, or it does not know the device, as for
            a MIG instance.
    """
    # Looked up beforehand: an error of this lookup in the `except` clause would replace the original one.
    own_error = getattr(nvml, "NvmlError", RuntimeError)
    try:
        nvml.init_v2()
        try:
            own = nvml.device_get_handle_by_uuid(f"GPU-{uuid}")
            caps = nvml.GpuP2PCapsIndex
            found = {}
            for index in range(nvml.device_get_count_v2()):
                other = nvml.device_get_handle_by_index_v2(index)
                name = nvml.device_get_uuid(other).lower().removeprefix("gpu-")
                if name == uuid:
                    continue
                read, write, nvlink = (
                    nvml.device_get_p2p_status(own, other, kind) == nvml.GpuP2PStatus.P2P_STATUS_OK
                    for kind in (
                        caps.P2P_CAPS_INDEX_READ,
                        caps.P2P_CAPS_INDEX_WRITE,
                        caps.P2P_CAPS_INDEX_NVLINK,
                    )
                )
                found[name] = (read and write, nvlink)
            return found
        finally:
            nvml.shutdown()
    except (own_error, RuntimeError, OSError, AttributeError) as error:
        if raised_by_handler(error):
            raise
        raise CapabilityError(
            f"NVML does not tell the links of device {uuid}: {type(error).__name__}: {error}",
            requirement="NVML",
        ) from error
