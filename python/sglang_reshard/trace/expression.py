"""Turns a recorded reference into a function that computes it from real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_reshard.trace.buffers import Buffer, Computed, Constant, Reference, Source, Storage
from sglang_reshard.trace.geometry import Geometry
from sglang_reshard.trace.live import flat
from sglang_reshard.trace.operators import mapped

# Values of the buffers that one run has computed so far, by buffer and number of writes.
Values = dict[tuple[int, int], torch.Tensor]
Expression = Callable[[Values], torch.Tensor]


class Compiler:
    """Compiles references. `operand` gives the tensor in which a view of a checkpoint tensor will lie."""

    def __init__(
        self,
        operand: Callable[[Source, Geometry, torch.dtype, torch.dtype], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._operand = operand
        self._device = device

    def compile(self, reference: Reference) -> Expression:
        buffer, geometry, dtype = reference.buffer, reference.geometry, reference.dtype
        base = buffer.base
        if not reference.own_writes:
            # Storage that is there already: the view is made once, not at each update.
            if isinstance(base, Source):
                return _always(self._operand(base, geometry, buffer.dtype, dtype))
            if isinstance(base, Storage):
                return _always(_at(flat(base.tensor, dtype), geometry))
        contents = self._contents(buffer, reference.version)

        def view(values: Values) -> torch.Tensor:
            tensor = contents(values)
            if dtype != buffer.dtype:
                tensor = flat(tensor, dtype)
            elif geometry == buffer.layout:
                return tensor
            return _at(tensor, geometry)

        return view

    def _contents(self, buffer: Buffer, version: int) -> Expression:
        """The buffer's own tensor, laid out as `buffer.layout` says, after `version` writes."""
        layout, base = buffer.layout, buffer.base
        written = [] if isinstance(base, Storage) else buffer.writes[:version]
        start = self._base(buffer)
        writes: list[tuple[Geometry, Any]] = [
            (w.geometry, self.compile(w.content) if isinstance(w.content, Reference) else w.content) for w in written
        ]
        key = (id(buffer), version)

        def contents(values: Values) -> torch.Tensor:
            if key in values:
                return values[key]
            tensor = start(values) if start is not None else None
            if tensor is None or writes or not _lies(tensor, layout):
                fresh = torch.empty(layout.span[1], dtype=buffer.dtype, device=self._device)
                whole = _at(fresh, layout)
                if tensor is not None:
                    whole.copy_(tensor)
                tensor = whole
            for place, content in writes:
                if callable(content):
                    _at(tensor, place).copy_(content(values))
                else:
                    _at(tensor, place).fill_(content)
            values[key] = tensor
            return tensor

        return contents

    def _base(self, buffer: Buffer) -> Expression | None:
        base = buffer.base
        if base is None:
            return None
        if isinstance(base, Constant):
            return _always(base.tensor)
        if isinstance(base, (Source, Storage)):
            return self.compile(Reference(buffer, 0, buffer.layout, buffer.dtype))
        return self._call(base)

    def _call(self, call: Computed) -> Expression:
        def prepared(value: Any) -> Any:
            return _Operand(self.compile(value)) if isinstance(value, Reference) else value

        args, kwargs = mapped(prepared, call.args), mapped(prepared, call.kwargs)

        def run(values: Values) -> torch.Tensor:
            def real(value: Any) -> Any:
                return value.expression(values) if isinstance(value, _Operand) else value

            out = call.func(*mapped(real, args), **mapped(real, kwargs))
            return out if call.index is None else out[call.index]

        return run


class _Operand:
    """Tells a compiled operand from a plain argument."""

    __slots__ = ("expression",)

    def __init__(self, expression: Expression) -> None:
        self.expression = expression


def _always(tensor: torch.Tensor) -> Expression:
    return lambda values: tensor


def _at(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    return tensor.as_strided(geometry.size, geometry.stride, geometry.offset)


def _lies(tensor: torch.Tensor, layout: Geometry) -> bool:
    """A kernel may choose other strides than its meta twin did, and views go by the latter."""
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) == layout
