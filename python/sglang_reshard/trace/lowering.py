"""Lowers a trace's records to a Program: copies out of the checkpoint, then steps local to the engine rank.

A step is a fill, or the operators that the loader has called, compiled to a function over live and scratch tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Region
from sglang_reshard.trace.geometry import MAX_BOXES, Geometry, IndexMap, TooFragmented, remainder, to_boxes
from sglang_reshard.trace.lazy_tensor import (
    CheckpointTensor,
    LiveStorage,
    OpOutput,
    Record,
    VersionedView,
    geometry_of,
    leaves,
    names_of,
    operands,
    unwritten_view,
)
from sglang_reshard.trace.live import flat_view
from sglang_reshard.trace.program import Copy, Step, check_cast, torch_dtype
from sglang_reshard.trace.recorder import map_leaves

# Values of the storages that one run has computed so far, by storage and number of writes.
Values = dict[tuple[int, int], torch.Tensor]
Expression = Callable[[Values], torch.Tensor]


class Lowering:
    """Collects copies, targets and steps of one program."""

    def __init__(self, device: torch.device) -> None:
        self.copies: list[Copy] = []
        self.targets: dict[str, torch.Tensor] = {}
        self.steps: list[Step] = []
        self._device = device
        self._scratch: dict[tuple[str, Geometry], torch.Tensor] = {}

    def add(self, record: Record) -> None:
        target = self._target(record.storage, record.dtype)
        content, index_map = record.content, record.index_map
        if isinstance(content, CheckpointTensor):
            check_cast(content.spec.name, torch_dtype(content.spec), target, record.dtype)
            self._copy(content, index_map, target)
            return
        offset, size, stride = index_map.written_view
        to = self.targets[target].as_strided(size, stride, offset)
        if isinstance(content, VersionedView):
            view = VersionedView(content.storage, content.version, index_map.read_view, content.dtype)
            value = self._compile(view)
            in_place = not view.writes and view.storage.base is record.storage  # it is written where it is read
            write = (lambda: to.copy_(value({}).clone())) if in_place else (lambda: to.copy_(value({})))
            self.steps.append(Step(target, f"from {names_of(content)}", write))
        else:
            self.steps.append(Step(target, f"fill {content}", partial(to.fill_, content)))

    def read(self, record: Record) -> None:
        """Adds a copy of values that a later record overwrites, so that their tensor counts as read by the loader."""
        if isinstance(record.content, CheckpointTensor):
            self._scratch_tensor(record.content, record.index_map.read_view, record.dtype)

    def _copy(self, tensor: CheckpointTensor, index_map: IndexMap, target: str) -> None:
        name, shape = tensor.spec.name, tensor.spec.shape
        try:
            boxes = to_boxes(index_map, shape)
        except TooFragmented:
            raise Unsupported(
                f"{name} {shape} is copied to {target} in more than {MAX_BOXES} strided boxes. Send it in a layout "
                "closer to the engine's."
            ) from None
        for box in boxes:
            self.copies.append(Copy(name, Region(box.start, box.size, box.step), target, box.write, box.stride))

    def _target(self, storage: LiveStorage, dtype: torch.dtype) -> str:
        # One storage can be written as several dtypes; each has a target of its own.
        own = storage.tensor.dtype
        name = storage.name if dtype == own else f"{storage.name} as {str(dtype).removeprefix('torch.')}"
        if name not in self.targets:
            self.targets[name] = flat_view(storage.tensor, dtype)
        return name

    def _operand(
        self, tensor: CheckpointTensor, geometry: Geometry, dtype: torch.dtype, viewed_as: torch.dtype
    ) -> torch.Tensor:
        """Returns a view of a checkpoint tensor as an operand, in scratch memory that copies fill."""
        if viewed_as != dtype:
            everything = self._scratch_tensor(tensor, Geometry.contiguous(tensor.spec.shape), dtype)
            return flat_view(everything, viewed_as).as_strided(geometry.size, geometry.stride, geometry.offset)
        # An expanded dimension is copied once.
        size = tuple(1 if s == 0 else n for n, s in zip(geometry.size, geometry.stride, strict=True))
        return self._scratch_tensor(tensor, geometry._replace(size=size), dtype).expand(geometry.size)

    def _scratch_tensor(self, tensor: CheckpointTensor, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
        key = (tensor.spec.name, geometry)
        if key not in self._scratch:
            name = f"scratch/{len(self._scratch)}"
            self._scratch[key] = torch.empty(geometry.size, dtype=dtype, device=self._device)
            self.targets[name] = self._scratch[key].view(-1)
            self._copy(tensor, IndexMap.flattening(geometry), name)
        return self._scratch[key]

    def _compile(self, view: VersionedView) -> Expression:
        """Returns a function that computes a view's value from real tensors."""
        storage, geometry, dtype = view.storage, view.geometry, view.dtype
        base = storage.base
        if not view.writes:
            # The memory exists already: the view is made once, not at each update.
            if isinstance(base, CheckpointTensor):
                return _constant(self._operand(base, geometry, storage.dtype, dtype))
            if isinstance(base, LiveStorage):
                return _constant(_strided(flat_view(base.tensor, dtype), geometry))
        contents = self._compile_contents(view)

        def value(values: Values) -> torch.Tensor:
            tensor = contents(values)
            if dtype != storage.dtype:
                tensor = flat_view(tensor, dtype)
            elif geometry == storage.layout:
                return tensor
            return _strided(tensor, geometry)

        return value

    def _compile_contents(self, view: VersionedView) -> Expression:
        """Returns the whole storage of a view, laid out as `storage.layout` says."""
        storage, layout, base = view.storage, view.storage.layout, view.storage.base
        start: Expression | None = None
        if isinstance(base, torch.Tensor):
            start = _constant(base)
        elif isinstance(base, OpOutput):
            start = self._compile_call(base)
        elif base is not None:
            start = self._compile(unwritten_view(storage))
        writes: list[tuple[Geometry, Any]] = [
            (w.geometry, self._compile(w.content) if isinstance(w.content, VersionedView) else w.content)
            for w in view.writes
        ]
        key = (id(storage), view.version)

        def contents(values: Values) -> torch.Tensor:
            if key in values:
                return values[key]
            tensor = start(values) if start is not None else None
            # A kernel may have chosen other strides than on the meta device, which views are based on.
            if tensor is None or writes or geometry_of(tensor) != layout:
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

    def _compile_call(self, call: OpOutput) -> Expression:
        compiled = {operand: self._compile(operand) for operand in operands(call)}

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


