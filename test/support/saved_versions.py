"""Toy engine ranks that compare their live weights, after each update, with a stock load of what the trainer saved."""

from __future__ import annotations

from typing import Any

import torch

from support.toy import ToyRank
from support.toy_serving import answered, receiver_of


def serve(rank: int, size: int, requests: Any, *_: Any) -> list[list[str]]:
    """Returns the names of the parameters that differ, by update.

    The version of an update is the file in which the trainer has saved the whole tensors.
    """
    model = ToyRank(rank, size, torch.bfloat16)
    updates = answered(receiver_of(model), requests)
    return [model.differing(torch.load(request.weight_version)) for request in updates]
