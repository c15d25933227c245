"""Describes memory that a rank has registered for one-sided reads, to the ranks that read it. Trainer ranks publish it.

Values out of range are refused as they are decoded. NIXL itself refuses memory that is not registered.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.session import Session, of_engine
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


def trainer_name(trainer_rank: int) -> str:
    """Returns a trainer rank's name for NIXL."""
    return f"trainer rank {trainer_rank}"


def put_remote_shards(session: Session, engine: int, trainer_rank: int, shards: RemoteShards) -> None:
    """Publishes where a trainer rank has registered its shards; replaces what it has published for this engine."""
    session.put(shards, _key(engine, trainer_rank), hashed=False)


def get_remote_shards(session: Session, engine: int, trainer_rank: int, tensors: int, timeout_s: float) -> RemoteShards:
    """Returns where a trainer rank has registered its shards of `tensors` tensors. Raises Mismatch if it is invalid."""
    name = f"the registered memory of {trainer_name(trainer_rank)}"
    found = session.get(_key(engine, trainer_rank), RemoteShards, name, timeout_s, hashed=False)
    check_remote_shards(found, tensors, trainer_name(trainer_rank))
    return found


def _key(engine: int, trainer_rank: int) -> str:
    return of_engine(engine, f"remote_shards/{trainer_rank}")
