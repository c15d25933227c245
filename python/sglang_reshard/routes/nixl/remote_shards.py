"""Describes memory that a rank has registered for one-sided reads, to the ranks that read it.

Values out of range are refused as they are decoded. NIXL itself refuses memory that is not registered.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.validation import MAX_DIMS

HOST, GPU = "DRAM", "VRAM"  # as NIXL names kinds of memory
Kind = Annotated[str, Meta(pattern=r"^(DRAM|VRAM)?\Z")]
Gpu = Annotated[int, Meta(ge=0, lt=1 << 16)]
# So that an address and what it is an address of are 64-bit numbers together.
Address = Annotated[int, Meta(ge=0, le=1 << 62)]
_Stride = Annotated[int, Meta(ge=0, le=1 << 44)]  # elements


class RemoteShard(msgspec.Struct, frozen=True, array_like=True):
    """A shard in a trainer rank's registered memory: kind of memory, GPU, address, and strides in elements.

    One that is empty may be nowhere.
    """

    kind: Kind
    gpu: Gpu
    address: Address
    strides: Annotated[tuple[_Stride, ...], Meta(max_length=MAX_DIMS)]


class RemoteShards(msgspec.Struct, frozen=True):
    """Tells an engine rank how to read a trainer rank's shards, in the layout's order.

    metadata  of the trainer rank's NIXL agent, with the keys of the memory that it has registered
    """

    metadata: bytes
    shards: tuple[RemoteShard, ...]


def check_remote_shards(remote: RemoteShards, count: int, who: str) -> None:
    """Raises Mismatch, naming the rank, unless it describes `count` shards."""
    if len(remote.shards) != count:
        raise Mismatch(f"{who} describes {len(remote.shards)} shards in registered memory, expected {count}")
