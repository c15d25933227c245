"""Compiles a view of lazy storages to a function that computes its value from real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_reshard.trace.aten_ops import map_leaves
from sglang_reshard.trace.geometry import Geometry
from sglang_reshard.trace.lazy_storage import (
    CheckpointTensor,
    LazyStorage,
    LiveStorage,
    OpOutput,
    VersionedView,
    operands,
    unwritten_view,
)
from sglang_reshard.trace.live import flat_view

# Values of the storages that one run has computed so far, by storage and number of writes.
Values = dict[tuple[int, int], torch.Tensor]
Expression = Callable[[Values], torch.Tensor]


class Compiler:
    """Compiles views. `operand` returns the tensor that a view of a checkpoint tensor will be copied to."""

    def __init__(
        self,
        operand: Callable[[CheckpointTensor, Geometry, torch.dtype, torch.dtype], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._operand = operand
        self._device = device

    def compile(self, view: VersionedView) -> Expression:
        storage, geometry, dtype = view.storage, view.geometry, view.dtype
        base = storage.base
        if not view.writes:
            # The memory exists already: the view is made once, not at each update.
            if isinstance(base, CheckpointTensor):
                return _constant(self._operand(base, geometry, storage.dtype, dtype))
            if isinstance(base, LiveStorage):
                return _constant(_strided(flat_view(base.tensor, dtype), geometry))
        contents = self._contents(view)

        def value(values: Values) -> torch.Tensor:
            tensor = contents(values)
            if dtype != storage.dtype:
                tensor = flat_view(tensor, dtype)
            elif geometry == storage.layout:
                return tensor
            return _strided(tensor, geometry)

        return value

    def _contents(self, view: VersionedView) -> Expression:
        """Returns the whole storage of a view, laid out as `storage.layout` says."""
        storage, layout = view.storage, view.storage.layout
        start = self._base(storage)
        writes: list[tuple[Geometry, Any]] = [
            (w.geometry, self.compile(w.content) if isinstance(w.content, VersionedView) else w.content)
            for w in view.writes
        ]
        key = (id(storage), view.version)

        def contents(values: Values) -> torch.Tensor:
            if key in values:
                return values[key]
            tensor = start(values) if start is not None else None
            if tensor is None or writes or not _is_laid_out(tensor, layout):
                whole = _strided(torch.empty(layout.span[1], dtype=storage.dtype, device=self._device), layout)
                if tensor is not None:
                    whole.copy_(tensor)
                tensor = whole
            for geometry, content in writes:
                if callable(content):
                    _strided(tensor, geometry).copy_(content(values))
                else:
                    _strided(tensor, geometry).fill_(content)
            values[key] = tensor
            return tensor

        return contents

    def _base(self, storage: LazyStorage) -> Expression | None:
        base = storage.base
        if base is None:
            return None
        if isinstance(base, torch.Tensor):
            return _constant(base)
        if isinstance(base, OpOutput):
            return self._call(base)
        return self.compile(unwritten_view(storage))

    def _call(self, call: OpOutput) -> Expression:
        compiled = {operand: self.compile(operand) for operand in operands(call)}

        def run(values: Values) -> torch.Tensor:
            def real(value: Any) -> Any:
                return compiled[value](values) if isinstance(value, VersionedView) else value

            out = call.func(*map_leaves(real, call.args), **map_leaves(real, call.kwargs))
            return out if call.index is None else out[call.index]

        return run


def _constant(tensor: torch.Tensor) -> Expression:
    return lambda values: tensor


def _strided(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    return tensor.as_strided(geometry.size, geometry.stride, geometry.offset)


def _is_laid_out(tensor: torch.Tensor, layout: Geometry) -> bool:
    """Returns False if a kernel has chosen other strides than on the meta device, which views are based on."""
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) == layout
