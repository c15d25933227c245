"""The result of a plan as data: bytes and seconds of every rank."""

from __future__ import annotations

import msgspec

from sglang_reshard.cli.plan.request import PlanRequest
from sglang_reshard.cli.plan.sizing import Sizing


class EngineRank(msgspec.Struct, frozen=True):
    """Bytes received by an engine rank, the least it must receive, bytes of its buffers, messages received."""

    rank: int
    host: str
    received_bytes: int
    least_bytes: int
    extra_bytes: int
    messages: int


class TrainerRank(msgspec.Struct, frozen=True):
    """Bytes held by a trainer rank, bytes sent or read from it, bytes of its buffers, messages sent."""

    rank: int
    host: str
    shard_bytes: int
    sent_bytes: int
    extra_bytes: int
    messages: int


class Gather(msgspec.Struct, frozen=True):
    """The same update by SGLang's own path: `full_tensor()` on every trainer rank, the full model to every engine rank.

    trainer_received_bytes  bytes that a trainer rank receives in the all-gathers, maximum over ranks
    engine_received_bytes   bytes of the whole model
    extra_bytes             bytes of the largest full tensor, held by every rank of both sides
    """

    trainer_received_bytes: int
    engine_received_bytes: int
    extra_bytes: int


class Way(msgspec.Struct, frozen=True):
    """A transport by name: the seconds that the cost model predicts, or the error that it would be refused with."""

    name: str
    seconds: float | None = None
    refused: str = ""


class Communicator(msgspec.Struct, frozen=True):
    """The numbers of ranks in one NCCL communicator between trainer and engine ranks."""

    trainer_ranks: int
    engine_ranks: int


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `sglang-reshard plan`.

    tensors, model_bytes  of the checkpoint, in the trainer's dtypes
    layout_pieces         number of shards of all tensors, replicas counted once
    link_bytes            [trainer rank][engine rank]: bytes sent, or read from memory
    predicted_seconds     predicted seconds of the transfer alone
    ways                  the transports that can be requested by name
    messages              total over all engine ranks
    communicators         of NCCL, between trainer ranks and engine ranks; no GPU is twice in one
    sizing                shared memory, descriptors, mappings and the copies that options keep, of every rank
    refused               error messages if the update would be refused; there are no figures then
    remark                the message that the trainer would receive
    seconds_by_step       seconds that making this forecast took, by step
    """

    question: PlanRequest
    tensors: int
    model_bytes: int
    layout_pieces: int
    refused: tuple[str, ...] = ()
    transport: str = ""
    transport_reason: str = ""
    predicted_seconds: float = 0.0
    ways: tuple[Way, ...] = ()
    engine_ranks: tuple[EngineRank, ...] = ()
    trainer_ranks: tuple[TrainerRank, ...] = ()
    link_bytes: tuple[tuple[int, ...], ...] = ()
    gather: Gather | None = None
    sizing: Sizing | None = None
    messages: int = 0
    communicators: tuple[Communicator, ...] = ()
    remark: str = ""
    seconds_by_step: dict[str, float] = {}
