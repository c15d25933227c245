"""Checksums on one GPU: one kernel launch for all views that are alike, which reads each element once."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.landings.checked.coefficients import WORD_BYTES, ColumnCoefficients
from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)

_LOAD_BYTES = 16  # of a thread's widest load
_TILE, _WIDE, _NARROW = 2048, 512, 64  # units of a tile, and its columns
_STEPS = 16  # tiles of a program, one below the other
_NAN_BITS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}  # of the dtypes that are cast
_UNITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}  # by bytes


class _Kind(NamedTuple):
    """A variant of the kernel, which Triton compiles.

    source    dtype of a unit in memory
    target    dtype whose bits are summed
    nan       bits of all NaNs; 0 if the bits are those in memory
    per_word  units of a 32-bit word, which share a coefficient
    vector    units that one instruction loads
    """

    source: torch.dtype
    target: torch.dtype
    nan: int
    per_word: int
    contiguous: bool
    vector: int


class _Extent(NamedTuple):
    """Rows of a view, in two dimensions, and its columns. Strides are in units."""

    rows: int
    inner: int
    columns: int
    outer_stride: int
    inner_stride: int
    column_stride: int


def kernel_sums(
    views: Sequence[torch.Tensor], cast: torch.dtype | None, rows: np.ndarray, columns: ColumnCoefficients
) -> torch.Tensor | None:
    """Starts to sum up views of one shape, one dtype and the same strides, on one GPU.

    Returns int64 [views], as `checksum.sum_words` does. None if the kernel cannot read such views, or if Triton cannot
    be used.

    cast  dtype to which an update converts the elements; None if it does not
    rows  uint64, a coefficient for each row
    """
    device = views[0].device
    addresses = np.array([view.data_ptr() for view in views], np.int64)
    found = _read_as(views[0], cast, addresses, columns.packed)
    if found is None or not runtime().reachable_by_kernels(views[0], device) or not can_compile(device):
        return None
    return _sum(device, addresses, *found, np.concatenate([rows, columns.values]).view(np.int64))


def _read_as(
    view: torch.Tensor, cast: torch.dtype | None, addresses: np.ndarray, packed: bool
) -> tuple[_Kind, _Extent] | None:
    """Returns how the kernel reads such a view at any of the addresses; None if it cannot."""
    levels = _levels(view)
    if levels is None:
        return None
    inner, *strides = levels
    columns, column_stride, item = view.shape[-1], view.stride(-1), view.element_size()
    per_word = WORD_BYTES // (cast or view.dtype).itemsize if packed else 1
    begin_in_words = not any(stride * item % WORD_BYTES for stride in strides) and not (addresses % WORD_BYTES).any()
    if cast:
        if view.dtype not in _NAN_BITS or cast not in _NAN_BITS:
            return None
        source, target = view.dtype, cast
    elif (packed or item > WORD_BYTES) and column_stride == 1 and begin_in_words:
        source = target = torch.uint32
        columns, per_word = columns * item // WORD_BYTES, 1
        strides = [stride * item // WORD_BYTES for stride in strides]
    elif item > WORD_BYTES:
        return None
    else:
        source = target = _UNITS[item]
    vector = _LOAD_BYTES // source.itemsize
    if column_stride != 1 or any(n % vector for n in (columns, *strides)) or (addresses % _LOAD_BYTES).any():
        vector = 1
    extent = _Extent(math.prod(view.shape[:-1]), inner, columns, strides[0], strides[1], column_stride)
    nan = _NAN_BITS[cast] if cast else 0
    return _Kind(source, target, nan, per_word, column_stride == 1, vector), extent


def _levels(view: torch.Tensor) -> tuple[int, int, int] | None:
    """Returns (inner, outer stride, inner stride): row r begins at r // inner and r % inner times these strides.

    None if the rows have more than two dimensions with separate strides.
    """
    found: list[tuple[int, int]] = []  # size and stride of dimensions, the last one first
    for size, stride in zip(view.shape[-2::-1], view.stride()[-2::-1], strict=True):
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0] * size, found[-1][1])
        elif size > 1:
            found.append((size, stride))
    if len(found) > 2:
        return None
    (inner, inner_stride), (_, outer_stride) = [*found, (1, 0), (1, 0)][:2]
    return inner, outer_stride, inner_stride


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Returns whether Triton can be used; warns if it cannot, as on a host without a C compiler."""
    one = torch.ones(1, 1, dtype=torch.int32, device=device)
    kind, extent = _Kind(torch.uint32, torch.uint32, 0, 1, True, 1), _Extent(1, 1, 1, 0, 0, 1)
    try:
        _sum(device, np.array([one.data_ptr()]), kind, extent, np.ones(2, np.int64))
    except Exception as error:  # Triton's, a C compiler's, the file system's that it keeps its kernels in
        logger.warning("torch computes checksums on %s, which is slow: Triton cannot be used: %s", device, error)
        return False
    return True


def _sum(
    device: torch.device, addresses: np.ndarray, kind: _Kind, extent: _Extent, coefficients: np.ndarray
) -> torch.Tensor:
    # Where nothing runs on a GPU, Triton is not imported.
    from sglang_reshard.landings.checked.checksum_kernel import launch

    table = torch.from_numpy(np.concatenate([[len(addresses), *extent], addresses, coefficients])).to(device)
    sums = torch.zeros(len(addresses), dtype=torch.int64, device=device)
    tile_columns = _NARROW if extent.columns <= _NARROW else _WIDE
    tile_rows = _TILE // tile_columns
    programs = len(addresses) * -(-extent.columns // tile_columns) * -(-extent.rows // (tile_rows * _STEPS))
    dtypes = [str(dtype).removeprefix("torch.") for dtype in kind[:2]]
    tile = (tile_rows, tile_columns, _STEPS)
    with runtime().using(device):
        launch(table, sums, programs, *dtypes, *kind[2:], *tile, 1 + len(extent))
    return sums
