"""Describes copies by tables of numbers, from which one kernel launch makes thousands of them.

    launches, rest = launches_of(pairs)

A pair of views becomes boxes: rows of columns, at any distance on either side. Equal dtypes are copied as integers of
the widest unit, up to 16 bytes, that all addresses, strides and lengths are divisible by. Where that is narrow, aligned
words of the source are shifted into aligned words of the destination. A cast is made element by element. Boxes are cut
into tiles of bounded size, so that small boxes and large ones occupy a GPU alike. Tiles of one kind are one launch.
Needs no GPU and no Triton: `copy_kernel` runs the tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.copying.host_copies import Dimension, Pair, merged_dimensions

# Numbers of a box, in this order: address of the source, of the destination; sizes of the middle and of the last of
# three dimensions of rows; rows, columns; strides of these three in the source, in the destination; strides of a column
# in the source, in the destination. Addresses are in bytes, all others in units. A unit of shifted boxes is a byte.
FIELDS = 14

CASTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # from and to each other
_WIDEST = 16  # bytes that a thread moves by one instruction
_UNITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
_ROW_DIMENSIONS = 3
_WORD = 8  # bytes that shifted boxes are read and written by
_SHIFTED_BYTES = 256  # of a row, from which it is worth it: the bytes at the ends of a row are copied one by one
_NARROW = 2  # bytes of a unit, up to which it is worth it
_TRANSPOSED_ROWS = 16  # from which it is worth to have them in tiles of their own
_MAX_ROWS = 1 << 30  # the kernel numbers them in 32 bits


class TileKind(NamedTuple):
    """The variant that the kernel is compiled for.

    source, destination  names of dtypes; equal unless it casts
    vector               units that a thread moves by one instruction
    way                  "rows": columns are contiguous on both sides
                         "shifted": so they are, in bytes, which are not aligned alike on both sides
                         "transposed": rows are contiguous in the source, and columns in the destination
                         "strided": anything else
    rows, columns        of a tile, powers of two; of shifted ones columns are words
    """

    source: str
    destination: str
    vector: int
    way: str
    rows: int
    columns: int

    def tiles_of(self, boxes: np.ndarray) -> np.ndarray:
        """Returns the number of tiles of each box."""
        last, rows, columns = boxes[:, 3], boxes[:, 4], boxes[:, 5]
        across = -(-(columns // _WORD if self.way == "shifted" else columns) // self.columns)
        down = rows // last * -(-last // self.rows) if self.way == "transposed" else -(-rows // self.rows)
        counts: np.ndarray = down * across
        return counts


class Launch(NamedTuple):
    """One launch: boxes, FIELDS numbers each, and tiles, each the number of a box << 32 | its number in the box."""

    kind: TileKind
    boxes: np.ndarray
    tiles: np.ndarray


class Tiling(NamedTuple):
    """Sizes of tiles.

    nbytes           16 KiB are eight 16-byte loads of each of 128 threads: enough under way to hide the latency of
                     another GPU's memory, with enough tiles for all multiprocessors
    elements         at most, as narrow units take as many instructions as wide ones
    strided_columns  at most where columns are not contiguous: a tile of as many rows as columns reads and writes whole
                     cache lines, even if one side is transposed
    run              tiles that follow one another stay together; these runs are shuffled, so that engine ranks that
                     read from the same trainer ranks do not all read from the same one at a time
    max_rows         of a box
    """

    nbytes: int = 16 << 10
    elements: int = 4096
    strided_columns: int = 64
    run: int = 64
    max_rows: int = _MAX_ROWS


DEFAULT_TILING = Tiling()


def launches_of(pairs: Iterable[Pair], tiling: Tiling = DEFAULT_TILING) -> tuple[list[Launch], list[Pair]]:
    """Returns launches that make the copies, and the pairs that the kernel does not know."""
    boxes: dict[TileKind, list[tuple[int, ...]]] = {}
    rest = []
    for destination, source in pairs:
        if destination.shape != source.shape or not _is_known(destination, source):
            rest.append((destination, source))
        elif destination.numel():
            for kind, box in _boxes_of(destination, source, tiling):
                boxes.setdefault(kind, []).append(box)
    launches = [_launch(kind, np.array(found, np.int64), tiling.run) for kind, found in sorted(boxes.items())]
    return launches, rest


def _is_known(destination: torch.Tensor, source: torch.Tensor) -> bool:
    if destination.dtype == source.dtype:
        return True
    aligned = all(t.data_ptr() % t.element_size() == 0 for t in (destination, source))
    return aligned and destination.dtype in CASTS and source.dtype in CASTS


def _boxes_of(
    destination: torch.Tensor, source: torch.Tensor, tiling: Tiling
) -> Iterator[tuple[TileKind, tuple[int, ...]]]:
    dimensions, run = merged_dimensions(tuple(source.shape), source.stride(), destination.stride())
    from_bytes, to_bytes = source.element_size(), destination.element_size()
    from_address, to_address = source.data_ptr(), destination.data_ptr()
    dtypes, shifted = (str(source.dtype)[6:], str(destination.dtype)[6:]), False
    if source.dtype == destination.dtype:
        strides = (stride for _, *both in dimensions for stride in both)
        width = math.gcd(_WIDEST, from_address, to_address, *(n * from_bytes for n in (run, *strides)))
        shifted = width <= _NARROW and run * from_bytes >= _SHIFTED_BYTES
        unit = 1 if shifted else min(width, max(_UNITS))
        dtypes = (_UNITS[unit],) * 2
        dimensions = tuple((n, a * from_bytes // unit, b * from_bytes // unit) for n, a, b in dimensions)
        run = run * from_bytes // unit
        from_bytes = to_bytes = unit
    columns: Dimension = (run, 1, 1)
    if run == 1 and dimensions:
        *others, columns = dimensions
        # The source's most contiguous dimension is the last one of rows, so that a tile reads whole cache lines.
        dimensions = tuple(sorted(others, key=lambda dimension: -dimension[1]))
    for from_offset, to_offset, outer in _cut(dimensions, tiling.max_rows):
        rows = ((1, 0, 0),) * (_ROW_DIMENSIONS - len(outer)) + tuple(outer)
        at = from_address + from_offset * from_bytes, to_address + to_offset * to_bytes
        if shifted:
            kind = _shifted_kind(run, tiling)
        else:
            first = at[0] // from_bytes, at[1] // to_bytes
            kind = _kind(dtypes, max(from_bytes, to_bytes), first, rows, columns, tiling)
        (_, a0, b0), (n1, a1, b1), (n2, a2, b2) = rows
        count = math.prod(n for n, _, _ in rows)
        yield kind, (*at, n1, n2, count, columns[0], a0, a1, a2, b0, b1, b2, *columns[1:])


def _shifted_kind(nbytes: int, tiling: Tiling) -> TileKind:
    words = tiling.nbytes // 2 // _WORD  # half: each word takes twice the loads and the registers
    columns = _tile_columns(nbytes // _WORD, words)
    return TileKind("uint64", "uint64", 1, "shifted", words // columns, columns)


def _kind(
    dtypes: tuple[str, str],
    nbytes: int,
    first: tuple[int, int],
    rows: Sequence[Dimension],
    columns: Dimension,
    tiling: Tiling,
) -> TileKind:
    """Returns the kind of a box whose units have `nbytes` bytes, and which begins at units `first` on both sides."""
    run, *steps = columns
    *_, (last, a, b) = rows
    strides = [stride for _, *both in rows[:-1] for stride in both]
    divisible: tuple[int, ...]
    if steps == [1, 1]:
        way, divisible = "rows", (run, a, b)
    elif a == 1 and steps[1] == 1 and last >= _TRANSPOSED_ROWS:
        way, divisible = "transposed", (run, last, steps[0], b)
    else:
        way, divisible = "strided", (1,)
    vector = math.gcd(_WIDEST // nbytes, *first, *strides, *divisible)
    elements = min(tiling.nbytes // nbytes, tiling.elements)
    if way == "transposed" and vector == 1:
        elements //= 2  # each takes twice the registers
    across = _tile_columns(run, elements if way == "rows" else min(elements, tiling.strided_columns))
    down = elements // across
    if way == "transposed":
        down = _tile_columns(last, down)
        across = _tile_columns(run, elements // down)  # more, if there are few rows
    return TileKind(*dtypes, vector, way, down, across)


@lru_cache(maxsize=4096)
def _tile_columns(columns: int, most: int) -> int:
    """Returns the most columns of a tile, of few choices, that leave at most a quarter of it unused, if any do."""
    choices = [most >> shift for shift in range(10) if most >> shift >= min(most, 8)]
    covered = {choice: -(-columns // choice) * choice for choice in choices}
    return next((c for c in choices if 3 * covered[c] <= 4 * columns), min(choices, key=covered.__getitem__))


def _cut(dimensions: Sequence[Dimension], max_rows: int) -> Iterator[tuple[int, int, Sequence[Dimension]]]:
    """Yields offsets, in the source and in the destination, and dimensions of parts that a box can describe."""
    if len(dimensions) > _ROW_DIMENSIONS:
        shortest = min(range(len(dimensions)), key=lambda i: dimensions[i][0])
        n, a, b = dimensions[shortest]
        parts = [(i, [*dimensions[:shortest], *dimensions[shortest + 1 :]]) for i in range(n)]
    elif math.prod(n for n, _, _ in dimensions) > max_rows:
        longest = max(range(len(dimensions)), key=lambda i: dimensions[i][0])
        n, a, b = dimensions[longest]
        halves = ((0, n // 2), (n // 2, n - n // 2))
        parts = [(i, [*dimensions[:longest], (m, a, b), *dimensions[longest + 1 :]]) for i, m in halves]
    else:
        yield 0, 0, dimensions
        return
    for i, part in parts:
        for from_offset, to_offset, outer in _cut(part, max_rows):
            yield i * a + from_offset, i * b + to_offset, outer


def _launch(kind: TileKind, boxes: np.ndarray, run: int) -> Launch:
    counts = kind.tiles_of(boxes)
    numbers = np.arange(len(boxes))
    tiles = (np.repeat(numbers, counts) << 32) + np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    runs = np.array_split(tiles, np.arange(run, len(tiles), run))
    order = np.random.default_rng(0).permutation(len(runs))
    return Launch(kind, boxes, np.concatenate([runs[i] for i in order]))
