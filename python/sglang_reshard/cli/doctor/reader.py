"""Maps exported memory as an engine rank does, and reports whether the bytes are right; run by the doctor.

python -m sglang_reshard.cli.doctor.reader < handles
"""

from __future__ import annotations

import sys

import torch

from sglang_reshard.layout.regions import LocalRegion
from sglang_reshard.memory.gpu_memory import GpuAllocation
from sglang_reshard.memory.mapping import Handles
from sglang_reshard.memory.peer_memory import PeerMemory
from sglang_reshard.protocol.messages import decode

ELEMENTS = 1024


def pattern() -> torch.Tensor:
    """Returns the contents of each exported shard, [1024] in float32."""
    return torch.arange(ELEMENTS, dtype=torch.float32)


def main() -> None:
    handles = decode(sys.stdin.buffer.read(), Handles)
    on_gpu = any(isinstance(handle, GpuAllocation) for handle in handles.storages)
    memory = PeerMemory(0, handles, torch.device("cuda" if on_gpu else "cpu", 0))
    whole = LocalRegion.whole((ELEMENTS,))
    shards = [memory.region(i, whole, torch.float32) for i in range(len(handles.shards))]
    print("same" if all(torch.equal(shard.cpu(), pattern()) for shard in shards) else "other bytes")


if __name__ == "__main__":
    main()
