"""Computes the factors of elements, from their position in the whole tensor. Without torch.

Coefficients are odd and pseudo-random: splitmix64 of an index, with the lowest bit set. All arithmetic is modulo 2^64.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from sglang_reshard.layout.regions import Region

MODULUS = 1 << 64
WORD_BYTES = 4  # of a row, which share a coefficient
_TABLE_SIZE = 1 << 20  # coefficients of smaller indices are looked up: 8 MiB each for rows and columns
_ROWS, _COLUMNS, _TENSORS = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0  # digits of pi: no two alike
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)


class ColumnCoefficients(NamedTuple):
    """Coefficients of a run of columns.

    values  uint64, one per unit: an element of up to 32 bits, or half of one of 64 bits; or, if `packed`, a 32-bit word
            of two or four elements
    total   sum of the run's elements if the bits of each (of each half, for 64 bits) are 1
    packed  True if the run consists of whole words, so that elements need not be read one by one
    """

    values: np.ndarray
    total: int
    packed: bool


def tensor_coefficients(numbers: np.ndarray) -> np.ndarray:
    """Returns uint64, one per tensor number."""
    return _mixed(numbers, _TENSORS)


def row_coefficients(shape: tuple[int, ...], region: Region) -> np.ndarray:
    """Returns uint64, one per row of a region of a tensor of `shape`, in the region's order."""
    lead = len(shape) - 1
    pitches = [math.prod(shape[d + 1 : lead]) for d in range(lead)]
    if lead == 1:
        return _looked_up(_ROWS, region.start[0], region.count[0], region.step[0])
    numbers = np.zeros(1, np.int64)
    for d in range(lead):
        along = (region.start[d] + region.step[d] * np.arange(region.count[d], dtype=np.int64)) * pitches[d]
        numbers = (numbers[:, None] + along).reshape(-1)
    if numbers.size and numbers[-1] < _TABLE_SIZE:
        return _table(_ROWS)[numbers]
    return _mixed(numbers, _ROWS)


def column_coefficients(first: int, count: int, step: int, item_bytes: int) -> ColumnCoefficients:
    """Returns the coefficients of `count` columns, `step` apart, of elements of `item_bytes`.

    A row's bytes are divided into 32-bit words. The element at byte `b` has the coefficient of word `b // 4`, times
    256 to the power of `b % 4`, so that a word has the same sum if its elements are read together or one by one.
    """
    if item_bytes > WORD_BYTES:
        words = item_bytes // WORD_BYTES
        columns = first + step * np.arange(count, dtype=np.int64)
        values = _mixed((columns[:, None] * words + np.arange(words)).reshape(-1), _COLUMNS)
    elif item_bytes == WORD_BYTES:
        values = _looked_up(_COLUMNS, first, count, step)
    elif step == 1 and first * item_bytes % WORD_BYTES == 0 and count * item_bytes % WORD_BYTES == 0:
        words = count * item_bytes // WORD_BYTES
        values = _looked_up(_COLUMNS, first * item_bytes // WORD_BYTES, words, 1)
        elements = sum(1 << 8 * byte for byte in range(0, WORD_BYTES, item_bytes))
        return ColumnCoefficients(values, total(values) * elements % MODULUS, packed=True)
    else:
        at = (first + step * np.arange(count, dtype=np.int64)) * item_bytes
        values = _mixed(at // WORD_BYTES, _COLUMNS) << (at % WORD_BYTES * 8).astype(np.uint64)
    return ColumnCoefficients(values, total(values), packed=False)


def total(values: np.ndarray) -> int:
    """Returns the sum modulo 2^64."""
    return int(values.sum(dtype=np.uint64))


def _looked_up(salt: int, first: int, count: int, step: int) -> np.ndarray:
    stop = first + (count - 1) * step + 1
    if count and stop <= _TABLE_SIZE:
        return _table(salt)[first:stop:step]
    return _mixed(first + step * np.arange(count, dtype=np.int64), salt)


@functools.cache
def _table(salt: int) -> np.ndarray:
    table = _mixed(np.arange(_TABLE_SIZE), salt)
    table.flags.writeable = False
    return table


def _mixed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """Returns splitmix64 of each number, with the lowest bit set."""
    x = (numbers.astype(np.uint64) + _ONE) * _GOLDEN + np.uint64(salt)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | _ONE
