"""What engine ranks of the toy model do in `run_world`: they answer updates, and say which version they have then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from support.toy import DRIFTING, ToyRank, checkpoint

CPU = torch.device("cpu")
VERSIONS = (*range(10), *range(DRIFTING, DRIFTING + 5))


def receiver_of(model: Any, *rank_and_size: int, **given: Any) -> WeightReceiver:
    """`rank_and_size`: where the model does not have them; `given`: as `TracedModel` takes it."""
    return WeightReceiver(TracedModel(model, **given), *(rank_and_size or (model.rank, model.size)), CPU)


def answered(receiver: WeightReceiver, requests: Any) -> Iterator[DistributedUpdateWeightsReq]:
    """Updates on each request, and yields it when it is answered."""
    for request in requests:
        requests.answer(receiver.update(request))
        yield request


def version_of(model: ToyRank, dtype: torch.dtype = torch.float32) -> int | None:
    """The version whose stock load leaves just these parameters; None if there is none."""
    return next((version for version in VERSIONS if not model.differing(checkpoint(version, dtype))), None)


def serve(rank: int, size: int, requests: Any, *_: Any) -> list[int | None]:
    """From version 0 on, the version after each update."""
    model = ToyRank(rank, size)
    model.load_weights(checkpoint(0).items())
    return [version_of(model) for _ in answered(receiver_of(model), requests)]


def serve_alone(_rank: int, _size: int, requests: Any, *_: Any) -> list[int | None]:
    """As `serve`, of engines that have one rank each."""
    return serve(0, 1, requests)
