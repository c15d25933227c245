"""Encodes a message as what differs from an earlier one, and applies it: bit for bit, as integers, on its own device.

Every message is encoded in the way that takes the fewest bytes:

    SAME       nothing
    POSITIONS  the number of changes in each block of 65,536 units, their 16-bit positions in it, and their values
    MASK       a bit for each unit, and the values of those that changed
    WHOLE      all units

Nothing here is Python per tensor or per element: numpy finds changes on a CPU, where it is twice as fast as torch, and
torch on any other device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes
BLOCK = 1 << 16  # units
_HALF = BLOCK // 2
ALIGN_BYTES = 8  # of each part of an encoded message
_NUMPY = "cpu"  # the device on which numpy works; tests let torch do it there, as it does on a GPU


class Kind(IntEnum):
    SAME, POSITIONS, MASK, WHOLE = range(4)


class Encoded(NamedTuple):
    """How a message is encoded: everything that the receiver has to know to read its payload.

    changed  number of units that differ
    """

    kind: Kind
    changed: int

    def payload_bytes(self, units: int, unit_bytes: int) -> int:
        """Returns the bytes of the payload of a message of `units`."""
        return sum(_parts(self.kind, self.changed, units, unit_bytes))


def encode(new: torch.Tensor, base: torch.Tensor, unit_bytes: int, out: torch.Tensor) -> Encoded | None:
    """Encodes `new` against `base`, and writes the payload to the beginning of `out`; None if it has no room for it.

    All are bytes on one device, 1-D and contiguous, at addresses that are multiples of `unit_bytes`; `out` at one of
    ALIGN_BYTES.
    """
    dtype = UNITS[unit_bytes]
    values = new.view(dtype)
    differs = _differs(values, base.view(dtype))
    units, changed = len(values), int(np.count_nonzero(differs) if isinstance(differs, np.ndarray) else differs.sum())
    if not changed:
        return Encoded(Kind.SAME, 0)
    kind = min((Kind.POSITIONS, Kind.MASK, Kind.WHOLE), key=lambda k: sum(_parts(k, changed, units, unit_bytes)))
    encoded = Encoded(kind, changed)
    if encoded.payload_bytes(units, unit_bytes) > len(out):
        return None
    where, second, third = _split(encoded, units, unit_bytes, out)
    if kind is Kind.WHOLE:
        third.copy_(values)
        return encoded
    positions = _positions(differs)
    torch.index_select(values, 0, positions, out=third)
    if kind is Kind.POSITIONS:
        edges = torch.arange(0, len(where) + 1, device=new.device) * BLOCK
        upto = torch.searchsorted(positions, edges)
        where.copy_(upto[1:] - upto[:-1])
        second.copy_(((positions & (BLOCK - 1)) ^ _HALF) - _HALF)  # as a signed 16-bit number
    else:
        where.copy_(_packed(differs))
    return encoded


def decode(encoded: Encoded, units: int, unit_bytes: int, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns positions (int64) and values of what has changed in a message of `units`. Not for WHOLE."""
    first, second, third = _split(encoded, units, unit_bytes, payload)
    if encoded.kind is Kind.POSITIONS:
        counts = first.to(torch.int64)
        begin = torch.arange(len(counts), device=payload.device) * BLOCK
        begin = begin.repeat_interleave(counts, output_size=encoded.changed)
        return begin + (second.to(torch.int64) & (BLOCK - 1)), third
    return _positions(_unpacked(first, units)), third


def apply(encoded: Encoded, payload: torch.Tensor, unit_bytes: int, message: torch.Tensor) -> None:
    """Overwrites in `message`, the base, what has changed."""
    units = message.view(UNITS[unit_bytes])
    if encoded.kind is Kind.WHOLE:
        units.copy_(_split(encoded, len(units), unit_bytes, payload)[2])
    elif encoded.kind is not Kind.SAME:
        units.index_copy_(0, *decode(encoded, len(units), unit_bytes, payload))


def _parts(kind: Kind, changed: int, units: int, unit_bytes: int) -> tuple[int, int, int]:
    """Returns the bytes of each part of a payload: the first two say where, the last one has the values."""
    if kind is Kind.SAME:
        return 0, 0, 0
    if kind is Kind.WHOLE:
        return 0, 0, _aligned(units * unit_bytes)
    values = _aligned(changed * unit_bytes)
    if kind is Kind.POSITIONS:
        return _aligned(-(-units // BLOCK) * 4), _aligned(2 * changed), values
    return _aligned(-(-units // 8)), 0, values


def _split(
    encoded: Encoded, units: int, unit_bytes: int, payload: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the parts of a payload, as what they are."""
    begin, parts = 0, []
    for nbytes in _parts(encoded.kind, encoded.changed, units, unit_bytes):
        parts.append(payload[begin : begin + nbytes])
        begin += nbytes
    where, positions, values = parts
    if encoded.kind is Kind.POSITIONS:
        where = where.view(torch.int32)[: -(-units // BLOCK)]
        positions = positions.view(torch.int16)[: encoded.changed]
    elif encoded.kind is Kind.MASK:
        where = where[: -(-units // 8)]
    count = units if encoded.kind is Kind.WHOLE else encoded.changed
    return where, positions, values.view(UNITS[unit_bytes])[:count]


def _differs(values: torch.Tensor, known: torch.Tensor) -> np.ndarray | torch.Tensor:
    """Returns which units differ: bool, of numpy on a CPU."""
    if values.device.type == _NUMPY:
        return np.asarray(values.numpy() != known.numpy())
    return values != known


def _positions(differs: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Returns the positions that are set, ascending, int64."""
    if isinstance(differs, np.ndarray):
        return torch.from_numpy(np.flatnonzero(differs))
    return differs.nonzero().flatten()


def _packed(differs: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Returns bits as bytes, the lowest bit first."""
    if isinstance(differs, np.ndarray):
        return torch.from_numpy(np.packbits(differs, bitorder="little"))
    flags = differs.new_zeros(-(-len(differs) // 8) * 8, dtype=torch.uint8)
    flags[: len(differs)] = differs
    return (flags.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1, dtype=torch.uint8)


def _unpacked(bits: torch.Tensor, units: int) -> np.ndarray | torch.Tensor:
    if bits.device.type == _NUMPY:
        return np.unpackbits(bits.numpy(), count=units, bitorder="little").view(bool)
    flags = bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    return flags.view(-1)[:units].bool()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def cut_pieces(payloads: Sequence[int], most: int) -> list[range]:
    """Returns runs of messages whose payloads have at most `most` bytes together, or one that has more."""
    pieces, first, nbytes = [], 0, 0
    for number, size in enumerate(payloads):
        if nbytes and nbytes + size > most:
            pieces.append(range(first, number))
            first, nbytes = number, 0
        nbytes += size
    if nbytes:
        pieces.append(range(first, len(payloads)))
    return pieces