def drop_overwritten_fills(records: Sequence[Record]) -> list[Record]:
    """Returns the records with each fill reduced to the elements that no later copy or fill writes.

    Steps run after all copies, so a fill that the loader makes first (`param.zero_()`) must not touch what it loads
    there later.
    """
    read = {leaf.storage.base for r in records if isinstance(r.content, VersionedView) for leaf in leaves(r.content)}
    by_storage: dict[LiveStorage, list[tuple[int, Record]]] = defaultdict(list)
    for i, record in enumerate(records):
        by_storage[record.storage].append((i, record))
    kept: list[Record] = []
    for i, record in enumerate(records):
        if isinstance(record.content, (CheckpointTensor, VersionedView)) or record.storage in read:
            kept.append(record)
            continue
        filled = record.index_map.written_view
        later = [
            r.index_map.written_view
            for j, r in by_storage[record.storage]
            if j > i and not isinstance(r.content, VersionedView) and r.dtype.itemsize == record.dtype.itemsize
        ]
        later = [g for g in later if g.span[0] < filled.span[1] and filled.span[0] < g.span[1]]
        if not later:
            kept.append(record)
            continue
        grid, left = remainder(filled, later)
        maps = (IndexMap.flattening(box.index_map(grid).read_view).inverted() for box in left)
        kept += [record._replace(index_map=index_map) for index_map in maps]
    return kept


def drop_repeated_writes(records: Sequence[Record]) -> list[Record]:
    """Returns the records without those that write the same elements to the same place again.

    A draft that shares its target's embedding loads it again. Computed content of a storage is not changed.
    """
    computed = {r.storage for r in records if isinstance(r.content, VersionedView)}
    seen = set()
    kept: list[Record] = []
    for record in records:
        if record.storage not in computed:
            content = record.content.spec.name if isinstance(record.content, CheckpointTensor) else record.content
            write = (record.storage, record.dtype, record.index_map, content)
            if write in seen:
                continue
            seen.add(write)
        kept.append(record)
    return kept
