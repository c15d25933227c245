"""What the processes of a scaling point do: trainer ranks with real FSDP shards, engine ranks with a made-up loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmark.scaling import Point
from benchmark.world import sender, slowest, updates
from sglang_reshard.errors import ReshardError


@dataclass(frozen=True, slots=True)
class Transported:
    """Of one transport: seconds of every update, the slowest trainer rank's; and its report's seconds by phase."""

    transport: str
    seconds: list[float]
    phases: list[dict[str, float]]
    refused: str = ""


class Rank(torch.nn.Module):
    """One engine rank: tensors split by rows and by columns in turn, as column- and row-parallel layers are."""

    def __init__(self, rank: int, size: int, point: Point) -> None:
        super().__init__()
        self._rank, self._size = rank, size
        whole = point.shape
        for i in range(point.tensors):
            part = [n // size if dim == i % 2 else n for dim, n in enumerate(whole)]
            empty = torch.zeros(part, dtype=torch.bfloat16)
            self.register_parameter(f"t{i}", torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            parameter, dim = getattr(self, name), int(name[1:]) % 2
            part = parameter.shape[dim]
            parameter.data.copy_(loaded.narrow(dim, self._rank * part, part))


def train(trainer: Any, point: Point, transports: tuple[str, ...], count: int) -> list[Transported]:
    mesh = init_device_mesh("cpu", (trainer.size,))
    rows, columns = point.shape
    state = {
        f"t{i}": DTensor.from_local(
            torch.zeros(rows // trainer.size, columns, dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False
        )
        for i in range(point.tensors)
    }
    return [_updates(trainer, transport, state, count) for transport in transports]


def _updates(trainer: Any, transport: str, state: dict[str, DTensor], count: int) -> Transported:
    sending = sender(trainer, transport)
    seen = Transported(transport, [], [])
    try:
        for update in range(count):
            for i, tensor in enumerate(state.values()):
                tensor.to_local().fill_(value(update, i, trainer.rank))
            report, seconds = slowest(lambda: sending.update(state.items()))
            seen.seconds.append(seconds)
            seen.phases.append(report.seconds)
    except ReshardError as error:
        return Transported(transport, [], [], str(error))
    finally:
        sending.close()
    return seen


def value(update: int, tensor: int, trainer_rank: int) -> float:
    """What a trainer rank's shard is filled with. Small whole numbers are exact in bfloat16."""
    return float((7 * update + 3 * tensor + trainer_rank) % 251)


def serve(rank: int, size: int, requests: Any, point: Point, _transports: tuple[str, ...], count: int) -> set[str]:
    """The transports after whose last update this rank had what it should have."""
    model, right = Rank(rank, size, point), set()
    for request in updates(model, rank, size, requests):
        if request.update == count and _is_right(model, point, count - 1, len(request.handles)):
            right.add(request.transport)
    return right


def _is_right(model: Rank, point: Point, update: int, trainers: int) -> bool:
    rows, columns = point.shape
    held = rows // trainers
    with torch.no_grad():
        for i in range(point.tensors):
            whole = torch.empty(rows, columns, dtype=torch.bfloat16)
            for trainer_rank in range(trainers):
                whole.narrow(0, trainer_rank * held, held).fill_(value(update, i, trainer_rank))
            parameter, dim = getattr(model, f"t{i}"), i % 2
            part = parameter.shape[dim]
            if not torch.equal(parameter, whole.narrow(dim, model._rank * part, part)):
                return False
    return True
