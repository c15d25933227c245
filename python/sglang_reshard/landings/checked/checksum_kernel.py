"""The Triton kernel that sums up views of tensors (`kernel_sums`). Imported only where checksums run on a GPU.

Without type annotations but for constants: Triton reads them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_reshard.copying.copy_kernel import cast_values

WARPS = 4


def launch(table: torch.Tensor, sums: torch.Tensor, programs: int, source: str, target: str, *constants: Any) -> None:
    """Starts the sums in the current stream of the current device. Dtypes are given by name."""
    sum_tiles[(programs,)](table, sums, getattr(tl, source), getattr(tl, target), *constants, num_warps=WARPS)


@triton.jit
def sum_tiles(  # type: ignore[no-untyped-def]
    table,
    sums,
    from_dtype: tl.constexpr,
    to_dtype: tl.constexpr,
    NAN: tl.constexpr,
    PER_WORD: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Adds to a view's sum the bits of ROWS * STEPS rows and COLUMNS columns, times their coefficients, modulo 2^64.

    table  int64: FIELDS numbers, then the address of each view, the coefficient of each row, and of each word of a row
    sums   int64, one per view
    NAN    bits of all NaNs; 0 if the bits are those in memory

    Everything that is divisible by VECTOR units is said to be so: a thread then loads VECTOR units by one instruction.
    """
    views, rows, inner, columns = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    outer_stride, inner_stride, column_stride = tl.load(table + 4), tl.load(table + 5), tl.load(table + 6)
    row_coefficients = table + FIELDS + views
    column_coefficients = row_coefficients + rows

    across = (columns + COLUMNS - 1) // COLUMNS
    tiles = across * ((rows + ROWS * STEPS - 1) // (ROWS * STEPS))
    view, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first_column, first_row = tile % across * COLUMNS, tile // across * (ROWS * STEPS)

    source = tl.load(table + FIELDS + view).to(tl.pointer_type(tl.uint16 if from_dtype == tl.bfloat16 else from_dtype))
    source = tl.multiple_of(source, VECTOR * from_dtype.primitive_bitwidth // 8) + first_column * column_stride
    column = tl.arange(0, COLUMNS)
    within = column if CONTIGUOUS else column * column_stride
    columns_left = tl.multiple_of(tl.minimum(columns - first_column, COLUMNS).to(tl.int32), VECTOR)
    total = tl.full([ROWS, COLUMNS], 0, tl.int64)
    for step in range(STEPS):
        row = first_row + step * ROWS + tl.arange(0, ROWS)
        at = tl.multiple_of(row // inner * outer_stride + row % inner * inner_stride, VECTOR)
        mask = (row < rows)[:, None] & (column < columns_left)[None, :]
        values = tl.load(source + (at[:, None] + within[None, :]), mask=mask, other=0)
        bits = values
        if NAN:
            if from_dtype != to_dtype:
                bits = cast_values(values, from_dtype, to_dtype)
            if to_dtype != tl.bfloat16:  # whose bits they are
                bits = bits.to(tl.uint32 if to_dtype == tl.float32 else tl.uint16, bitcast=True)
            bits = tl.where(_is_nan(values, from_dtype), NAN, bits.to(tl.int64))
        coefficients = tl.load(row_coefficients + row, mask=row < rows, other=0)
        total += bits.to(tl.int64) * coefficients[:, None]

    word = (first_column + column) // PER_WORD
    coefficients = tl.load(column_coefficients + word, mask=column < columns_left, other=0)
    coefficients = coefficients << ((first_column + column) % PER_WORD * (32 // PER_WORD))
    tl.atomic_add(sums + view, tl.reduce(tl.reduce(total, 0, _plus) * coefficients, 0, _plus), sem="relaxed")


@triton.jit
def _is_nan(values, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return (values & 0x7FFF) > 0x7F80 if dtype == tl.bfloat16 else values != values


@triton.jit
def _plus(a, b):  # type: ignore[no-untyped-def]
    return a + b
