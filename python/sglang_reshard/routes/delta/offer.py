"""Defines what an engine asks of trainer ranks that may send it deltas, and how they describe what it may have."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.messages import MAX_BUCKET_BYTES, DistributedUpdateWeightsReq, decode
from sglang_reshard.routes.nixl.remote_shards import MEMORY_KINDS
from sglang_reshard.routes.p2p.ask import Links

_MAX_CHECKSUM = (1 << 64) - 1
_MAX_ADDRESS = (1 << 62) - 1  # fits into 64 bits after an addition
_MAX_GPUS = 1 << 10  # of one host
PART = 2  # what is sent may be this part of the bytes of all messages: else everything is sent


class DeltaAsk(msgspec.Struct, frozen=True):
    """Asks trainer ranks to keep the weights they have sent, on top of another route.

    links  of the kept weights
    inner  name of the other route
    asked  the request of that route
    """

    links: Links
    inner: str
    asked: msgspec.Raw


class DeltaOffer(msgspec.Struct, frozen=True, array_like=True):
    """Describes the changes that one trainer rank offers one engine rank instead of all weights.

    base                checksum of the weights that the engine rank must have
    nbytes              that are sent: of the section, or of all messages if they are sent as they are
    messages            bytes of all messages
    whole               they are sent as they are: too much has changed
    kind, gpu, address  where it is, for engine ranks that read it by NIXL
    """

    base: int
    nbytes: int
    messages: int = 0
    whole: bool = False
    kind: str = ""
    gpu: int = 0
    address: int = 0

    @classmethod
    def of(cls, offer: bytes, trainer_rank: int, engine_rank: int) -> DeltaOffer:
        """Returns the offer of a trainer rank. Raises Mismatch for an invalid one."""
        section = decode(offer, cls)
        if not (
            0 <= section.nbytes <= MAX_BUCKET_BYTES
            and 0 <= section.messages <= MAX_BUCKET_BYTES
            and 0 <= section.base <= _MAX_CHECKSUM
            and 0 <= section.gpu < _MAX_GPUS
            and 0 <= section.address <= _MAX_ADDRESS
            and section.kind in ("", *MEMORY_KINDS)
        ):
            raise Mismatch(
                f"invalid update request: the delta of trainer rank {trainer_rank} for engine rank {engine_rank} is "
                "out of range. Send it with sglang_reshard.WeightSender"
            )
        return section


Sections = Mapping[int, DeltaOffer]  # by trainer rank


def offered_sections(request: DistributedUpdateWeightsReq) -> dict[int, Sections]:
    """Returns engine rank -> the trainer ranks' offers to it. Raises Mismatch for an invalid one."""
    found: dict[int, dict[int, DeltaOffer]] = {}
    for trainer_rank, of_ranks in enumerate(request.offers):
        for engine_rank, offer in of_ranks.items():
            found.setdefault(engine_rank, {})[trainer_rank] = DeltaOffer.of(offer, trainer_rank, engine_rank)
    return dict(found)


def moves_less(offered: Mapping[int, Sections]) -> bool:
    """Returns whether what is offered to all engine ranks is little enough to be taken instead of all weights."""
    sections = [section for of_trainer_ranks in offered.values() for section in of_trainer_ranks.values()]
    return sum(section.nbytes for section in sections) <= sum(section.messages for section in sections) / PART
