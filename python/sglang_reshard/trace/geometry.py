"""Maps between strided views of flat storages, and rewrites such maps as boxes of a shape. Integers only; no torch.

Torch describes a view by offset, sizes and strides over a flat storage. An `IndexMap` pairs the elements of two such
views, in order. `to_boxes` rewrites it as strided boxes of any contiguous shape laid over the storage that is read:
the shape of a checkpoint tensor, or a grid on which several views are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

MAX_BOXES = 65_536


class TooFragmented(ValueError):
    """Raised for an index map that takes more than `MAX_BOXES` boxes."""


class Geometry(NamedTuple):
    """A view of a flat storage, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def contiguous(cls, size: tuple[int, ...]) -> Geometry:
        return cls(0, size, contiguous_strides(size))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def run(self) -> tuple[int, int] | None:
        """The half-open interval of storage elements that the view consists of, in order; None if there are gaps."""
        count = 1
        for n, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if n != 1:
                if stride != count:
                    return None
                count *= n
        return self.offset, self.offset + count

    @property
    def span(self) -> tuple[int, int]:
        """The half-open interval of storage elements that contains the view."""
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + last + 1 if self.numel else self.offset

    def scaled(self, factor: int) -> Geometry:
        """The same view in smaller units, `factor` for each element."""
        if factor == 1:
            return self
        return Geometry(self.offset * factor, (*self.size, factor), (*(s * factor for s in self.stride), 1))


class Loop(NamedTuple):
    """`size` steps; `read` and `write` are the strides in the storages that are read and written."""

    size: int
    read: int
    write: int


class IndexMap(NamedTuple):
    """The element pairs (read + sum i*loop.read, write + sum i*loop.write) over all loop indices i."""

    read: int
    write: int
    loops: tuple[Loop, ...]

    @classmethod
    def between(cls, read: Geometry, write: Geometry) -> IndexMap:
        """Pairs the elements of two views of equal size."""
        loops = tuple(map(Loop._make, zip(read.size, read.stride, write.stride, strict=True)))
        return cls(read.offset, write.offset, loops)

    @classmethod
    def flattening(cls, geometry: Geometry) -> IndexMap:
        """Maps each element of a view to its row-major position in the view."""
        return cls.between(geometry, Geometry.contiguous(geometry.size))

    @property
    def read_view(self) -> Geometry:
        return Geometry(self.read, tuple(x.size for x in self.loops), tuple(x.read for x in self.loops))

    @property
    def written_view(self) -> Geometry:
        return Geometry(self.write, tuple(x.size for x in self.loops), tuple(x.write for x in self.loops))

    def inverted(self) -> IndexMap:
        return IndexMap(self.write, self.read, tuple(Loop(n, w, r) for n, r, w in self.loops))

    def simplified(self) -> IndexMap:
        """Returns the same pairs with read strides in descending order and as few loops as possible."""
        loops = [loop for loop in self.loops if loop.size != 1]
        if len(loops) > 1:
            loops.sort(key=lambda loop: (-loop.read, -loop.write))
            merged = loops[:1]
            for inner in loops[1:]:
                outer = merged[-1]
                if outer.read == inner.size * inner.read and outer.write == inner.size * inner.write:
                    merged[-1] = Loop(outer.size * inner.size, inner.read, inner.write)
                else:
                    merged.append(inner)
            loops = merged
        return IndexMap(self.read, self.write, tuple(loops))


class BoxMapping(NamedTuple):
    """A strided box of the shape that is read, and where its elements are written.

    The element at multi-index i, counted in steps of the box, goes to `write + sum(i[d] * stride[d])`.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    step: tuple[int, ...]
    write: int
    stride: tuple[int, ...]

    def index_map(self, shape: Sequence[int]) -> IndexMap:
        """Returns the pairs as a map that reads the contiguous storage of `shape`."""
        pitches = contiguous_strides(shape)
        read = sum(a * p for a, p in zip(self.start, pitches, strict=True))
        loops = zip(self.size, self.step, pitches, self.stride, strict=True)
        return IndexMap(read, self.write, tuple(Loop(n, s * p, t) for n, s, p, t in loops if n != 1))

    def narrow(self, start: tuple[int, ...], count: tuple[int, ...]) -> BoxMapping:
        """Returns the part at index `start` of the shape. Unit steps only."""
        skipped = sum((b - a) * s for a, b, s in zip(self.start, start, self.stride, strict=True))
        return BoxMapping(start, count, self.step, self.write + skipped, self.stride)

    def subtract(self, start: tuple[int, ...], count: tuple[int, ...]) -> list[BoxMapping]:
        """Returns the parts outside of a box that lies inside. Unit steps only."""
        left: list[BoxMapping] = []
        lo, size = list(self.start), list(self.size)
        for d, (a, n) in enumerate(zip(start, count, strict=True)):
            if lo[d] < a:
                left.append(self.narrow(tuple(lo), (*size[:d], a - lo[d], *size[d + 1 :])))
            if a + n < lo[d] + size[d]:
                after = (*lo[:d], a + n, *lo[d + 1 :])
                left.append(self.narrow(after, (*size[:d], lo[d] + size[d] - a - n, *size[d + 1 :])))
            lo[d], size[d] = a, n
        return left


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def grid_shape(numel: int, strides: Iterable[int]) -> tuple[int, ...]:
    """Returns a shape of at least `numel` elements that makes views with these strides few boxes.

    Strides that do not divide one another cannot all be dimensions; `to_boxes` unrolls the loops of the others.
    """
    chain: list[int] = []
    for stride in sorted({s for s in strides if 0 < s < numel} | {1}, reverse=True):
        if not chain or chain[-1] % stride == 0:
            chain.append(stride)
    if chain[-1] != 1:
        chain.append(1)
    shape = [-(-numel // chain[0])]
    shape += [outer // inner for outer, inner in itertools.pairwise(chain)]
    return tuple(shape)


def intersection(a: BoxMapping, b: BoxMapping) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns start and count of the indices in both boxes, None if there are none. Unit steps only."""
    start, count = [], []
    for x, n, y, m in zip(a.start, a.size, b.start, b.size, strict=True):
        lo, hi = max(x, y), min(x + n, y + m)
        if hi <= lo:
            return None
        start.append(lo)
        count.append(hi - lo)
    return tuple(start), tuple(count)


