"""Strided walks over flat storages, and how they look as boxes of a shape.

Torch describes a view as offset, sizes and strides over a flat storage; a loader may have sliced,
transposed, reshaped and merged dimensions on the way. A `IndexMap` is a pair of such views visited
together, element by element. `onto` rewrites it as boxes of any row-major shape laid over the
storage that is read: the dimensions of a checkpoint tensor, or a grid that fits several views.
Integers only; no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_BOXES = 65_536


class TooFragmented(ValueError):
    """A walk that only more than `MAX_BOXES` boxes describe."""


class Geometry(NamedTuple):
    """A view of a flat storage, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def span(self) -> tuple[int, int]:
        """The half-open interval of the storage that it lies in."""
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + last + 1 if self.numel else self.offset


class Loop(NamedTuple):
    """`times` steps, `read` elements apart in the storage that is read and `write` in the other."""

    times: int
    read: int
    write: int


class IndexMap(NamedTuple):
    """The element pairs (read + sum i*loop.read, write + sum i*loop.write) over all loop indices i."""

    read: int
    write: int
    loops: tuple[Loop, ...]

    @classmethod
    def between(cls, read: Geometry, write: Geometry) -> IndexMap:
        """Visit two views of one size together."""
        loops = tuple(map(Loop._make, zip(read.size, read.stride, write.stride, strict=True)))
        return cls(read.offset, write.offset, loops)

    @classmethod
    def over(cls, geometry: Geometry) -> IndexMap:
        """Visit one view; what is written is its own elements, counted row-major."""
        return cls.between(geometry, Geometry(0, geometry.size, row_major(geometry.size)))

    @property
    def numel(self) -> int:
        return math.prod([loop.times for loop in self.loops])

    @property
    def reads(self) -> Geometry:
        return Geometry(self.read, tuple(x.times for x in self.loops), tuple(x.read for x in self.loops))

    @property
    def writes(self) -> Geometry:
        return Geometry(self.write, tuple(x.times for x in self.loops), tuple(x.write for x in self.loops))

    def turned(self) -> IndexMap:
        """Read what was written, write what was read."""
        return IndexMap(self.write, self.read, tuple(Loop(n, w, r) for n, r, w in self.loops))

    def simplified(self) -> IndexMap:
        """The same pairs with the longest stride read first, and as few loops as possible."""
        loops = [loop for loop in self.loops if loop.times != 1]
        if len(loops) > 1:
            loops.sort(key=lambda loop: (-loop.read, -loop.write))
            merged = loops[:1]
            for inner in loops[1:]:
                outer = merged[-1]
                if outer.read == inner.times * inner.read and outer.write == inner.times * inner.write:
                    merged[-1] = Loop(outer.times * inner.times, inner.read, inner.write)
                else:
                    merged.append(inner)
            loops = merged
        return IndexMap(self.read, self.write, tuple(loops))


class BoxMapping(NamedTuple):
    """A strided box of the shape that is read, and where its elements are written.

    The element i steps into the box goes to `write + sum(i[d] * stride[d])`.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    step: tuple[int, ...]
    write: int
    stride: tuple[int, ...]

    def walk(self, shape: Sequence[int]) -> IndexMap:
        """Back to a walk over the row-major storage of `shape`."""
        weights = row_major(shape)
        read = sum(a * w for a, w in zip(self.start, weights, strict=True))
        loops = zip(self.size, self.step, weights, self.stride, strict=True)
        return IndexMap(read, self.write, tuple(Loop(n, s * w, t) for n, s, w, t in loops if n != 1))

    def cut(self, start: tuple[int, ...], count: tuple[int, ...]) -> BoxMapping:
        """The part that begins at index `start` of the shape (unit steps)."""
        skipped = sum((b - a) * s for a, b, s in zip(self.start, start, self.stride, strict=True))
        return BoxMapping(start, count, self.step, self.write + skipped, self.stride)

    def without(self, start: tuple[int, ...], count: tuple[int, ...]) -> list[BoxMapping]:
        """What is left when a box that lies inside is taken out (unit steps)."""
        left: list[BoxMapping] = []
        lo, size = list(self.start), list(self.size)
        for d, (a, n) in enumerate(zip(start, count, strict=True)):
            if lo[d] < a:
                left.append(self.cut(tuple(lo), (*size[:d], a - lo[d], *size[d + 1 :])))
            if a + n < lo[d] + size[d]:
                after = (*lo[:d], a + n, *lo[d + 1 :])
                left.append(self.cut(after, (*size[:d], lo[d] + size[d] - a - n, *size[d + 1 :])))
            lo[d], size[d] = a, n
        return left


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def grid(numel: int, strides: Iterable[int]) -> tuple[int, ...]:
    """A shape of at least `numel` elements in which views with these strides are few boxes.

    Strides that do not divide one another cannot all be axes; `onto` unrolls the loops of the others.
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


