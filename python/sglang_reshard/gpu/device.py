"""What a rank announces of the GPU that it uses, so that the planner knows who shares one and who can reach whom."""

from __future__ import annotations

import msgspec


class RankDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The GPU of one rank, and what its process has set for it. Equal to `RankDevice()` for a rank without a GPU.

    uuid       of the GPU; indices differ between processes
    visible    UUIDs of the GPUs that the process sees, in the order of its indices
    allocator  kind of memory that torch allocates: "native", "expandable_segments" or "cudaMallocAsync"
    nccl       NCCL's version, and the NCCL settings on which all members of a communicator must agree: name -> value
    """

    uuid: str = ""
    visible: tuple[str, ...] = ()
    allocator: str = ""
    nccl: dict[str, str] = {}