def remainder(view: Geometry, others: Sequence[Geometry]) -> tuple[tuple[int, ...], list[BoxMapping]]:
    """Returns the elements of a view that no other view has, as boxes of a shape, and that shape.

    Raises TooFragmented.
    """
    views = (view, *others)
    grid = grid_shape(max(g.span[1] for g in views), [s for g in views for s in g.stride])
    left = to_boxes(IndexMap.flattening(view), grid, unit_steps=True)
    for geometry in others:
        for other in to_boxes(IndexMap.flattening(geometry), grid, unit_steps=True):
            cut = [(box, intersection(box, other)) for box in left]
            left = [part for box, common in cut for part in (box.subtract(*common) if common else [box])]
    return grid, left


def to_boxes(index_map: IndexMap, shape: Sequence[int], *, unit_steps: bool = False) -> list[BoxMapping]:
    """Returns the map as boxes of `shape`, whose contiguous storage it reads.

    A loop that runs past the end of a dimension is split there. Unrolled are the outer one of two loops along one
    dimension, a loop that no dimension fits, and one with stride 0 (an expanded dimension). With `unit_steps` the
    boxes have no gaps.

    Raises TooFragmented for more than `MAX_BOXES` boxes.
    """
    if any(loop.size == 0 for loop in index_map.loops):
        return []
    read, write, loops = index_map.simplified()
    boxes = _boxes_from_zero(read, loops, tuple(shape), unit_steps)
    return [box._replace(write=write + box.write) for box in boxes] if write else list(boxes)


@lru_cache(maxsize=256)
def _boxes_from_zero(
    read: int, loops: tuple[Loop, ...], shape: tuple[int, ...], unit_steps: bool
) -> tuple[BoxMapping, ...]:
    """See `to_boxes`, for a simplified map that writes from 0 on."""
    pitches = contiguous_strides(shape)
    rank = len(shape)
    done: list[BoxMapping] = []
    todo = [IndexMap(read, 0, loops)]
    while todo:
        index_map = read, write, loops = todo.pop()
        digits = [read // p % n if d else read // p for d, (p, n) in enumerate(zip(pitches, shape, strict=True))]
        along: dict[int, Loop] = {}
        parts: list[IndexMap] | None = None
        for loop in loops:
            count, stride, _ = loop
            axis = next((d for d in range(rank) if pitches[d] <= stride), rank)
            if axis == rank or stride % pitches[axis]:
                parts = _unrolled(index_map, loop)
                break
            step = stride // pitches[axis]
            if axis in along:
                parts = _unrolled(index_map, along[axis])
            elif digits[axis] + (count - 1) * step >= shape[axis]:
                parts = _split(index_map, loop, digits[axis], step, shape[axis])
            elif unit_steps and step != 1:
                parts = _unrolled(index_map, loop)
            else:
                along[axis] = loop
                continue
            break
        if parts is not None:
            todo.extend(reversed(parts))
            if len(todo) + len(done) > MAX_BOXES:
                raise TooFragmented(f"more than {MAX_BOXES} boxes")
            continue
        count_of, step_of, stride_of = [1] * rank, [1] * rank, [0] * rank
        for axis, loop in along.items():
            count_of[axis], step_of[axis], stride_of[axis] = loop.size, loop.read // pitches[axis], loop.write
        done.append(BoxMapping(tuple(digits), tuple(count_of), tuple(step_of), write, tuple(stride_of)))
    return tuple(done)


forget_boxes = _boxes_from_zero.cache_clear  # which `to_boxes` keeps, as equal layers and experts have equal boxes


def _unrolled(of: IndexMap, loop: Loop) -> list[IndexMap]:
    if loop.size > MAX_BOXES:
        raise TooFragmented(f"more than {MAX_BOXES} boxes")
    rest = tuple(x for x in of.loops if x is not loop)
    return [IndexMap(of.read + i * loop.read, of.write + i * loop.write, rest) for i in range(loop.size)]


def _split(of: IndexMap, loop: Loop, digit: int, step: int, extent: int) -> list[IndexMap]:
    """Splits a loop where it runs past its dimension: into whole rows and the rest, or after the first row."""

    def part(first: int, *instead: Loop) -> IndexMap:
        others = [x for x in of.loops if x is not loop] + [x for x in instead if x.size > 1]
        others.sort(key=lambda x: -x.read)
        return IndexMap(of.read + first * loop.read, of.write + first * loop.write, tuple(others))

    a_row = extent // step
    if digit < step and extent % step == 0 and loop.size >= a_row:
        rows = loop.size // a_row
        parts = [part(0, Loop(rows, a_row * loop.read, a_row * loop.write), loop._replace(size=a_row))]
        cut = rows * a_row
    else:
        cut = -(-(extent - digit) // step)
        parts = [part(0, loop._replace(size=cut))]
    if loop.size > cut:
        parts.append(part(cut, loop._replace(size=loop.size - cut)))
    return parts
