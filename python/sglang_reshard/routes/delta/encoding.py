"""Encodes a message as its differences from an earlier one, and applies it: bit for bit, as integers, on its own
device.

Every message is encoded in the way that takes the fewest bytes:

    SAME       nothing
    POSITIONS  the number of changes in each block of 65,536 units, their 16-bit positions in it, and their values
    MASK       a bit for each unit, and the values of those that changed
    WHOLE      all units

An encoded message has two parts: an index, which says where values go, and the values. An index of another process is
checked (`routes.delta.checks`) before it is applied: applying one that is damaged would write outside of the message.

Nothing here is Python per tensor or per element: numpy finds changes on a CPU, where it is twice as fast as torch, and
torch on any other device.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from sglang_reshard.layout.regions import aligned

UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes
BLOCK = 1 << 16  # units
_HALF = BLOCK // 2
ALIGN_BYTES = 8  # of each part of an index, and of values
_NUMPY = "cpu"  # the device on which numpy works; tests let torch do it there, as it does on a GPU


class Kind(IntEnum):
    SAME, POSITIONS, MASK, WHOLE = range(4)


class Encoded(NamedTuple):
    """The encoding of a message: all numbers that the receiver needs to read its index and its values.

    changed  number of units that differ
    """

    kind: Kind
    changed: int

    def index_bytes(self, units: int) -> int:
        """Returns the bytes of the index of a message of `units`."""
        if self.kind is Kind.POSITIONS:
            return _counts_bytes(units) + aligned(2 * self.changed, ALIGN_BYTES)
        return index_room(units) if self.kind is Kind.MASK else 0

    def value_bytes(self, units: int, unit_bytes: int) -> int:
        """Returns the bytes of the values of a message of `units`."""
        return aligned(self.values(units) * unit_bytes, ALIGN_BYTES)

    def payload_bytes(self, units: int, unit_bytes: int) -> int:
        """Returns the bytes of the index and the values of a message of `units`."""
        return self.index_bytes(units) + self.value_bytes(units, unit_bytes)

    def values(self, units: int) -> int:
        """Returns the number of values of a message of `units`."""
        return units if self.kind is Kind.WHOLE else self.changed


def counts_and_positions(encoded: Encoded, units: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the parts of an index of POSITIONS of a message of `units`, as views of its bytes.

    int32 [blocks]: the changes in each block; int16 [changed]: the lower 16 bits of their positions in it
    """
    begin, end = _counts_bytes(units), encoded.index_bytes(units)
    counts, positions = index[:begin].view(torch.int32), index[begin:end].view(torch.int16)
    return counts[: blocks_of(units)], positions[: encoded.changed]


def blocks_of(units: int) -> int:
    return -(-units // BLOCK)


def index_room(units: int) -> int:
    """Returns the bytes that the index of a message of `units` takes at most: a bit for each."""
    return aligned(-(-units // 8), ALIGN_BYTES)


def encode(
    new: torch.Tensor, base: torch.Tensor, unit_bytes: int, index: torch.Tensor, values: torch.Tensor
) -> Encoded | None:
    """Encodes `new` against `base`, into the beginnings of `index` and `values`; None if these have no room for it.

    All are bytes on one device, 1-D and contiguous, at addresses that are multiples of `unit_bytes`; `index` and
    `values` at multiples of ALIGN_BYTES. `index` needs no more than `index_room`.
    """
    dtype = UNITS[unit_bytes]
    own = new.view(dtype)
    differs = _differs(own, base.view(dtype))
    units, changed = len(own), int(np.count_nonzero(differs) if isinstance(differs, np.ndarray) else differs.sum())
    if not changed:
        return Encoded(Kind.SAME, 0)
    kinds = (Encoded(kind, changed) for kind in (Kind.POSITIONS, Kind.MASK, Kind.WHOLE))
    encoded = min(kinds, key=lambda e: e.payload_bytes(units, unit_bytes))
    if encoded.index_bytes(units) > len(index) or encoded.value_bytes(units, unit_bytes) > len(values):
        return None
    changes = _values(encoded, units, unit_bytes, values)
    if encoded.kind is Kind.WHOLE:
        changes.copy_(own)
        return encoded
    positions = _positions(differs)
    torch.index_select(own, 0, positions, out=changes)
    if encoded.kind is Kind.POSITIONS:
        counts, in_blocks = counts_and_positions(encoded, units, index)
        edges = torch.arange(0, len(counts) + 1, device=new.device) * BLOCK
        upto = torch.searchsorted(positions, edges)
        counts.copy_(upto[1:] - upto[:-1])
        in_blocks.copy_(((positions & (BLOCK - 1)) ^ _HALF) - _HALF)  # as a signed 16-bit number
    else:
        packed = _packed(differs)
        index[: len(packed)].copy_(packed)
        index[len(packed) : encoded.index_bytes(units)].zero_()
    return encoded


def apply(encoded: Encoded, index: torch.Tensor, values: torch.Tensor, unit_bytes: int, message: torch.Tensor) -> None:
    """Overwrites in `message`, the base, what has changed. `index` was found sound, see `routes.delta.checks`."""
    units = message.view(UNITS[unit_bytes])
    changes = _values(encoded, len(units), unit_bytes, values)
    if encoded.kind is Kind.WHOLE:
        units.copy_(changes)
    elif encoded.kind is Kind.POSITIONS:
        counts, positions = counts_and_positions(encoded, len(units), index)
        begin = torch.arange(len(counts), device=index.device) * BLOCK
        begin = begin.repeat_interleave(counts.to(torch.int64), output_size=encoded.changed)
        units.index_copy_(0, begin + (positions.to(torch.int64) & (BLOCK - 1)), changes)
    elif encoded.kind is Kind.MASK:
        differs = _unpacked(index, len(units))
        if isinstance(differs, np.ndarray):
            units.index_copy_(0, _positions(differs), changes)
        else:  # without waiting for a GPU, as to find positions would
            units.masked_scatter_(differs, changes)


def _values(encoded: Encoded, units: int, unit_bytes: int, values: torch.Tensor) -> torch.Tensor:
    """Returns the values of a message of `units`, as integers, in bytes that begin with them."""
    nbytes = encoded.value_bytes(units, unit_bytes)
    return values[:nbytes].view(UNITS[unit_bytes])[: encoded.values(units)]


def _counts_bytes(units: int) -> int:
    return aligned(4 * blocks_of(units), ALIGN_BYTES)


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
    bits = bits[: -(-units // 8)]
    flags = bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    return flags.view(-1)[:units].bool()
