"""Fills that are overwritten: `param.zero_()` before the loads. Only what stays of them becomes a step.

Steps run after all copies have landed, so a fill that the loader made first must not touch what was
loaded into it later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from sglang_reshard.trace.buffers import Reference, Source, Storage, leaves
from sglang_reshard.trace.geometry import Geometry, IndexMap, common_box, grid, onto
from sglang_reshard.trace.memory import Record


def without_overwritten_fills(records: Sequence[Record]) -> list[Record]:
    """The records with each fill cut down to the elements that no later copy or fill writes."""
    read = {leaf.buffer.base for r in records if isinstance(r.content, Reference) for leaf in leaves(r.content)}
    on: dict[Storage, list[tuple[int, Record]]] = defaultdict(list)
    for i, record in enumerate(records):
        on[record.storage].append((i, record))
    kept: list[Record] = []
    for i, record in enumerate(records):
        if isinstance(record.content, (Source, Reference)) or record.storage in read:
            kept.append(record)
            continue
        place = record.walk.writes
        later = [
            r.walk.writes
            for j, r in on[record.storage]
            if j > i and not isinstance(r.content, Reference) and r.dtype.itemsize == record.dtype.itemsize
        ]
        later = [g for g in later if g.span[0] < place.span[1] and place.span[0] < g.span[1]]
        kept += _remainder(record, place, later) if later else [record]
    return kept


def _remainder(record: Record, place: Geometry, later: Sequence[Geometry]) -> Iterator[Record]:
    numel = max(g.span[1] for g in (place, *later))
    shape = grid(numel, [s for g in (place, *later) for s in g.stride])
    left = onto(IndexMap.over(place), shape, unit_steps=True)
    for geometry in later:
        for written in onto(IndexMap.over(geometry), shape, unit_steps=True):
            cut = [(box, common_box(box, written)) for box in left]
            left = [part for box, common in cut for part in (box.without(*common) if common else [box])]
    for box in left:
        yield record._replace(walk=IndexMap.over(box.walk(shape).reads).turned())
