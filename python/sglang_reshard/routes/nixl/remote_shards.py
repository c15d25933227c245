"""Describes memory that a trainer rank has registered for one-sided reads, to the engine ranks that read it."""

from __future__ import annotations

import msgspec

MEMORY_KINDS = HOST, GPU = "DRAM", "VRAM"  # as NIXL names them


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
