"""Defines how trainer ranks describe the deltas that an engine may have instead of all weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, decode
from sglang_reshard.routes.nixl.remote_shards import Address, Gpu, Kind
from sglang_reshard.routes.p2p.ask import RoundBytes

PART = 2  # what is sent may be this part of the bytes of all messages: else everything is sent


class DeltaOffer(msgspec.Struct, frozen=True, array_like=True):
    """Describes the changes that one trainer rank offers one engine rank instead of all weights.

    base                checksum of the weights that the engine rank must have
    nbytes              that are sent: of the section, or of all messages if they are sent as they are
    messages            bytes of all messages
    whole               they are sent as they are: too much has changed
    kind, gpu, address  where it is, for engine ranks that read it by NIXL
    """

    base: Annotated[int, Meta(ge=0)]
    nbytes: RoundBytes
    messages: RoundBytes = 0
    whole: bool = False
    kind: Kind = ""
    gpu: Gpu = 0
    address: Address = 0


Sections = Mapping[int, DeltaOffer]  # by trainer rank


def offered_sections(request: DistributedUpdateWeightsReq) -> dict[int, Sections]:
    """Returns engine rank -> the trainer ranks' offers to it. Raises Mismatch for an invalid one."""
    found: dict[int, dict[int, DeltaOffer]] = {}
    try:
        for trainer_rank, of_ranks in enumerate(request.offers):
            for engine_rank, offer in of_ranks.items():
                found.setdefault(engine_rank, {})[trainer_rank] = decode(offer, DeltaOffer)
    except Mismatch as error:
        of = f"the delta of trainer rank {trainer_rank} for engine rank {engine_rank}"
        raise Mismatch(f"{of} is invalid: {error}") from error
    return dict(found)


def moves_less(offered: Mapping[int, Sections]) -> bool:
    """Returns whether what is offered to all engine ranks is little enough to be taken instead of all weights."""
    sections = [section for of_trainer_ranks in offered.values() for section in of_trainer_ranks.values()]
    return sum(section.nbytes for section in sections) <= sum(section.messages for section in sections) / PART
