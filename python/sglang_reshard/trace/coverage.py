"""Checks what a trace writes: every element of every parameter once, and nothing computed of values that come later.

Contiguous runs show it, as of nearly all loaders. Anything else is looked at by `gaps`, which says what is missing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.torch_private import persistent_buffers
from sglang_reshard.trace.geometry import Geometry, TooFragmented, remainder
from sglang_reshard.trace.lazy_tensor import CheckpointTensor, LiveStorage, Record, VersionedView, geometry_of, leaves
from sglang_reshard.trace.live import storage_key


def is_complete(model: torch.nn.Module, storages: Mapping[int, LiveStorage], records: Sequence[Record]) -> bool:
    """Returns True if all parameters and persistent buffers are written, and no element twice. False says nothing."""
    written: dict[LiveStorage, list[Record]] = defaultdict(list)
    for record in records:
        if isinstance(record.content, VersionedView) and any(
            isinstance(leaf.storage.base, LiveStorage) for leaf in leaves(record.content)
        ):
            return False  # each update may change again what it does not write
        written[record.storage].append(record)
    wanted: dict[LiveStorage, list[torch.Tensor]] = {storage: [] for storage in written}
    for parameter in model.parameters():
        if parameter.numel():
            storage = storages.get(storage_key(parameter))
            if storage not in wanted:
                return False
            wanted[storage].append(parameter.data)
    for _, buffer in persistent_buffers(model):
        storage = storages.get(storage_key(buffer))
        if buffer.numel() and storage is not None and storage not in written:
            return False
    for storage, of_storage in written.items():
        # In elements, or in units of the smallest dtype that the storage is written as.
        unit = min(storage.tensor.dtype.itemsize, *(record.dtype.itemsize for record in of_storage))
        parameters = [geometry_of(p).scaled(p.element_size() // unit) for p in wanted[storage]]
        if not runs_cover(parameters, [record.written(unit) for record in of_storage]):
            return False
    return True


def runs_cover(wanted: Sequence[Geometry], writes: Sequence[Geometry]) -> bool:
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
                if later and j != i and _overlap(leaf, other):
                    raise Unsupported(
                        f"The loader computes {record.storage.name} from {storage.name} before it has loaded "
                        f"{other.label} there. An update copies all weights first, so it cannot keep this order. Use "
                        "SGLang's own update_weights_from_tensor."
                    )


def _overlap(leaf: VersionedView, record: Record) -> bool:
    unit = min(leaf.dtype.itemsize, record.dtype.itemsize)
    a, b = leaf.geometry.scaled(leaf.dtype.itemsize // unit), record.written(unit)
    if a.span[1] <= b.span[0] or b.span[1] <= a.span[0]:
        return False
    try:
        return sum(math.prod(box.size) for box in remainder(a, [b])[1]) < a.numel
    except TooFragmented:
        return True