def common_box(a: BoxMapping, b: BoxMapping) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Start and count of the indices in both (unit steps), or None."""
    start, count = [], []
    for x, n, y, m in zip(a.start, a.size, b.start, b.size, strict=True):
        lo, hi = max(x, y), min(x + n, y + m)
        if hi <= lo:
            return None
        start.append(lo)
        count.append(hi - lo)
    return tuple(start), tuple(count)


def onto(walk: IndexMap, shape: Sequence[int], *, unit_steps: bool = False) -> list[BoxMapping]:
    """The walk as boxes of `shape`, whose row-major storage it reads.

    A loop that walks on past the end of a dimension is split there; of two loops along one dimension
    the outer one is unrolled, as is one that no dimension fits, and one that stands still (an
    expanded dimension). With `unit_steps` the boxes have no gaps.

    Raises TooFine for more than `MAX_BOXES` boxes.
    """
    if any(loop.times == 0 for loop in walk.loops):
        return []
    weights = row_major(shape)
    rank = len(shape)
    done: list[BoxMapping] = []
    todo = [walk.simplified()]
    while todo:
        read, write, loops = todo.pop()
        digits = [read // w % n if d else read // w for d, (w, n) in enumerate(zip(weights, shape, strict=True))]
        along: dict[int, Loop] = {}
        parts: list[IndexMap] | None = None
        for loop in loops:
            count, stride, _ = loop
            axis = next((d for d in range(rank) if weights[d] <= stride), rank)
            if axis == rank or stride % weights[axis]:
                parts = _unrolled(read, write, loops, loop)
                break
            step = stride // weights[axis]
            if axis in along:
                parts = _unrolled(read, write, loops, along[axis])
            elif digits[axis] + (count - 1) * step >= shape[axis]:
                parts = _split(read, write, loops, loop, digits[axis], step, shape[axis])
            elif unit_steps and step != 1:
                parts = _unrolled(read, write, loops, loop)
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
            count_of[axis], step_of[axis], stride_of[axis] = (
                loop.times,
                loop.read // weights[axis],
                loop.write,
            )
        done.append(BoxMapping(tuple(digits), tuple(count_of), tuple(step_of), write, tuple(stride_of)))
    return done


def _unrolled(read: int, write: int, loops: tuple[Loop, ...], loop: Loop) -> list[IndexMap]:
    if loop.times > MAX_BOXES:
        raise TooFragmented(f"more than {MAX_BOXES} boxes")
    rest = tuple(x for x in loops if x is not loop)
    return [IndexMap(read + i * loop.read, write + i * loop.write, rest) for i in range(loop.times)]


def _split(
    read: int, write: int, loops: tuple[Loop, ...], loop: Loop, digit: int, step: int, extent: int
) -> list[IndexMap]:
    """Cut a loop where it leaves its dimension: whole rows as a loop of their own, or the first row."""

    def part(first: int, *instead: Loop) -> IndexMap:
        others = [x for x in loops if x is not loop] + [x for x in instead if x.times > 1]
        others.sort(key=lambda x: -x.read)
        return IndexMap(read + first * loop.read, write + first * loop.write, tuple(others))

    a_row = extent // step
    if digit < step and extent % step == 0 and loop.times >= a_row:
        rows = loop.times // a_row
        parts = [part(0, Loop(rows, a_row * loop.read, a_row * loop.write), loop._replace(times=a_row))]
        cut = rows * a_row
    else:
        cut = -(-(extent - digit) // step)
        parts = [part(0, loop._replace(times=cut))]
    if loop.times > cut:
        parts.append(part(cut, loop._replace(times=loop.times - cut)))
    return parts
