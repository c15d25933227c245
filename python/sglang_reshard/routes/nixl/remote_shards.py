"""Describes memory that a rank has registered for one-sided reads, to the ranks that read it.

These validate the description before they prepare reads.
"""

from __future__ import annotations

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.validation import MAX_DIMS

MEMORY_KINDS = HOST, GPU = "DRAM", "VRAM"  # as NIXL names them
MAX_GPUS = 1 << 16
MAX_ADDRESS = 1 << 62  # so that an address and what it is an address of are 64-bit numbers together
_MAX_STRIDE = 1 << 44  # elements


class RemoteShard(msgspec.Struct, frozen=True, array_like=True):
    """A shard in a trainer rank's registered memory: kind of memory, GPU, address, and strides in elements."""

    kind: str
    gpu: int
    address: int
    strides: tuple[int, ...]


class RemoteShards(msgspec.Struct, frozen=True):
    """Tells an engine rank how to read a trainer rank's shards, in the layout's order.

    metadata  of the trainer rank's NIXL agent, with the keys of the memory that it has registered
    """

    metadata: bytes
    shards: tuple[RemoteShard, ...]


def check_remote_shards(remote: RemoteShards, count: int, who: str) -> None:
    """Raises Mismatch, naming the rank, unless it describes `count` shards at addresses that can exist.

    That they are in registered memory is for NIXL to say. A shard that is empty may be nowhere.
    """
    if len(remote.shards) != count:
        raise Mismatch(f"{who} describes {len(remote.shards)} shards in registered memory, expected {count}")
    for number, shard in enumerate(remote.shards):
        if why := _invalid_reason(shard):
            raise Mismatch(
                f"{who} says that its shard number {number} {why}. Do both run the same version of sglang-reshard?"
            )


def _invalid_reason(shard: RemoteShard) -> str:
    if shard.kind not in ("", *MEMORY_KINDS) or not 0 <= shard.gpu < MAX_GPUS:
        return f"is in memory of kind {shard.kind[:40]!r} on GPU {shard.gpu}, which cannot exist"
    if not 0 <= shard.address <= MAX_ADDRESS:
        return f"is at address {shard.address:,}, which cannot exist"
    if len(shard.strides) > MAX_DIMS or any(not 0 <= stride <= _MAX_STRIDE for stride in shard.strides):
        return f"has strides {shard.strides[:MAX_DIMS]}, which cannot be read"
    return ""
