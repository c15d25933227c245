"""The numbers that elements are multiplied by, from where they are in the whole tensor. Without torch.

Weights are odd and pseudo-random: splitmix64 of an index, with the lowest bit set. Everything is modulo 2^64.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from sglang_reshard.layout.regions import Region

MODULUS = 1 << 64
WORD_BYTES = 4  # of rows, which get one weight
_LOOKED_UP = 1 << 20  # weights of smaller indices are in a table: 8 MiB each for rows and columns
_ROWS, _COLUMNS, _TENSORS = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0  # digits of pi: no two alike
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)


class Columns(NamedTuple):
    """Weights of a run of columns.

    weights  uint64, one for each unit: an element of up to 32 bits, or half of one of 64 bits; or, where `packed`,
             a 32-bit word of two or four elements
    total    what the run's elements add up to when the bits of each (of each half, where there are 64) are 1
    packed   whether the run consists of whole words, so that no element needs to be looked at by itself
    """

    weights: np.ndarray
    total: int
    packed: bool


def of_tensors(numbers: np.ndarray) -> np.ndarray:
    """uint64, one for each number of a tensor."""
    return _mixed(numbers, _TENSORS)


def of_rows(shape: tuple[int, ...], region: Region) -> np.ndarray:
    """Weights of the rows of a region, in its order.

    shape  of the whole tensor; a row is all that has one index in the dimensions before the last, and its number is
           that index in row-major order
    """
    lead = len(shape) - 1
    pitches = [math.prod(shape[d + 1 : lead]) for d in range(lead)]
    if lead == 1:
        return _looked_up(_ROWS, region.start[0], region.count[0], region.step[0])
    numbers = np.zeros(1, np.int64)
    for d in range(lead):
        along = (region.start[d] + region.step[d] * np.arange(region.count[d], dtype=np.int64)) * pitches[d]
        numbers = (numbers[:, None] + along).reshape(-1)
    if numbers.size and numbers[-1] < _LOOKED_UP:
        return _table(_ROWS)[numbers]
    return _mixed(numbers, _ROWS)


def of_columns(first: int, count: int, step: int, item_bytes: int) -> Columns:
    """Weights of `count` columns, `step` apart, of elements of `item_bytes`.

    A row's bytes are cut into 32-bit words; the element at byte `b` has the weight of word `b // 4`, times 256 to
    the power of `b % 4`. So a word has one weight, whether its elements are looked at together or one by one.
    """
    if item_bytes > WORD_BYTES:
        words = item_bytes // WORD_BYTES
        columns = first + step * np.arange(count, dtype=np.int64)
        weights = _mixed((columns[:, None] * words + np.arange(words)).reshape(-1), _COLUMNS)
    elif item_bytes == WORD_BYTES:
        weights = _looked_up(_COLUMNS, first, count, step)
    elif step == 1 and first * item_bytes % WORD_BYTES == 0 and count * item_bytes % WORD_BYTES == 0:
        words = count * item_bytes // WORD_BYTES
        weights = _looked_up(_COLUMNS, first * item_bytes // WORD_BYTES, words, 1)
        lanes = sum(1 << 8 * byte for byte in range(0, WORD_BYTES, item_bytes))
        return Columns(weights, total(weights) * lanes % MODULUS, packed=True)
    else:
        at = (first + step * np.arange(count, dtype=np.int64)) * item_bytes
        weights = _mixed(at // WORD_BYTES, _COLUMNS) << (at % WORD_BYTES * 8).astype(np.uint64)
    return Columns(weights, total(weights), packed=False)


def total(weights: np.ndarray) -> int:
    """Their sum modulo 2^64."""
    return int(weights.sum(dtype=np.uint64))


def _looked_up(salt: int, first: int, count: int, step: int) -> np.ndarray:
    stop = first + (count - 1) * step + 1
    if count and stop <= _LOOKED_UP:
        return _table(salt)[first:stop:step]
    return _mixed(first + step * np.arange(count, dtype=np.int64), salt)


@functools.cache
def _table(salt: int) -> np.ndarray:
    table = _mixed(np.arange(_LOOKED_UP), salt)
    table.flags.writeable = False
    return table


def _mixed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """splitmix64 of each number, odd."""
    x = (numbers.astype(np.uint64) + _ONE) * _GOLDEN + np.uint64(salt)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | _ONE
