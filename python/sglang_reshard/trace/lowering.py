"""Lowers a trace's records to a Program: copies out of the checkpoint, then steps local to the engine rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Region
from sglang_reshard.trace.casts import check_cast, torch_dtype
from sglang_reshard.trace.expression import Compiler
from sglang_reshard.trace.geometry import (
    MAX_BOXES,
    Geometry,
    IndexMap,
    TooFragmented,
    grid_shape,
    intersection,
    to_boxes,
)
from sglang_reshard.trace.lazy_storage import CheckpointTensor, LiveStorage, VersionedView, leaves, names_of
from sglang_reshard.trace.live import flat_view
from sglang_reshard.trace.memory import Record
from sglang_reshard.trace.program import Copy, Step


class Lowering:
    """Collects copies, targets and steps of one program."""

    def __init__(self, device: torch.device) -> None:
        self.copies: list[Copy] = []
        self.targets: dict[str, torch.Tensor] = {}
        self.steps: list[Step] = []
        self._device = device
        self._scratch: dict[tuple[str, Geometry], torch.Tensor] = {}
        self._compiler = Compiler(self._operand, device)

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
            value = self._compiler.compile(view)
            self.steps.append(Step(target, f"from {names_of(content)}", _call(lambda: to.copy_(value({})))))
        else:
            self.steps.append(Step(target, f"fill {content}", _call(lambda: to.fill_(content))))

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


def _call(function: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        function()

    return run


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
        kept += _remainder(record, filled, later) if later else [record]
    return kept


def _remainder(record: Record, filled: Geometry, later: Sequence[Geometry]) -> Iterator[Record]:
    numel = max(g.span[1] for g in (filled, *later))
    grid = grid_shape(numel, [s for g in (filled, *later) for s in g.stride])
    left = to_boxes(IndexMap.flattening(filled), grid, unit_steps=True)
    for geometry in later:
        for written in to_boxes(IndexMap.flattening(geometry), grid, unit_steps=True):
            cut = [(box, intersection(box, written)) for box in left]
            left = [part for box, common in cut for part in (box.subtract(*common) if common else [box])]
    for box in left:
        yield record._replace(index_map=IndexMap.flattening(box.index_map(grid).read_view).inverted())
