"""An engine rank that is sent all it lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from sglang_reshard.landings.base import Landing
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.p2p.engine import P2pEngineEnd
from sglang_reshard.routes.p2p.links import IN_PLACE_BYTES
from sglang_reshard.routes.strategy import Strategy
from sglang_reshard.routes.wire.communicator import Communicator
from sglang_reshard.trace.program import Program

CPU = torch.device("cpu")


def reads_of(rank: int, index: Any, plan: Any, targets: Any) -> Reads:
    landing = Landing(Program(tuple(plan.copies), targets)).converting(CPU, 1 << 20)
    return Reads(rank, CPU, index, plan, landing, {})


def receiving(
    reads: Reads, strategy: Strategy, communicators: Any, in_place_bytes: int = IN_PLACE_BYTES
) -> P2pEngineEnd:
    """An engine rank's end of p2p, which these communicators bring messages to."""
    side: Any = SimpleNamespace(reads=reads, read_plans=[], engine_rank=reads.engine_rank)
    end = P2pEngineEnd(side, strategy)
    end.communicators = communicators
    with patch("sglang_reshard.routes.p2p.links.IN_PLACE_BYTES", in_place_bytes):
        end.prepare()
    return end


def connected(store: dist.Store, name: str, **options: Any) -> Communicator:
    communicator = Communicator(**options)
    communicator.connect(dist.PrefixStore(name, store))
    return communicator
