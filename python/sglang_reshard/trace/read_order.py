"""Checks that a loader computes nothing from values that are not there yet when an update computes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.geometry import IndexMap, TooFragmented, grid_shape, intersection, to_boxes
from sglang_reshard.trace.lazy_storage import CheckpointTensor, LiveStorage, VersionedView, leaves
from sglang_reshard.trace.memory import Record


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
                        f"{other.label} there. An update copies all weights first, so it cannot keep this order. Use "
                        "SGLang's own update_weights_from_tensor."
                    )


def _overlap(leaf: VersionedView, record: Record, storage: LiveStorage) -> bool:
    unit = min(leaf.dtype.itemsize, record.dtype.itemsize)
    a, b = leaf.geometry.scaled(leaf.dtype.itemsize // unit), record.written(unit)
    if a.span[1] <= b.span[0] or b.span[1] <= a.span[0]:
        return False
    grid = grid_shape(storage.tensor.untyped_storage().nbytes() // unit, (*a.stride, *b.stride))
    try:
        ours, theirs = (to_boxes(IndexMap.flattening(g), grid, unit_steps=True) for g in (a, b))
    except TooFragmented:
        return True
    return any(intersection(x, y) is not None for x in ours for y in theirs)
