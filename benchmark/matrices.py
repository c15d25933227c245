"""Models of matrices of one size, for benchmarks without SGLang, and an engine rank that has its part of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, slots=True)
class Matrices:
    """A model of `tensors` matrices in bfloat16, ten to a module."""

    name: str
    tensors: int
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        return 2 * self.tensors * self.rows * self.columns

    @property
    def names(self) -> list[str]:
        return [f"model.layers.{n // 10}.mlp.p{n}.weight" for n in range(self.tensors)]


def sharded(model: Matrices, trainers: int, dim: int = 0) -> list[tuple[str, DTensor]]:
    """Returns a trainer rank's matrices by name, zeros, each sharded along `dim`."""
    mesh = init_device_mesh("cpu", (trainers,))
    shape = [model.rows, model.columns]
    shape[dim] //= trainers
    shards = [torch.zeros(shape, dtype=torch.bfloat16) for _ in model.names]
    tensors = [DTensor.from_local(shard, mesh, [Shard(dim)], run_check=False) for shard in shards]
    return list(zip(model.names, tensors, strict=True))


DENSE, MOE = Matrices("dense", 310, 1024, 512), Matrices("MoE", 4800, 64, 128)


def value(number: int, version: int) -> float:
    """Returns the value of all elements of a matrix in a version, which bfloat16 can represent."""
    return float((number + 7 * version) % 128)


class MatrixParts(torch.nn.Module):
    """One engine rank's part of each matrix: its rows, or what it has along each of `dims` in turn."""

    def __init__(self, rank: int, ranks: int, model: Matrices, dims: Sequence[int] = (0,)) -> None:
        super().__init__()
        self._numbers = {name: number for number, name in enumerate(model.names)}
        self._rank, self._ranks, self._dims = rank, ranks, dims
        whole = torch.zeros(model.rows, model.columns, dtype=torch.bfloat16)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(self.part_of(whole, number).clone(), requires_grad=False)
            for number in range(model.tensors)
        )

    def part_of(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        return whole.chunk(self._ranks, self._dims[number % len(self._dims)])[self._rank]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            number = self._numbers[name]
            self.weights[number].data.copy_(self.part_of(tensor, number))
