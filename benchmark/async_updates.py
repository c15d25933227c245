"""How long an update holds the trainer, in the background and not: `python -m benchmark.async_updates`.

Trainer ranks hold FSDP2's shards, processes stand in for engine ranks. Every shard changes before every update, outside
of the timed part; each figure is the slowest trainer rank's, and the first two are not counted.

copy    a copy of the rank's shards into other memory, in one call
stall   the call of `WeightSender.update_async`, in turns with the copy; the update before has ended
update  `WeightSender.update`, by another sender
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

from benchmark import matrices, pages, results
from benchmark.matrices import Matrices, MatrixRows
from benchmark.slowest import slowest
from benchmark.world import run_world

TRAINERS, ENGINES = 4, 4
WARMUPS, DEADLINE_S = 2, 400.0
RESULT = results.FOLDER / "async-updates.json"


MODELS, UPDATES = (matrices.DENSE, matrices.MOE), 15


class Row(msgspec.Struct, frozen=True):
    """One model and transport. seconds: medians; shadow_bytes: a trainer rank's"""

    model: str
    transport: str
    tensors: int
    bytes: int
    copy_seconds: float
    stall_seconds: float
    update_seconds: float
    shadow_bytes: int
    bit_exact: bool


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def train(trainer: Any, model: Matrices, transport: str, updates: int) -> dict[str, Any]:
    """The weights of each way's last update are compared."""
    from sglang_reshard.api.weight_sender import WeightSender

    state = matrices.sharded(model, TRAINERS)
    locals_ = [tensor.to_local() for _, tensor in state]
    others = list(torch.empty(model.tensors, *locals_[0].shape, dtype=torch.bfloat16))
    seconds: dict[str, list[float]] = {"copy": [], "stall": [], "update": []}
    digests: list[str] = []
    sender = WeightSender.over(trainer.group, trainer.send, transport=transport, timeout_s=100)
    for update in range(WARMUPS + updates):
        _step(locals_, update, trainer.rank)
        seconds["copy"].append(slowest(lambda: torch._foreach_copy_(others, locals_))[1])
        handle, stalled = slowest(lambda: sender.update_async(state))
        seconds["stall"].append(stalled)
        digests.append(_digest(locals_) if update == WARMUPS + updates - 1 else "")
        _step(locals_, update + 500, trainer.rank)  # while it runs
        handle.wait(100)
    shadow_bytes = sender.background.shadow_bytes
    sender.close()
    sender = WeightSender.over(trainer.group, trainer.send, transport=transport, timeout_s=100)
    for update in range(WARMUPS + updates):
        _step(locals_, update, trainer.rank)
        seconds["update"].append(slowest(lambda: sender.update(state))[1])
        digests.append(_digest(locals_) if update == WARMUPS + updates - 1 else "")
    sender.close()
    return {"seconds": seconds, "digests": digests, "shadow_bytes": shadow_bytes}


def _step(tensors: Sequence[torch.Tensor], update: int, trainer_rank: int) -> None:
    generator = torch.Generator().manual_seed(1000 * update + trainer_rank)
    for tensor in tensors:
        tensor.normal_(generator=generator)


def serve(rank: int, ranks: int, requests: Any, model: Matrices, _transport: str, updates: int) -> list[str]:
    """The digests after the last update of each way: trainer and engine ranks have the same rows."""
    from sglang_reshard.engine.receiver import WeightReceiver
    from sglang_reshard.engine.targets import TracedModel

    engine = MatrixRows(rank, ranks, model)
    receiver = WeightReceiver(TracedModel(engine), rank, ranks, torch.device("cpu"))
    digests = []
    for number, request in enumerate(requests):
        requests.answer(receiver.update(request))
        digests.append(_digest(engine.weights) if (number + 1) % (WARMUPS + updates) == 0 else "")
    return digests


def run(model: Matrices, transport: str, updates: int = UPDATES) -> Row:
    from benchmark import async_updates

    trainers, engines = run_world(
        TRAINERS, ENGINES, async_updates.train, async_updates.serve, model, transport, updates, deadline_s=DEADLINE_S
    )
    median = {name: statistics.median(took[WARMUPS:]) for name, took in trainers[0]["seconds"].items()}
    return Row(
        model=model.name,
        transport=transport,
        tensors=model.tensors,
        bytes=model.nbytes,
        copy_seconds=median["copy"],
        stall_seconds=median["stall"],
        update_seconds=median["update"],
        shadow_bytes=trainers[0]["shadow_bytes"],
        bit_exact=[trainer["digests"] for trainer in trainers] == engines,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmark.async_updates", description=__doc__).parse_args(arguments)
    rows = [run(model, transport) for model in MODELS for transport in ("ipc", "p2p")]
    results.save(RESULT, results.header("make bench-async", []), rows)
    pages.write("async-updates")
    print(pages.TABLES["async-updates"].text())
    return 0 if all(row.bit_exact for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
