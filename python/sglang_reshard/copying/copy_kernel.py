"""The Triton kernel that makes the copies of a table (`copy_table`). Imported only where copies run on a GPU.

Without type annotations but for constants: Triton reads them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_reshard.copying.copy_table import FIELDS, TileKind

WARPS = 4  # of a tile: with 16 KiB, eight 16-byte loads of each thread are under way at once


@cache
def compile_kernel(kind: TileKind, device: torch.device) -> None:
    """Compiles the kernel of this kind and loads it, by a launch that copies nothing. Takes seconds the first time."""
    nothing = torch.zeros(FIELDS, dtype=torch.int64)
    nothing[[2, 3, 5]] = torch.tensor([1, 1, 8])  # divisors; there are no rows
    launch(kind, nothing.to(device), torch.zeros(1, dtype=torch.int64, device=device))


def launch(kind: TileKind, boxes: torch.Tensor, tiles: torch.Tensor) -> None:
    """Starts the copies of `tiles` in the current stream of the current device."""
    copy_tiles[(tiles.numel(),)](boxes, tiles, *constants(kind), num_warps=WARPS)


def constants(kind: TileKind) -> tuple[Any, ...]:
    """Returns what the kernel is compiled for, in the order of its arguments."""
    return getattr(tl, kind.source), getattr(tl, kind.destination), *kind[2:], FIELDS


@triton.jit
def copy_tiles(  # type: ignore[no-untyped-def]
    boxes,
    tiles,
    from_dtype: tl.constexpr,
    to_dtype: tl.constexpr,
    VECTOR: tl.constexpr,
    WAY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Copies one tile of one box: `tiles` has the number of the box in its upper half, of the tile in its lower half.

    Everything that is divisible by VECTOR elements is said to be so: a thread then moves VECTOR elements by one
    instruction. No other tile uses the same bytes, so caches are told to evict them first.
    """
    packed = tl.load(tiles + tl.program_id(0))
    box = boxes + (packed >> 32) * FIELDS
    tile = (packed & 0x7FFFFFFF).to(tl.int32)
    middle, last = tl.load(box + 2).to(tl.int32), tl.load(box + 3).to(tl.int32)
    rows, columns = tl.load(box + 4), tl.load(box + 5)

    # 32 bits are enough for rows and tiles, which are divided, and for columns within a tile. All else has 64.
    units = columns // 8 if WAY == "shifted" else columns
    tiles_across = ((units + COLUMNS - 1) // COLUMNS).to(tl.int32)
    first_column = (tile % tiles_across).to(tl.int64) * COLUMNS
    if WAY == "transposed":  # rows are contiguous in the source, so a tile ends where they do
        last = tl.multiple_of(last, VECTOR)
        tiles_down = (last + ROWS - 1) // ROWS
        inner = tile // tiles_across % tiles_down * ROWS + tl.arange(0, ROWS)
        outer = tile // tiles_across // tiles_down
        in_box = inner < tl.where(rows > 0, last, 0)  # a block & a scalar is no mask in Triton 3.9's interpreter
    else:
        row = tile // tiles_across * ROWS + tl.arange(0, ROWS)
        inner, outer = row % last, row // last
        in_box = row < rows
    i0, i1, i2 = (outer // middle).to(tl.int64), (outer % middle).to(tl.int64), inner.to(tl.int64)
    from_row = i0 * tl.load(box + 6) + i1 * tl.load(box + 7)
    to_row = i0 * tl.load(box + 9) + i1 * tl.load(box + 10)
    if WAY == "transposed":
        from_row = tl.multiple_of(from_row, VECTOR) + i2
    else:
        from_row = tl.multiple_of(from_row + i2 * tl.load(box + 8), VECTOR)
    to_row = tl.multiple_of(to_row + i2 * tl.load(box + 11), VECTOR)

    if WAY == "shifted":
        _copy_shifted(tl.load(box) + from_row, tl.load(box + 1) + to_row, columns, first_column, in_box, COLUMNS)
    else:
        source = tl.load(box).to(tl.pointer_type(tl.uint16 if from_dtype == tl.bfloat16 else from_dtype))
        destination = tl.load(box + 1).to(tl.pointer_type(tl.uint16 if to_dtype == tl.bfloat16 else to_dtype))
        source = tl.multiple_of(source, VECTOR * from_dtype.primitive_bitwidth // 8)
        destination = tl.multiple_of(destination, VECTOR * to_dtype.primitive_bitwidth // 8)
        column = tl.arange(0, COLUMNS)
        columns_left = tl.multiple_of(tl.minimum(columns - first_column, COLUMNS).to(tl.int32), VECTOR)
        mask = in_box[:, None] & (column < columns_left)[None, :]
        from_column, to_column = column, column
        if WAY == "rows":
            source += first_column
        else:
            from_step = tl.multiple_of(tl.load(box + 12), VECTOR)
            source += first_column * from_step
            from_column = column.to(tl.int64) * from_step
        if WAY == "strided":
            to_step = tl.load(box + 13)
            destination += first_column * to_step
            to_column = column.to(tl.int64) * to_step
        else:
            destination += first_column
        values = tl.load(source + (from_row[:, None] + from_column[None, :]), mask=mask, eviction_policy="evict_first")
        if from_dtype != to_dtype:
            values = cast_values(values, from_dtype, to_dtype)
        tl.store(destination + (to_row[:, None] + to_column[None, :]), values, mask=mask, eviction_policy="evict_first")


@triton.jit
def _copy_shifted(source, destination, nbytes, first_word, in_box, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies words of rows of `nbytes` bytes, at any addresses: aligned words of the destination are written.

    Each has the bytes of two neighbouring words of the source, which are read as aligned words, too. A word that has
    one byte of a row can be read, as no page and no allocation ends within it.

    source, destination  addresses of rows
    """
    lead = -destination & 7  # bytes before a row's first word
    words = (nbytes - lead) // 8
    word = tl.arange(0, WORDS)
    mask = in_box[:, None] & (word[None, :] < tl.minimum(words - first_word, WORDS).to(tl.int32)[:, None])
    begin = source + lead
    shift = ((begin & 7) * 8).to(tl.uint64)[:, None]
    read = ((begin & -8) + first_word * 8).to(tl.pointer_type(tl.uint64))[:, None] + word[None, :]
    write = (destination + lead + first_word * 8).to(tl.pointer_type(tl.uint64))[:, None] + word[None, :]
    low = tl.load(read, mask=mask, eviction_policy="evict_first")
    high = tl.load(read + 1, mask=mask & (shift > 0), eviction_policy="evict_first")
    tl.store(write, low >> shift | high << 1 << (63 - shift), mask=mask, eviction_policy="evict_first")

    if first_word == 0:
        _copy_ends(source, destination, nbytes, in_box)


@triton.jit
def _copy_ends(source, destination, nbytes, in_box):  # type: ignore[no-untyped-def]
    """Copies the bytes of rows before their first aligned word, and after their last one, one by one."""
    byte = tl.arange(0, 16)[None, :]  # the first eight, and the last eight
    at = tl.where(byte < 8, byte, nbytes - 16 + byte)
    lead, tail = -destination & 7, (destination + nbytes) & 7
    is_end = tl.where(byte < 8, byte < lead[:, None], byte >= (16 - tail)[:, None])
    mask = in_box[:, None] & is_end
    values = tl.load(source.to(tl.pointer_type(tl.uint8))[:, None] + at, mask=mask)
    tl.store(destination.to(tl.pointer_type(tl.uint8))[:, None] + at, values, mask=mask)


@triton.jit
def cast_values(values, from_dtype: tl.constexpr, to_dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Casts as torch does: by way of float32, rounding to nearest, ties to even."""
    if from_dtype == tl.bfloat16:
        values = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        values = values.to(tl.float32)
    if to_dtype == tl.bfloat16:
        # In integers, as Triton's interpreter truncates: the upper half, and a carry from the lower one. A NaN must not
        # become infinity.
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        values = tl.where(values == values, rounded, (bits >> 16) | 0x40).to(tl.uint16)
    else:
        values = values.to(to_dtype)
    return values
