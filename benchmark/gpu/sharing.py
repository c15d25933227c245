"""What processes of the battery do with memory: a producer exports shards, consumers map them."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmark.gpu.peer import Here
from benchmark.gpu.place import DEVICE, MIB, free_bytes, pattern, same_bytes
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.regions import LocalRegion
from sglang_reshard.memory.mapping import Handles, MemoryExporter
from sglang_reshard.memory.peer_memory import PeerMemory

PRODUCER = 0  # its trainer rank


def ready(here: Here) -> int:
    """Makes the process's context, with kernels loaded that the following ones use. Returns the GPU's free bytes."""
    probe = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    pattern(0, probe)
    same_bytes(probe, probe)
    del probe
    return free_bytes()


def publish(here: Here, sizes: Sequence[int], number: int = 0) -> Handles:
    """Allocates shards of `sizes` bytes, filled with pattern `number`, and exports them."""
    shards = []
    for size in sizes:
        shard = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        pattern(number, shard)
        shards.append(shard)
    here.kept["shards"] = shards
    return export(here)


def export(here: Here) -> Handles:
    exporter = here.kept.setdefault("exporter", MemoryExporter(PRODUCER))
    torch.cuda.synchronize(DEVICE)
    handles: Handles = exporter.export(here.kept["shards"])
    return handles


def refill(here: Here, number: int) -> None:
    for shard in here.kept["shards"]:
        pattern(number, shard)
    torch.cuda.synchronize(DEVICE)


def drop(here: Here) -> int:
    """Frees the shards, and returns their memory to the GPU. Returns the GPU's free bytes."""
    here.kept.pop("shards", None)
    gc.collect()
    return free_bytes()


def open_handles(here: Here, handles: Handles) -> float:
    """Maps what was exported. Returns the seconds that it takes."""
    begin = time.perf_counter()
    here.kept["memory"] = mapped(handles)
    return time.perf_counter() - begin


def mapped(handles: Handles, trainer_rank: int = PRODUCER) -> PeerMemory:
    return PeerMemory(trainer_rank, handles, DEVICE)


def bytes_of(memory: PeerMemory, tensor: int, size: int) -> torch.Tensor:
    """Returns a view of shard number `tensor`, of `size` bytes."""
    return memory.region(tensor, LocalRegion.whole((size,)), torch.uint8)


def reads(here: Here, sizes: Sequence[int], number: int) -> bool:
    """Returns whether the mapped shards have pattern `number`."""
    memory = here.kept["memory"]
    for tensor, size in enumerate(sizes):
        expected = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        pattern(number, expected)
        if not same_bytes(bytes_of(memory, tensor, size), expected):
            return False
    return True


def close(here: Here) -> int:
    """Unmaps. Returns the GPU's free bytes."""
    memory = here.kept.pop("memory", None)
    torch.cuda.synchronize(DEVICE)
    if memory is not None:
        memory.close()
    del memory
    gc.collect()
    return free_bytes()


def free(here: Here) -> int:
    return free_bytes()


def computes(here: Here) -> bool:
    """Returns whether this process can use its GPU."""
    x = torch.ones(here.place.scaled(MIB), device=DEVICE)
    return float((x + x).sum()) == 2 * x.numel()


def device_of(here: Here) -> dict[str, Any]:
    """What this process sees of its GPU."""
    return {"uuid": runtime().uuid(DEVICE), "visible": torch.cuda.device_count()}
