"""How long an update holds the trainer, in the background and not: `python -m benchmark.async_updates`.

Trainer ranks hold FSDP2's shards, processes stand in for engine ranks. Every shard changes before every update, outside
of the timed part; each figure is the slowest trainer rank's, and the first two are not counted.

copy    a copy of the rank's shards into other memory, in one call
stall   the call of `WeightSender.update_async`, in turns with the copy; the update before has ended
update  `WeightSender.update`, by another sender
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmark import matrices, pages
from benchmark.matrices import Matrices, MatrixParts
from benchmark.results import Row
from benchmark.world import digest, run_world, sender, slowest, updates

TRAINERS, ENGINES = 4, 4
WARMUPS, DEADLINE_S = 2, 400.0
MODELS, UPDATES = (matrices.DENSE, matrices.MOE), 15


def train(trainer: Any, model: Matrices, transport: str, count: int) -> Row:
    """The weights of each way's last update are compared."""
    state = matrices.sharded(model, TRAINERS)
    locals_ = [tensor.to_local() for _, tensor in state]
    others = list(torch.empty(model.tensors, *locals_[0].shape, dtype=torch.bfloat16))
    seconds: dict[str, list[float]] = {"copy": [], "stall": [], "update": []}
    digests: list[str] = []
    sending = sender(trainer, transport)
    for update in range(WARMUPS + count):
        _step(locals_, update, trainer.rank)
        seconds["copy"].append(slowest(lambda: torch._foreach_copy_(others, locals_))[1])
        handle, stalled = slowest(lambda: sending.update_async(state))
        seconds["stall"].append(stalled)
        digests.append(digest(locals_) if update == WARMUPS + count - 1 else "")
        _step(locals_, update + 500, trainer.rank)  # while it runs
        handle.wait(100)
    shadow_bytes = sending.background.shadow_bytes
    sending.close()
    sending = sender(trainer, transport)
    for update in range(WARMUPS + count):
        _step(locals_, update, trainer.rank)
        seconds["update"].append(slowest(lambda: sending.update(state))[1])
        digests.append(digest(locals_) if update == WARMUPS + count - 1 else "")
    sending.close()
    return {"seconds": seconds, "digests": digests, "shadow_bytes": shadow_bytes}


def _step(tensors: Sequence[torch.Tensor], update: int, trainer_rank: int) -> None:
    generator = torch.Generator().manual_seed(1000 * update + trainer_rank)
    for tensor in tensors:
        tensor.normal_(generator=generator)


def serve(rank: int, ranks: int, requests: Any, model: Matrices, _transport: str, count: int) -> list[str]:
    """The digests after the last update of each way: trainer and engine ranks have the same rows."""
    engine = MatrixParts(rank, ranks, model)
    return [
        digest(engine.weights) if number % (WARMUPS + count) == 0 else ""
        for number, _ in enumerate(updates(engine, rank, ranks, requests), 1)
    ]


def run(model: Matrices, transport: str, count: int = UPDATES) -> Row:
    """Seconds are medians; shadow_bytes a trainer rank's."""
    arguments = (model, transport, count)
    trainers, engines = run_world("benchmark.async_updates", TRAINERS, ENGINES, *arguments, deadline_s=DEADLINE_S)
    medians = {name: statistics.median(took[WARMUPS:]) for name, took in trainers[0]["seconds"].items()}
    return {
        "model": model.name,
        "transport": transport,
        "tensors": model.tensors,
        "bytes": model.nbytes,
        **{f"{name}_seconds": median for name, median in medians.items()},
        "shadow_bytes": trainers[0]["shadow_bytes"],
        "bit_exact": [trainer["digests"] for trainer in trainers] == engines,
    }


def main() -> int:
    rows = [run(model, transport) for model in MODELS for transport in ("ipc", "p2p")]
    pages.publish("async-updates", "make bench-async", rows)
    return 0 if all(row["bit_exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
