"""Asks the driver's management library (NVML) for the NVLink domain of a GPU, as NCCL does.

GPUs of several hosts may be in one domain (GB200 NVL72). NCCL then connects them as GPUs of one host
(`ncclMnnvlCheck`).
"""

from __future__ import annotations

import ctypes
from functools import cache

_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


@cache  # a domain does not change while a process has the GPU
def nvlink_domain(uuid: str) -> str:
    """Returns a name of the domain, the same for all of its GPUs; empty for a GPU that is in none.

    uuid  of the GPU, with or without "GPU-"
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        device, found = ctypes.c_void_p(), _FabricInfo()
        if nvml.nvmlInit_v2() != 0:
            return ""
        if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) != 0:
            return ""
        if nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(found)) != 0:
            return ""
    except (OSError, AttributeError):  # no such library, or one that is too old
        return ""
    return domain_name(bytes(found.cluster), found.clique, found.state)


def domain_name(cluster: bytes, clique: int, state: int) -> str:
    """Returns it for the values of NVML. Without a cluster a GPU is in no domain, as on a single host."""
    return f"{cluster.hex()}/{clique}" if state == _COMPLETED and any(cluster) else ""
