"""Whether an update left in the engine, bit for bit, what a stock load of the trainer's weights leaves there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmark.weights import FINAL_VERSION, Weights
from sglang_reshard.selftest import stock
from sglang_reshard.selftest.digests import Digests, read_live_digests
from sglang_reshard.selftest.trainer import whole as gather


def bit_exact(before: Digests, after: Digests, reference: Digests) -> bool:
    """After the last update all is as in the reference, and before it no engine rank was already there."""
    if not reference or not all(reference) or not len(before) == len(after) == len(reference):
        return False
    return after == reference and all(b != r for b, r in zip(before, reference, strict=True))


def live(engine: Any, folder: Path) -> Digests:
    """What is in the engine's memory now; [] on the trainer ranks that have no engine."""
    return read_live_digests(engine, folder) if engine is not None else []


def stock_load(weights: Weights, engine: Any, model_path: Path, folder: Path) -> Digests:
    """Load the final version by SGLang's own `update_weights_from_disk`; what is then live. Every trainer rank calls.

    Gathers the model on rank 0 to write a checkpoint.
    """
    weights.become(FINAL_VERSION)
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in weights.named():
        gathered = gather(tensor)
        if engine is not None:
            whole[name] = gathered.cpu().contiguous()
    found: Digests = []
    if engine is not None:
        save_file(whole, model_path / "model.safetensors", metadata={"format": "pt"})
        whole.clear()
        stock.load(engine, model_path)
        found = read_live_digests(engine, folder)
    dist.barrier()
    return found
