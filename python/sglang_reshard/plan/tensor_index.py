"""Groups a layout's tensors into classes and numbers their shards.

Tens of thousands of tensors have a few dozen shapes and placements between them. Values per class are computed once,
not per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_reshard.layout.shard_map import ShardBox, ShardMap
from sglang_reshard.layout.source_layout import SourceLayout


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors of the same shape (elements), dtype and sharding."""

    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    shard_map: ShardMap


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """The layout's tensors by number. Shards are numbered in the order of their tensors.

    classes      the distinct classes; tensor `i` is of `classes[class_of[i]]`
    first_shard  the shards of tensor `i` are numbered from `first_shard[i]` to `first_shard[i + 1]`
    index_of     tensor name -> tensor number
    nbytes       bytes of all tensors in the trainer's dtypes, replicas not counted
    """

    layout: SourceLayout
    classes: tuple[TensorClass, ...]
    class_of: np.ndarray
    first_shard: np.ndarray
    index_of: dict[str, int]
    nbytes: int

    @classmethod
    def of(cls, layout: SourceLayout) -> TensorIndex:
        numbers: dict[tuple[object, ...], int] = {}
        classes: list[TensorClass] = []
        class_of = np.empty(len(layout.tensors), np.int32)
        for i, tensor in enumerate(layout.tensors):
            key = tensor.shape, tensor.dtype, tensor.mesh, tensor.placements
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(classes)
                shard_map = layout.shard_map(tensor)
                classes.append(TensorClass(tensor.shape, tensor.dtype, tensor.spec.item_bytes, shard_map))
            class_of[i] = number
        shards = np.array([len(c.shard_map.shards) for c in classes], np.int64)
        first_shard = np.concatenate([[0], np.cumsum(shards[class_of])])
        index_of = {t.name: i for i, t in enumerate(layout.tensors)}
        nbytes = sum(t.spec.nbytes for t in layout.tensors)
        return cls(layout, tuple(classes), class_of, first_shard, index_of, nbytes)

    @property
    def num_shards(self) -> int:
        return int(self.first_shard[-1])

    def tensor_class(self, tensor: int) -> TensorClass:
        return self.classes[self.class_of[tensor]]

    def tensor_of(self, shards: np.ndarray | int) -> np.ndarray:
        """Returns the numbers of the tensors to which shards belong."""
        return np.searchsorted(self.first_shard, shards, side="right") - 1

    def shard(self, number: int) -> ShardBox:
        tensor = int(self.tensor_of(number))
        return self.tensor_class(tensor).shard_map.shards[number - int(self.first_shard[tensor])]

    def per_shard(self, per_class: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns a value per shard, given the values of each class's shards: `per_class[class][shard of a tensor]`."""
        lengths = np.array([len(values) for values in per_class], np.int64)
        flat = np.array([value for values in per_class for value in values], np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])[self.class_of]
        tensor = np.repeat(np.arange(len(self.class_of)), lengths[self.class_of])
        within = np.arange(self.num_shards) - self.first_shard[tensor]
        return flat[starts[tensor] + within]
