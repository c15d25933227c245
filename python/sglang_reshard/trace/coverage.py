"""Checks that a trace writes every element of every parameter exactly once and reads nothing too early.

This detects a loader that misses a tensor, loads one twice or ignores a config key. Storages can be huge, so writes
are compared as boxes on a grid, whose cells end only where a write begins or ends.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.geometry import (
    BoxMapping,
    Geometry,
    IndexMap,
    TooFragmented,
    grid_shape,
    intersection,
    to_boxes,
)
from sglang_reshard.trace.kv_scales import is_default_scale
from sglang_reshard.trace.lazy_storage import CheckpointTensor, LiveStorage, VersionedView, leaves, names_of
from sglang_reshard.trace.left_alone import LeftAlone
from sglang_reshard.trace.live import storage_key
from sglang_reshard.trace.memory import Record, geometry_of
from sglang_reshard.trace.stock_load import StockLoad

_MAX_CELLS = 50_000_000


def check_coverage(
    model: torch.nn.Module,
    storages: dict[int, LiveStorage],
    records: Sequence[Record],
    as_built: Collection[int] = (),
    stock: StockLoad | None = None,
    may_stay: Callable[[str], bool] = lambda name: False,
) -> tuple[list[LeftAlone], list[str]]:
    """Raises Unsupported unless every parameter is written exactly once, or may stay as it is.

    A model that has `keeps_unsent` set may have parameters that are not written at all.

    as_built  keys of storages that nothing at all may write: `repack` checks whether anybody reads them
    stock     says which elements a start on the engine's checkpoint does not write either
    may_stay  returns whether nothing at all may write the parameter of this name

    Returns the parameters with elements that neither this nor a start writes, and the names of those that stay.
    """
    left: list[LeftAlone] = []
    kept: list[str] = []
    written: dict[LiveStorage, list[Record]] = defaultdict(list)
    must_be_full = {storages[key] for key in as_built if key in storages}  # what repacks them reads all of it
    for record in records:
        if _updates_in_place(record):
            must_be_full.add(record.storage)  # each update would change again what it does not write
        else:
            written[record.storage].append(record)
    parameters: dict[LiveStorage, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        key = storage_key(parameter)
        if parameter.numel() and (key in storages or parameter.device.type != "meta"):
            parameters[storages[key]].append((name, parameter.data))
    keeps_unsent = getattr(model, "keeps_unsent", False)
    for storage in dict.fromkeys((*parameters, *written)):
        names = [name for name, _ in parameters[storage]]
        if storage not in written and storage_key(storage.tensor) in as_built:
            continue
        if storage not in written and all(map(may_stay, names)):
            kept += names
            continue
        if storage not in written and keeps_unsent:
            continue
        of_stock = None if storage in must_be_full else stock
        left += _check_storage(storage, parameters[storage], written[storage], of_stock)
    return left, kept


def _updates_in_place(record: Record) -> bool:
    """Returns True if the record reads the very elements that it writes, as `p.mul_(2)` does."""
    if not isinstance(record.content, VersionedView):
        return False
    written = record.index_map.written_view
    target = IndexMap.flattening(written).simplified().read_view
    read = [
        leaf.geometry
        for leaf in leaves(record.content)
        if leaf.storage.base is record.storage and leaf.dtype == record.dtype
    ]
    if any(IndexMap.flattening(geometry).simplified().read_view == target for geometry in read):
        return True
    return bool(read) and _covers(read, written)


def _covers(read: Sequence[Geometry], written: Geometry) -> bool:
    """Returns whether every element of `written` is in one of `read`; False if there are too many to look."""
    begin, end = written.span
    if end - begin > _MAX_CELLS:
        return False
    missing = torch.zeros(max(end, *(geometry.span[1] for geometry in read)), dtype=torch.bool)
    missing.as_strided(written.size, written.stride, written.offset).fill_(True)
    for geometry in read:
        missing.as_strided(geometry.size, geometry.stride, geometry.offset).fill_(False)
    return not missing.any()


def _check_storage(
    storage: LiveStorage,
    parameters: list[tuple[str, torch.Tensor]],
    records: list[Record],
    stock: StockLoad | None,
) -> list[LeftAlone]:
    hint = functools.partial(stock.hint, storage.name) if stock is not None else str
    if not records:
        missing = [(name, parameter) for name, parameter in parameters if not is_default_scale(name, parameter)]
        if not missing:
            return []
        loads = stock.writes() if stock is not None else None
        if loads is None or storage.name in loads:
            raise Unsupported(
                f"{missing[0][0]} is not written by the loader at all: no tensor of the checkpoint reaches it. Compare "
                "the names that are sent with those of the model's Hugging Face checkpoint; a quantized weight needs "
                f"its scale, and frozen= names what stays as it is.{hint()}"
            )
        return [LeftAlone(name, parameter) for name, parameter in missing]
    # In elements, or in units of the smallest dtype that the storage is written as.
    unit = min(storage.tensor.dtype.itemsize, *(r.dtype.itemsize for r in records))
    wanted = [_scaled(geometry_of(p), p.element_size() // unit) for _, p in parameters]
    writes = [_scaled(r.index_map.written_view, r.dtype.itemsize // unit) for r in records]
    if _runs_cover(wanted, writes):
        return []
    loaded = _of_stock(storage, wanted, writes, unit, stock)
    maps = [IndexMap.flattening(g).simplified() for g in (*wanted, *writes, *(loaded or ()))]
    strides = {loop.read for index_map in maps for loop in index_map.loops}
    grid = grid_shape(storage.tensor.untyped_storage().nbytes() // unit, strides)
    try:
        boxes = [to_boxes(index_map, grid, unit_steps=True) for index_map in maps]
    except TooFragmented:
        raise _too_fragmented(storage) from None
    cells = _Cells(storage, grid, [box for found in boxes for box in found])
    counts = cells.zeros()
    of_parameters, of_writes = boxes[: len(wanted)], boxes[len(wanted) : len(wanted) + len(writes)]
    for written in of_writes:
        for box in written:
            counts[cells.slices(box)] += 1
    needed = np.ones_like(counts, dtype=bool) if loaded is None else np.zeros_like(counts, dtype=bool)
    for box in (box for found in boxes[len(wanted) + len(writes) :] for box in found):
        needed[cells.slices(box)] = True
    left = []
    for covered, (name, tensor) in zip(of_parameters, parameters, strict=True):
        slices = [cells.slices(box) for box in covered]
        empty = sum(cells.volume((counts[s] == 0) & needed[s], s) for s in slices)
        if empty:
            scale = tensor.element_size() // unit
            raise Unsupported(
                f"{name} is not written completely: {empty // scale} of its {tensor.numel()} elements come from no "
                f"checkpoint tensor; written by {_some(map(_label, records))}. A tensor is missing among "
                f"those sent, or the loader does not support this model.{hint()}"
            )
        if any(bool((counts[s] == 0).any()) for s in slices):
            left.append(LeftAlone(name, tensor, tuple(r.index_map.written_view for r in records)))
    if (counts > 1).any():
        cell = tuple(int(x) for x in np.argwhere(counts > 1)[0])
        names = (
            _label(record)
            for record, written in zip(records, of_writes, strict=True)
            if any(cells.has(box, cell) for box in written)
        )
        raise Unsupported(
            f"the loader writes elements of {storage.name} more than once, from {_some(names)}. Send each weight once, "
            "under one name."
        )
    return left


def _of_stock(
    storage: LiveStorage, wanted: Sequence[Geometry], writes: Sequence[Geometry], unit: int, stock: StockLoad | None
) -> list[Geometry] | None:
    """Returns what a start on the checkpoint writes, in units; None if all that is wanted must be written.

    It is asked for storages that are not full only, as it may cost a trace.
    """
    if stock is None or sum(map(_numel, writes)) >= sum(map(_numel, wanted)):
        return None
    if unit != storage.tensor.dtype.itemsize or (found := stock.writes()) is None:
        return None
    records = found.get(storage.name, ())
    if any(record.dtype.itemsize != unit for record in records):
        return None
    return [record.index_map.written_view for record in records]


def _numel(geometry: Geometry) -> int:
    return math.prod(geometry.size)


def _runs_cover(wanted: Sequence[Geometry], writes: Sequence[Geometry]) -> bool:
    """Returns True for writes of contiguous elements, as nearly all are, that cover what is wanted and do not overlap.

    False says nothing.
    """
    runs = [geometry.run for geometry in writes]
    if None in runs:
        return False
    begins: list[int] = []
    ends: list[int] = []  # adjacent runs are one
    for begin, end in sorted(run for run in runs if run is not None):
        if not ends or begin > ends[-1]:
            begins.append(begin)
            ends.append(end)
        elif begin == ends[-1]:
            ends[-1] = end
        else:
            return False
    for geometry in wanted:
        run = geometry.run
        if run is None or (at := bisect_right(begins, run[0]) - 1) < 0 or run[1] > ends[at]:
            return False
    return True


def _label(record: Record) -> str:
    content = record.content
    if isinstance(content, CheckpointTensor):
        return content.spec.name
    return names_of(content) if isinstance(content, VersionedView) else f"a fill with {content}"


def _some(labels: Iterable[str]) -> str:
    return some_names(list(dict.fromkeys(labels)), 4)


def _too_fragmented(storage: LiveStorage) -> Unsupported:
    return Unsupported(
        f"{storage.name} is written in too many pieces to check that every element is written once. Send its weights "
        "in a layout closer to the engine's."
    )


def _scaled(geometry: Geometry, factor: int) -> Geometry:
    if factor == 1:
        return geometry
    offset, size, stride = geometry
    return Geometry(offset * factor, (*size, factor), (*(s * factor for s in stride), 1))


class _Cells:
    """The cells of a grid that is cut along each dimension where any box begins or ends."""

    def __init__(self, storage: LiveStorage, grid: tuple[int, ...], boxes: list[BoxMapping]) -> None:
        edges: list[set[int]] = [{0, n} for n in grid]
        for box in boxes:
            for d, (a, n) in enumerate(zip(box.start, box.size, strict=True)):
                edges[d].update((a, a + n))
        ordered = [sorted(e) for e in edges]
        self._index = [{x: i for i, x in enumerate(e)} for e in ordered]
        self._lengths = [np.diff(np.array(e, dtype=np.int64)) for e in ordered]
        if np.prod([len(n) for n in self._lengths], dtype=np.float64) > _MAX_CELLS:
            raise _too_fragmented(storage)

    def zeros(self) -> np.ndarray:
        return np.zeros([len(n) for n in self._lengths], dtype=np.int32)

    def slices(self, box: BoxMapping) -> tuple[slice, ...]:
        return tuple(
            slice(index[a], index[a + n]) for index, a, n in zip(self._index, box.start, box.size, strict=True)
        )

    def has(self, box: BoxMapping, cell: tuple[int, ...]) -> bool:
        return all(s.start <= c < s.stop for s, c in zip(self.slices(box), cell, strict=True))

    def volume(self, chosen: np.ndarray, at: tuple[slice, ...]) -> int:
        """Returns the number of elements in the chosen cells of a part of the grid."""
        if not chosen.any():
            return 0
        volumes = np.ones((), dtype=np.int64)
        for lengths, part in zip(self._lengths, at, strict=True):
            volumes = np.multiply.outer(volumes, lengths[part])
        return int(volumes[chosen].sum())


def check_order(records: Sequence[Record]) -> None:
    """Raises Unsupported if a step reads values that a later copy writes, or that a step in between changes.

    All copies of an update come before its first step, independent of the loader's order.
    """
    by_storage: dict[LiveStorage, list[int]] = defaultdict(list)
    for i, record in enumerate(records):
        by_storage[record.storage].append(i)
    for i, record in enumerate(records):
        if not isinstance(record.content, VersionedView):
            continue
        for leaf in leaves(record.content):
            storage = leaf.storage.base
            if not isinstance(storage, LiveStorage):
                continue
            for j in by_storage[storage]:
                other = records[j]
                later = j >= leaf.version and (isinstance(other.content, CheckpointTensor) or j < i)
                if later and j != i and _overlap(leaf, other, storage):
                    raise Unsupported(
                        f"The loader computes {record.storage.name} from {storage.name} before it has loaded "
                        f"{_label(other)} there. An update copies all weights first, so it cannot keep this order. Use "
                        "SGLang's own update_weights_from_tensor."
                    )


def _overlap(leaf: VersionedView, record: Record, storage: LiveStorage) -> bool:
    unit = min(leaf.dtype.itemsize, record.dtype.itemsize)
    a = _scaled(leaf.geometry, leaf.dtype.itemsize // unit)
    b = _scaled(record.index_map.written_view, record.dtype.itemsize // unit)
    if a.span[1] <= b.span[0] or b.span[1] <= a.span[0]:
        return False
    grid = grid_shape(storage.tensor.untyped_storage().nbytes() // unit, (*a.stride, *b.stride))
    try:
        ours, theirs = (to_boxes(IndexMap.flattening(g), grid, unit_steps=True) for g in (a, b))
    except TooFragmented:
        return True
    return any(intersection(x, y) is not None for x in ours for y in theirs)
