"""Publishes where trainer ranks have registered their shards, for the engine ranks that read them by NIXL."""

from __future__ import annotations

from sglang_reshard.protocol.session import Session, of_engine
from sglang_reshard.routes.nixl.remote_shards import RemoteShards, check_remote_shards


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
