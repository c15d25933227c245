"""A trainer's weights as DTensors of any layout: values that every rank computes for itself, sharded by torch."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmark.models import Shapes
from configurations import DEVICE, Layout

IN_COLUMNS = ("o_proj.weight", "down_proj.weight")  # over tensor parallel ranks; other matrices are in rows
VERSIONS = ("a", "b", "c")  # all of "a" and "b" differs; "c" is "b" but for an element in 64


def values(name: str, shape: tuple[int, ...], version: str) -> torch.Tensor:
    """Returns a version of a whole tensor."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {'a' if version == 'a' else 'b'}".encode()))
    drawn = torch.randn(shape, generator=generator)
    tensor = 1 + 0.1 * drawn if len(shape) == 1 else 0.05 * drawn
    if version == "c":
        tensor.view(-1)[::64].neg_()
    return tensor.bfloat16()  # exact in both dtypes of trainers


def save_checkpoint(shapes: Shapes, version: str, folder: Path) -> None:
    whole = {name: values(name, shape, version) for name, shape in shapes.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


class Trainer:
    """One rank's shards. Every trainer rank makes it and calls its methods in step."""

    def __init__(self, shapes: Shapes, layout: Layout) -> None:
        self._mesh = _mesh(layout.mesh)
        self.named = {
            name: self._sharded(name, torch.zeros(shape, dtype=layout.dtype)) for name, shape in shapes.items()
        }

    def become(self, version: str) -> None:
        """Writes a version into the shards, in place, as an optimizer does."""
        for name, tensor in self.named.items():
            shard = self._sharded(name, values(name, tuple(tensor.shape), version))
            tensor.to_local().copy_(shard.to_local())

    def _sharded(self, name: str, whole: torch.Tensor) -> DTensor:
        """Each rank cuts its shard out of its own copy. FSDP shards rows that tensor parallelism has left whole."""
        by_tp: Shard | Replicate = Shard(0)
        if whole.ndim == 1 or name.endswith("mlp.gate.weight"):
            by_tp = Replicate()
        elif name.endswith(IN_COLUMNS):
            by_tp = Shard(1)
        by_fsdp = Shard(0) if self._mesh.size(1) > 1 else Replicate()
        return distribute_tensor(whole.to(DEVICE), self._mesh, [Replicate(), by_fsdp, by_tp], src_data_rank=None)


@functools.cache
def _mesh(sizes: tuple[int, int, int]) -> DeviceMesh:
    return init_device_mesh(DEVICE, sizes, mesh_dim_names=("replica", "fsdp", "tp"))
