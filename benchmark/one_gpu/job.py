"""The cases, and what a trainer rank of one is told."""

from __future__ import annotations

import msgspec

from benchmark.models import Qwen3

# name -> (model, trainer ranks)
CASES: dict[str, tuple[Qwen3, int]] = {
    # Qwen3-1.7B
    "dense": (Qwen3(28, 2048, 6144, 16, 8, 128, 151936), 4),
    # Three layers of Qwen3-30B-A3B, with a smaller vocabulary
    "MoE": (Qwen3(3, 2048, 768, 32, 4, 128, 32768, experts=128, tied=False), 4),
}


class Job(msgspec.Struct, frozen=True):
    """folder: for the model's config, a checkpoint, digests, and the result, `seen.json`."""

    case: str
    model: Qwen3
    trainers: int
    device: str
    folder: str
