"""Validates where another rank says that its registered memory is, before reads of it are prepared."""

from __future__ import annotations

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.validation import MAX_DIMS
from sglang_reshard.routes.nixl.remote_shards import MEMORY_KINDS, RemoteShard, RemoteShards

MAX_GPUS = 1 << 16
MAX_ADDRESS = 1 << 62  # so that an address and what it is an address of are 64-bit numbers together
_MAX_STRIDE = 1 << 44  # elements


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
