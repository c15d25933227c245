"""The table of these tests: engines, layouts of the trainer, and routes.

`torchrun --nproc-per-node N` says how many trainer ranks there are, and the host how many GPUs. Where it has none, all
runs on its CPUs, and engines other than the first are left to `make test-all`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from benchmark.models import Qwen3
from support.nixl_env import needs_nixl, use_nixl
from support.sweep import SWEEP

TRAINERS = int(os.environ.get("WORLD_SIZE", "1"))
GPUS = torch.cuda.device_count()
DEVICE = "cuda" if GPUS else "cpu"
LARGEST = min(TRAINERS, GPUS or TRAINERS)

# Heads and experts for eight ranks. The vocabulary is a prime, so that the trainer's shards of it are uneven, and the
# engine pads it.
DENSE = Qwen3(layers=2, hidden=256, inner=512, heads=16, kv_heads=8, head_dim=64, vocabulary=1009, tied=False)
EXPERTS = replace(DENSE, inner=128, experts=16)


@dataclass(frozen=True)
class Engine:
    """An engine of SGLang's.

    first_gpu  the engine ranks use the GPUs from this one on: those of the trainer from 0, others from TRAINERS
    """

    name: str
    tp_size: int
    model: Qwen3 = DENSE
    server_args: dict[str, Any] = field(default_factory=dict)
    first_gpu: int = 0

    @property
    def shares_gpus(self) -> bool:
        return GPUS > 0 and self.first_gpu == 0

    @property
    def generates(self) -> bool:
        """SGLang's CPU kernels take experts of other ranks for an index out of range, and need a request everywhere."""
        return GPUS > 0 or self.model == DENSE

    @property
    def missing(self) -> str:
        """Why this host cannot run it; empty if it can."""
        needed = self.first_gpu + self.tp_size
        return f"this engine needs {needed} GPUs, and there are {GPUS}" if needed > max(GPUS, LARGEST) else ""


IN_EXPERTS = {"ep_size": LARGEST}
WITH_DP_ATTENTION = {**IN_EXPERTS, "dp_size": LARGEST, "enable_dp_attention": True}
ENGINES = [
    *(Engine(f"tp{size}", size) for size in (8, 4, 2, 1) if TRAINERS // 4 <= size <= LARGEST),
    Engine("experts", LARGEST, EXPERTS, IN_EXPERTS),
    Engine("dp-attention", LARGEST, EXPERTS, WITH_DP_ATTENTION),
    Engine("apart", LARGEST, first_gpu=TRAINERS),
]


@dataclass(frozen=True)
class Layout:
    """The trainer's mesh (replicas, fsdp, tp), whose sizes multiply to its ranks, and the dtype of its weights."""

    mesh: tuple[int, int, int]
    dtype: torch.dtype = torch.bfloat16


LAYOUTS = {
    "tp": Layout((1, 1, TRAINERS)),
    "tp-of-half": Layout((2, 1, TRAINERS // 2)),
    "fsdp": Layout((1, TRAINERS, 1), torch.float32),
    "hsdp": Layout((2, TRAINERS // 2, 1), torch.float32),
}
if TRAINERS > 2:
    LAYOUTS["fsdp-over-tp"] = Layout((1, TRAINERS // 2, 2))

# Options of a sender, by route.
ROUTES: dict[str, dict[str, Any]] = {
    "auto": {"transport": "auto"},
    "ipc": {"transport": "ipc"},
    "p2p": {"transport": "p2p"},
    "broadcast": {"transport": "broadcast"},
    "nixl": {"transport": "nixl"},
    "delta": {"transport": "p2p", "delta": "auto"},
}
SENDING = ("p2p", "delta")  # through a communicator of trainer and engine ranks, which NCCL refuses on shared GPUs


def engines(suits: Callable[[Engine], bool] = lambda engine: True) -> list[Any]:
    """Returns the engines as parameters of a test."""
    return [pytest.param(engine, id=engine.name, marks=_marks(engine)) for engine in ENGINES if suits(engine)]


def routes() -> list[Any]:
    if not needs_nixl.args[0]:
        use_nixl()
    no_nixl = importlib.util.find_spec("nixl._api") is None
    marks = {"nixl": [pytest.mark.skipif(no_nixl, reason=needs_nixl.kwargs["reason"])]}
    return [pytest.param(name, marks=marks.get(name, [])) for name in ROUTES]


def _marks(engine: Engine) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.skipif(bool(engine.missing), reason=engine.missing)]
    return marks if GPUS or SWEEP or engine.name == f"tp{LARGEST}" else [*marks, pytest.mark.sweep]
