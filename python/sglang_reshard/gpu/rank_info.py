"""Describes the GPU of a rank to the planner, which must know who shares one and who can reach whom."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# By these, two processes choose each for itself how they reach each other on one host (NCCL 2.28: transport.cc, p2p.cc,
# shm.cc). If they choose differently, both wait forever. NCCL_NVLS_ENABLE is not one of them: NCCL takes the least.
HOST_SETTINGS = (
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
)
# By these, each chooses whether an NVLink domain of several hosts is one host to it (mnnvl.cc, init.cc).
DOMAIN_SETTINGS = ("NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_MNNVL_UUID", "NCCL_MNNVL_CLIQUE_ID")
# By these, each limits the channels of a communicator, wherever the others are (connect.cc, `ncclTopoPostset`).
CHANNEL_SETTINGS = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")
NCCL_SETTINGS = tuple(dict.fromkeys((*HOST_SETTINGS, *DOMAIN_SETTINGS, *CHANNEL_SETTINGS)))

Text = Annotated[str, Meta(max_length=4096)]


class RankGpuInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The GPU of one rank, and the settings of its process. Equal to `RankGpuInfo()` for a rank without a GPU.

    uuid       of the GPU; indices differ between processes
    visible    UUIDs of the GPUs that the process sees, in the order of its indices
    allocator  kind of memory that torch allocates: "native", "expandable_segments" or "cudaMallocAsync"
    nccl       NCCL's version, and the NCCL_SETTINGS that are set: name -> value
    fabric     names the NVLink domain of several hosts that the GPU is in; empty for none
    """

    uuid: Text = ""
    visible: Annotated[tuple[Text, ...], Meta(max_length=1024)] = ()
    allocator: Text = ""
    nccl: Annotated[dict[Text, Text], Meta(max_length=1024)] = {}
    fabric: Text = ""
