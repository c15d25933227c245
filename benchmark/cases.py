"""What is measured: from how many trainer ranks to how many engine ranks, with which model, how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from benchmark.models import Qwen3

STOCK = "stock"
# In the order in which they are run. The last one is the yardstick, and leaves the most behind.
PATHS: tuple[str, ...] = ("ipc", "p2p", "broadcast", "auto", STOCK)

_GIB = 1 << 30
# What a process takes before it holds any weights: imports, mostly. Measured as the fall of available memory.
_PROCESS_BYTES = int(0.75 * _GIB)
_SGLANG_BYTES = int(0.45 * _GIB)
_FIXED_BYTES = int(1.5 * _GIB)


@dataclass(frozen=True, slots=True)
class Case:
    """FSDP2 over `trainers` ranks, into an engine of `engine_tp` ranks."""

    kind: str
    model: Qwen3
    trainers: int
    engine_tp: int

    @property
    def name(self) -> str:
        return f"{self.kind}, FSDP {self.trainers} -> TP {self.engine_tp}"

    def on(self, gpus: int) -> Case:
        """Where there are GPUs, each engine rank needs one of its own; trainer ranks may share."""
        return replace(self, engine_tp=min(self.engine_tp, gpus)) if gpus else self

    @property
    def needed_bytes(self) -> int:
        """Host memory that the case takes at its peak, without stock's path."""
        return (
            _FIXED_BYTES
            + (self.trainers + self.engine_tp) * _PROCESS_BYTES
            + 5 * self.model.bytes  # shards, live parameters, the reference, buffers
        )

    @property
    def stock_bytes(self) -> int:
        """What stock's path takes beyond that: SGLang itself and the whole model on every trainer rank."""
        return self.trainers * (_SGLANG_BYTES + self.model.bytes)


class Effort(msgspec.Struct, frozen=True):
    """How often each path updates: untimed first, then timed."""

    warmups: int = 2
    updates: int = 10
    stock_warmups: int = 2
    stock_updates: int = 10

    def of(self, path: str) -> tuple[int, int]:
        return (self.stock_warmups, self.stock_updates) if path == STOCK else (self.warmups, self.updates)


# An update by stock takes half a minute where there are thousands of tensors.
QUICK_EFFORT = Effort(stock_warmups=1, stock_updates=2)

DENSE = Qwen3(28, 1024, 3072, 16, 8, 128, 151936)
# Each rank's part of an expert is as wide as SGLang wants it on a CPU, so that none is padded.
MOE = Qwen3(24, 64, 128, 4, 4, 32, 7168, experts=64, tied=False)
# With sixteen processes on a side, each holding it whole under stock, the model has to be small.
SMALL_DENSE = Qwen3(12, 512, 1536, 16, 16, 64, 32768)

QUICK_CASES = (
    Case("dense", DENSE, 4, 4),
    Case("MoE", MOE, 4, 4),
)
CASES = (
    *QUICK_CASES,
    Case("small dense", SMALL_DENSE, 4, 16),
    Case("small dense", SMALL_DENSE, 16, 4),
)
