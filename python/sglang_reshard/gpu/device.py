"""Describes the GPU of a rank to the planner, which must know who shares one and who can reach whom."""

from __future__ import annotations

import msgspec

# By these, two processes choose each for itself how they reach each other on one host (NCCL 2.28: transport.cc, p2p.cc,
# shm.cc). If they choose differently, both wait forever. NCCL_NVLS_ENABLE is not one of them: NCCL takes the least.
NCCL_SETTINGS = ("NCCL_CUMEM_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")


class RankDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The GPU of one rank, and what its process has set for it. Equal to `RankDevice()` for a rank without a GPU.

    uuid       of the GPU; indices differ between processes
    visible    UUIDs of the GPUs that the process sees, in the order of its indices
    allocator  kind of memory that torch allocates: "native", "expandable_segments" or "cudaMallocAsync"
    nccl       NCCL's version, and the NCCL_SETTINGS that are set: name -> value
    """

    uuid: str = ""
    visible: tuple[str, ...] = ()
    allocator: str = ""
    nccl: dict[str, str] = {}
