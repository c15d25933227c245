"""A layout's tensors by kind, and all their pieces under one numbering.

Models repeat themselves: tens of thousands of tensors have a few dozen shapes and placements between
them. What is computed once a kind is not computed once a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_reshard.layout.shard_map import Shard, ShardMap
from sglang_reshard.layout.source_layout import SourceLayout


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors of one shape (elements) and dtype, held alike."""

    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    holdings: ShardMap


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """Tensor `i` is of `kinds[kind_of[i]]`; its pieces are numbered from `first[i]` to `first[i + 1]`."""

    layout: SourceLayout
    kinds: tuple[TensorClass, ...]
    kind_of: np.ndarray
    first: np.ndarray
    index_of: dict[str, int]

    @classmethod
    def of(cls, layout: SourceLayout) -> TensorIndex:
        numbers: dict[tuple[object, ...], int] = {}
        kinds: list[TensorClass] = []
        kind_of = np.empty(len(layout.tensors), np.int32)
        for i, tensor in enumerate(layout.tensors):
            key = tensor.shape, tensor.dtype, tensor.mesh, tensor.placements
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(kinds)
                kinds.append(TensorClass(tensor.shape, tensor.dtype, tensor.spec.item_bytes, layout.holdings(tensor)))
            kind_of[i] = number
        pieces = np.array([len(kind.holdings.pieces) for kind in kinds], np.int64)
        first = np.concatenate([[0], np.cumsum(pieces[kind_of])])
        return cls(layout, tuple(kinds), kind_of, first, {t.name: i for i, t in enumerate(layout.tensors)})

    @property
    def pieces(self) -> int:
        """How many there are."""
        return int(self.first[-1])

    @property
    def nbytes(self) -> int:
        """Of all tensors, each once, as the trainer has them."""
        each = np.array([math.prod(kind.shape) * kind.item_bytes for kind in self.kinds], np.int64)
        return int(each[self.kind_of].sum())

    def kind(self, tensor: int) -> TensorClass:
        return self.kinds[self.kind_of[tensor]]

    def tensor_of(self, pieces: np.ndarray | int) -> np.ndarray:
        """The tensors that pieces belong to."""
        return np.searchsorted(self.first, pieces, side="right") - 1

    def piece(self, number: int) -> Shard:
        tensor = int(self.tensor_of(number))
        return self.kind(tensor).holdings.pieces[number - int(self.first[tensor])]

    def item_bytes(self, piece: int) -> int:
        return self.kind(int(self.tensor_of(piece))).item_bytes

    def per_piece(self, of_kind: Sequence[Sequence[int]]) -> np.ndarray:
        """A value for each piece, from the values of each kind's pieces: `of_kind[kind][piece of the kind]`."""
        lengths = np.array([len(values) for values in of_kind], np.int64)
        flat = np.array([value for values in of_kind for value in values], np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])[self.kind_of]
        tensor = np.repeat(np.arange(len(self.kind_of)), lengths[self.kind_of])
        within = np.arange(self.pieces) - self.first[tensor]
        return flat[starts[tensor] + within]
