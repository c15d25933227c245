"""A trainer rank's weights: FSDP2 shards under checkpoint names, changed before every update."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmark.models import Shapes

# As versions go: any two differ in every element, and no version makes a NaN. Seven bits of mantissa.
FINAL_VERSION = 0x7F


def version_of(update: int, updates: int) -> int:
    """Of the update-th of so many; the last one ends at the version that all paths end at."""
    return FINAL_VERSION if update == updates - 1 else 1 + update % (FINAL_VERSION - 1)


class Weights:
    """One rank's part. All ranks make it together; bfloat16, normal, another seed on every rank."""

    def __init__(self, shapes: Shapes, mesh: DeviceMesh) -> None:
        self.module = _module(shapes)
        for layer in self.module.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.module.to_empty(device=mesh.device_type)
        generator = torch.Generator(mesh.device_type).manual_seed(mesh.get_local_rank())
        for shard in self._shards():
            shard.normal_(std=0.02, generator=generator)
        self._version = 0

    def named(self) -> list[tuple[str, DTensor]]:
        return [(name, p) for name, p in self.module.named_parameters() if isinstance(p, DTensor)]

    def become(self, version: int) -> None:
        """Every element anew, in place, as an optimizer does. The same version is the same bits, at any time."""
        for shard in self._shards():
            shard.view(torch.int16).bitwise_xor_(self._version ^ version)
        self._version = version

    def _shards(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [tensor.to_local() for _, tensor in self.named()]


def _module(shapes: Shapes) -> torch.nn.Module:
    """Modules as the dots in the names have them, on no device yet."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        empty = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        owner.register_parameter(leaf, torch.nn.Parameter(empty))
    return root
