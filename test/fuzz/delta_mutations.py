"""Damages deltas as chance, a broken sender, or somebody who knows the format would; and says what is left of them.

The reference that says what a delta means is written down from the format alone, element by element.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import numpy as np

BLOCK = 1 << 16
SAME, POSITIONS, MASK, WHOLE = range(4)
_INTEGERS = (-1, 0, 1, 2, 3, 4, 5, BLOCK - 1, BLOCK, BLOCK + 1, (1 << 31) - 1, -(1 << 31), (1 << 31), 1 << 32)
_LARGE = (*_INTEGERS, (1 << 63) - 1, -(1 << 63), 1 << 48, 1 << 33)


class Shape(NamedTuple):
    """Units of each message, their bytes, and the bytes of a number in the table."""

    units: tuple[int, ...]
    unit_bytes: int
    number_bytes: int


class Described(NamedTuple):
    """What a table says of one message: the places of its parts are in an index, and in values."""

    kind: int
    changed: int
    index: int
    values: int


def aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def described(shape: Shape, table: bytes) -> list[Described] | None:
    """What a table says; None if it says what no table does."""
    rows = np.frombuffer(table, f"<i{shape.number_bytes}").reshape(-1, 2).tolist()
    found = []
    for units, (kind, changed) in zip(shape.units, rows, strict=True):
        if not 0 <= kind <= WHOLE or (kind == SAME) != (changed == 0) or not 0 <= changed <= units:
            return None
        bits = aligned(-(-units // 8))
        positions = aligned(4 * -(-units // BLOCK)) + aligned(2 * changed)
        index = {SAME: 0, POSITIONS: positions, MASK: bits, WHOLE: 0}[kind]
        if index > bits:
            return None
        count = units if kind == WHOLE else changed
        found.append(Described(kind, changed, index, aligned(count * shape.unit_bytes)))
    return found


def places(one: Described, units: int, index: bytes) -> np.ndarray | None:
    """Where values go, one by one; None for what no sender says."""
    if one.kind == WHOLE:
        return np.arange(units)
    if one.kind == MASK:
        bits = np.unpackbits(np.frombuffer(index, np.uint8), bitorder="little")[: -(-units // 8) * 8]
        found = np.flatnonzero(bits)
        return found if len(found) == one.changed and found[-1] < units else None
    if one.kind == SAME:
        return np.arange(0)
    blocks = -(-units // BLOCK)
    counts = np.frombuffer(index, "<i4", blocks).tolist()
    within = np.frombuffer(index, "<u2", one.changed, aligned(4 * blocks))
    if min(counts) < 0 or sum(counts) != one.changed:
        return None
    found = np.concatenate([np.full(count, block * BLOCK) for block, count in enumerate(counts)]) + within
    return found if (np.diff(found) > 0).all() and found[-1] < units else None


def damage(data: bytearray, shape: Shape, table: int, spans: list[tuple[int, int, int]], random: Random) -> None:
    """Changes bytes in place. `table`: where the table is; `spans`: (message, begin, end) of each index."""
    ends = [end for _, _, end in spans if end] or [len(data)]
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        region = random.choice(("table", "index", "index", "index", "any"))
        if region == "table" and shape.units:
            _damage_table(data, shape, table, random)
        elif region == "index" and spans:
            _damage_index(data, shape, table, *random.choice(spans), random)
        else:
            _damage_any(data, table, min(len(data), random.choice((table + 64, max(ends), len(data)))), random)


def _damage_table(data: bytearray, shape: Shape, table: int, random: Random) -> None:
    size, count = shape.number_bytes, len(shape.units)
    numbers = np.frombuffer(data, f"<i{size}", 2 * count, table).reshape(-1, 2)
    most = (1 << (8 * size - 1)) - 1
    what, row = random.randrange(5), random.randrange(count)
    if what == 0:
        numbers[:] = numbers[random.sample(range(count), count)]
    elif what == 1:
        numbers[row, 0] = random.choice((*range(-1, 6), 255, most))
    elif what == 2:
        numbers[row, 1] = max(-most, min(most, int(numbers[row, 1]) + random.choice((-1, 1))))
    elif what == 3:
        number = random.choice((*_LARGE, shape.units[row], shape.units[row] + 1))
        numbers[row, 1] = max(-most - 1, min(most, number))
    else:
        numbers[row] = numbers[random.randrange(count)]


def _damage_index(
    data: bytearray, shape: Shape, table: int, message: int, begin: int, end: int, random: Random
) -> None:
    units = shape.units[message]
    kind = np.frombuffer(data, f"<i{shape.number_bytes}", 2, table + 2 * shape.number_bytes * message)[0]
    blocks, length = -(-units // BLOCK), end - begin
    if kind == POSITIONS and length >= aligned(4 * blocks) and random.random() < 0.5:
        counts = np.frombuffer(data, "<i4", blocks, begin)
        one, other, by = random.randrange(blocks), random.randrange(blocks), random.choice(_INTEGERS[:12])
        with np.errstate(over="ignore"):
            if random.random() < 0.5:
                counts[one] = by
            else:  # of which the sum stays what it was
                counts[one] += np.int32(by)
                counts[other] -= np.int32(by)
    elif kind == POSITIONS and length > aligned(4 * blocks):
        positions = np.frombuffer(data, "<u2", (length - aligned(4 * blocks)) // 2, begin + aligned(4 * blocks))
        at = random.choice((0, random.randrange(len(positions)), len(positions) - 1))
        last = (units - 1) % BLOCK
        edge = (0, BLOCK - 1, last, min(last + 1, BLOCK - 1), int(positions[at - 1]), random.randrange(BLOCK))
        positions[at] = random.choice(edge)
    elif length and random.random() < 0.5:
        at = random.choice((begin, random.randrange(begin, end), end - 1))
        data[at] ^= 1 << random.randrange(8)
        if random.random() < 0.5:  # another one, so that as many may be set as before
            data[random.randrange(begin, end)] ^= 1 << random.randrange(8)
    elif length:
        data[begin:end] = random.choice((bytes(length), b"\xff" * length, random.randbytes(length)))


def _damage_any(data: bytearray, table: int, end: int, random: Random) -> None:
    if end <= table:
        return
    at = random.randrange(table, end)
    size = min(random.choice((1, 2, 4, 8, 64)), end - at)
    what = random.randrange(6)
    if what == 0:
        data[at] ^= 1 << random.randrange(8)
    elif what == 1:
        data[at : at + size] = random.randbytes(size)
    elif what == 2:  # cut off, and nothing after it
        data[at:] = bytes(len(data) - at)
    elif what == 3:  # from elsewhere
        of = random.randrange(table, end - size + 1)
        data[at : at + size] = data[of : of + size]
    elif what == 4:
        at = at // 4 * 4
        number = random.choice(_INTEGERS) % (1 << 32)
        data[at : at + 4] = number.to_bytes(4, "little")[: len(data) - at]
    else:  # shifted by some bytes
        data[at + size : end] = data[at : end - size]
