"""The gate: every element of every parameter is written exactly once, and nothing is read too early.

A loader that forgets a tensor, loads one twice or ignores a config key shows up here. Storages can be
huge, so the writes are compared as boxes on a grid whose cells are cut only where a write begins or ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.buffers import Reference, Source, Storage, describe, leaves
from sglang_reshard.trace.geometry import BoxMapping, Geometry, IndexMap, TooFragmented, common_box, grid, onto
from sglang_reshard.trace.live import storage_key
from sglang_reshard.trace.memory import Record

_MAX_CELLS = 50_000_000


def check_coverage(model: torch.nn.Module, storages: dict[int, Storage], records: Sequence[Record]) -> None:
    """Raise Unsupported unless every parameter is written exactly once."""
    written: dict[Storage, list[Record]] = defaultdict(list)
    for record in records:
        if not _updates_in_place(record):
            written[record.storage].append(record)
    parameters: dict[Storage, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        key = storage_key(parameter)
        if parameter.numel() and (key in storages or parameter.device.type != "meta"):
            parameters[storages[key]].append((name, parameter.data))
    for storage in dict.fromkeys((*parameters, *written)):
        _check_storage(storage, parameters[storage], written[storage])


def _updates_in_place(record: Record) -> bool:
    """Whether it writes the very elements it reads, as `p.mul_(2)` does."""
    if not isinstance(record.content, Reference):
        return False
    target = IndexMap.over(record.walk.writes).simplified().reads
    return any(
        leaf.buffer.base is record.storage
        and leaf.dtype == record.dtype
        and IndexMap.over(leaf.geometry).simplified().reads == target
        for leaf in leaves(record.content)
    )


class _Placed(NamedTuple):
    label: str
    boxes: list[BoxMapping]


def _check_storage(storage: Storage, parameters: list[tuple[str, torch.Tensor]], records: list[Record]) -> None:
    if not records:
        missing = [name for name, _ in parameters if "scale" not in name]
        if missing:
            raise Unsupported(
                f"{missing[0]} is not written by the loader at all: no tensor of the checkpoint reaches it. Compare "
                "the names that are sent with those of the model's Hugging Face checkpoint."
            )
        return
    # In elements, or in units of the smallest dtype that the storage is written as.
    unit = min(storage.tensor.dtype.itemsize, *(r.dtype.itemsize for r in records))
    wanted = [(name, _geometry(p, unit)) for name, p in parameters]
    writes = [(_label(r), _scaled(r.walk.writes, r.dtype.itemsize // unit)) for r in records]
    walks = [(label, IndexMap.over(g).simplified()) for label, g in (*wanted, *writes)]
    shape = grid(
        storage.tensor.untyped_storage().nbytes() // unit,
        {loop.read for _, walk in walks for loop in walk.loops},
    )
    try:
        placed = [_Placed(label, _boxes(walk, shape)) for label, walk in walks]
    except TooFragmented:
        raise Unsupported(f"{storage.name} is written in pieces too fine to be checked.") from None
    cells = _Cells(shape, [box for p in placed for box in p.boxes])
    counts = cells.zeros()
    for p in placed[len(wanted) :]:
        for box in p.boxes:
            counts[cells.slices(box)] += 1
    for p, (_, tensor) in zip(placed[: len(wanted)], parameters, strict=True):
        empty = sum(cells.volume(counts[s] == 0, s) for s in map(cells.slices, p.boxes))
        if empty:
            scale = tensor.element_size() // unit
            raise Unsupported(
                f"{p.label} is not written completely: {empty // scale} of its {tensor.numel()} elements come from no "
                f"checkpoint tensor; written by {_some(label for label, _ in writes)}. A tensor is missing among "
                "those sent, or the loader does not know this model."
            )
    if (counts > 1).any():
        cell = tuple(int(x) for x in np.argwhere(counts > 1)[0])
        guilty = [p.label for p in placed[len(wanted) :] if any(cells.has(box, cell) for box in p.boxes)]
        raise Unsupported(
            f"{storage.name} has elements that are written more than once while loading, by {_some(guilty)}. Send "
            "each weight once, under one name."
        )


def _boxes(walk: IndexMap, shape: tuple[int, ...]) -> list[BoxMapping]:
    if len(shape) == 1 and len(walk.loops) == 1:
        # A run of elements, as nearly all of them are; the same as below, only faster.
        return [BoxMapping((walk.read,), (walk.loops[0].times,), (1,), 0, (1,))]
    return onto(walk, shape, unit_steps=True)


def _label(record: Record) -> str:
    content = record.content
    if isinstance(content, Source):
        return content.spec.name
    return describe(content) if isinstance(content, Reference) else f"a fill with {content}"


def _some(labels: object) -> str:
    names = list(dict.fromkeys(labels))  # type: ignore[call-overload]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _geometry(tensor: torch.Tensor, unit: int) -> Geometry:
    geometry = Geometry(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
    return _scaled(geometry, tensor.element_size() // unit)


def _scaled(geometry: Geometry, factor: int) -> Geometry:
    if factor == 1:
        return geometry
    offset, size, stride = geometry
    return Geometry(offset * factor, (*size, factor), (*(s * factor for s in stride), 1))


class _Cells:
    """A grid cut along each axis where any box begins or ends."""

    def __init__(self, shape: tuple[int, ...], boxes: list[BoxMapping]) -> None:
        edges: list[set[int]] = [{0, n} for n in shape]
        for box in boxes:
            for d, (a, n) in enumerate(zip(box.start, box.size, strict=True)):
                edges[d].update((a, a + n))
        ordered = [sorted(e) for e in edges]
        self._index = [{x: i for i, x in enumerate(e)} for e in ordered]
        self._lengths = [np.diff(np.array(e, dtype=np.int64)) for e in ordered]
        if np.prod([len(n) for n in self._lengths], dtype=np.float64) > _MAX_CELLS:
            raise Unsupported("A storage is written in pieces too fine to be checked.")

    def zeros(self) -> np.ndarray:
        return np.zeros([len(n) for n in self._lengths], dtype=np.int32)

    def slices(self, box: BoxMapping) -> tuple[slice, ...]:
        return tuple(
            slice(index[a], index[a + n]) for index, a, n in zip(self._index, box.start, box.size, strict=True)
        )

    def has(self, box: BoxMapping, cell: tuple[int, ...]) -> bool:
        return all(s.start <= c < s.stop for s, c in zip(self.slices(box), cell, strict=True))

    def volume(self, chosen: np.ndarray, at: tuple[slice, ...]) -> int:
        """Elements in the chosen cells of a part of the grid."""
        if not chosen.any():
            return 0
        volumes = np.ones((), dtype=np.int64)
        for lengths, part in zip(self._lengths, at, strict=True):
            volumes = np.multiply.outer(volumes, lengths[part])
        return int(volumes[chosen].sum())


def check_order(records: Sequence[Record]) -> None:
    """Refuse a step that reads what a copy fills only later, or a step changes in between.

    Copies all land before the first step, whatever the loader's order was.
    """
    of_storage: dict[Storage, list[int]] = defaultdict(list)
    for i, record in enumerate(records):
        of_storage[record.storage].append(i)
    for i, record in enumerate(records):
        if not isinstance(record.content, Reference):
            continue
        for leaf in leaves(record.content):
            storage = leaf.buffer.base
            if not isinstance(storage, Storage):
                continue
            for j in of_storage[storage]:
                other = records[j]
                late = j >= leaf.version and (isinstance(other.content, Source) or j < i)
                if late and j != i and _overlap(leaf, other, storage):
                    raise Unsupported(
                        f"The loader computes {record.storage.name} from {storage.name} before it has loaded "
                        f"{_label(other)} there; such an order cannot be kept."
                    )


def _overlap(leaf: Reference, record: Record, storage: Storage) -> bool:
    unit = min(leaf.dtype.itemsize, record.dtype.itemsize)
    a = _scaled(leaf.geometry, leaf.dtype.itemsize // unit)
    b = _scaled(record.walk.writes, record.dtype.itemsize // unit)
    if a.span[1] <= b.span[0] or b.span[1] <= a.span[0]:
        return False
    shape = grid(storage.tensor.untyped_storage().nbytes() // unit, (*a.stride, *b.stride))
    try:
        mine, theirs = (onto(IndexMap.over(g), shape, unit_steps=True) for g in (a, b))
    except TooFragmented:
        return True
    return any(common_box(x, y) is not None for x in mine for y in theirs)
