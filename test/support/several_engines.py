"""Several engines in one world: its engine ranks belong to one engine after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.control import Address
from sglang_reshard.protocol.session import Session
from sglang_reshard.trainer.collectives import broadcast_message
from support.world import Send, Trainer, to_all


def name_of(engine: int) -> str:
    return f"replica {engine}"


def sends_of(trainer: Trainer, sizes: Sequence[int]) -> dict[str, Send | None]:
    """Engines of so many ranks each, as `set_engines` takes them."""
    ends = list(itertools.accumulate(sizes))
    parts = (trainer.send_one[end - size : end] for size, end in zip(sizes, ends, strict=True))
    return {name_of(number): to_all(sends) for number, sends in enumerate(parts)}


def place(rank: int, sizes: Sequence[int]) -> tuple[int, int]:
    """(engine, rank within it) of a process."""
    for engine, size in enumerate(sizes):
        if rank < size:
            return engine, rank
        rank -= size
    raise AssertionError


def several_engines_sender(trainer: Trainer, **options: Any) -> tuple[MultiEngineSender, Session | None]:
    """The sender, and on trainer rank 0 the host of its session, which has to be kept."""
    host = Session.host() if trainer.rank == 0 else None
    address = broadcast_message(host.address if host else None, Address, trainer.group)
    ranks = tuple(range(trainer.size))
    return MultiEngineSender(address, trainer_rank=trainer.rank, global_ranks=ranks, **options), host


def relaying_sender(trainer: Trainer, **options: Any) -> tuple[MultiEngineSender, Session | None]:
    return several_engines_sender(trainer, transport="nixl", timeout_s=30, relay=True, **options)
