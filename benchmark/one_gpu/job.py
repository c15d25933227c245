"""The cases, and what a trainer rank of one is told."""

from __future__ import annotations

import msgspec

from benchmark.models import Qwen3


class Job(msgspec.Struct, frozen=True):
    """A case: FSDP2 over `trainers` ranks, into an engine of one rank on the same GPU.

    device  "cuda", or "cpu" in a rehearsal
    folder  for the model's config, a checkpoint, digests, and the result, `seen.json`
    """

    case: str
    model: Qwen3
    trainers: int = 4
    device: str = ""
    folder: str = ""


CASES = (
    # Qwen3-1.7B
    Job("dense", Qwen3(28, 2048, 6144, 16, 8, 128, 151936)),
    # Three layers of Qwen3-30B-A3B, with a smaller vocabulary
    Job("MoE", Qwen3(3, 2048, 768, 32, 4, 128, 32768, experts=128, tied=False)),
)
TINY = (
    Job("dense", Qwen3(2, 64, 128, 4, 4, 16, 512)),
    Job("MoE", Qwen3(2, 64, 64, 4, 4, 16, 512, experts=4, tied=False)),
)
