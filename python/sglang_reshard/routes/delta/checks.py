"""Checks the positions that another process sends for values, before any value is applied.

A number of changes, or a position, that is damaged would be written outside of a message: nothing that applies an index
looks again. All is torch's operations over whole messages, the same on a CPU and on a GPU. They
allocate twice the bytes of an index at most, and wait for no GPU: `verdicts` does, once for all messages.

An index that is sound names as many units as there are values, each once, in ascending order, all within its message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.routes.delta.encoding import BLOCK, Encoded, Kind, counts_and_positions, index_room

_SIGN = -(1 << 15)  # of 16-bit numbers; flipped, signed ones are in the order of unsigned ones
# Bits are counted in 64-bit words: those of pairs, of fours, of bytes, and the sum of the bytes.
_PAIRS, _FOURS, _BYTES, _ONES = (int(digits * (16 // len(digits)), 16) for digits in ("5", "3", "0f", "01"))


def read_encodings(rows: np.ndarray, units: Sequence[int], damaged: Callable[[int, str], Mismatch]) -> list[Encoded]:
    """Returns how messages of `units` are encoded: kind and number of changed units of each. Every field is checked.

    damaged  returns the error for a message of this number, with the given fault
    """
    found = []
    for number, ((kind, changed), of_message) in enumerate(zip(rows.tolist(), units, strict=True)):
        if not 0 <= kind < len(Kind):
            raise damaged(number, f"its kind {kind} is unknown")
        found.append(Encoded(Kind(kind), changed))
        if why := unfit_reason(found[-1], of_message):
            raise damaged(number, why)
    return found


def unfit_reason(encoded: Encoded, units: int) -> str:
    """Returns why a message of `units` is not encoded so; empty if it may be. The remaining bytes are the index."""
    kind, changed = encoded
    if not (1 if kind is not Kind.SAME else 0) <= changed <= (units if kind is not Kind.SAME else 0):
        return f"{changed:,} of {units:,} units have changed, which does not fit a {kind.name} message"
    if encoded.index_bytes(units) > index_room(units):
        return f"the positions of {changed:,} units take more bytes than a bit for each of {units:,}"
    return ""


def is_sound(encoded: Encoded, units: int, index: torch.Tensor) -> torch.Tensor:
    """Returns whether an index can be applied to a message of `units`: bool [], on its device.

    index  bytes, [encoded.index_bytes(units)], at a multiple of ALIGN_BYTES

    `unfit_reason` has found nothing.
    """
    if encoded.kind is Kind.POSITIONS:
        return _are_positions(encoded.changed, units, *counts_and_positions(encoded, units, index))
    if encoded.kind is Kind.MASK:
        return _is_mask(encoded.changed, units, index)
    return torch.ones((), dtype=torch.bool, device=index.device)


def verdicts(sound: Sequence[torch.Tensor]) -> list[bool]:
    """Returns what `is_sound` has found of several messages on one device. Waits for that device, once."""
    found: list[bool] = torch.stack(list(sound)).tolist() if sound else []
    return found


def _are_positions(changed: int, units: int, counts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    in_last = (units - 1) % BLOCK + 1  # units of the last block
    ends = counts.cumsum(0, dtype=torch.int64)
    fits = ((counts >= 0) & (counts <= BLOCK)).all() & (ends[-1] == changed)
    ordered = positions ^ _SIGN
    # One for each pair of neighbours; those of which the second begins a block may be in any order. As 16-bit numbers,
    # which a CPU compares several times as fast into as into booleans.
    descends = torch.zeros(changed + 1, dtype=torch.int16, device=positions.device)
    torch.le(ordered[1:], ordered[:-1], out=descends[1:changed])
    descends.index_fill_(0, ends[:-1].clamp(0, changed), 0)
    last = positions[-1].to(torch.int32) & (BLOCK - 1)
    return fits & (descends.max() == 0) & ((last < in_last) | (counts[-1] == 0))


def _is_mask(changed: int, units: int, bits: torch.Tensor) -> torch.Tensor:
    whole = units // 64 * 8
    rest = bits.new_zeros(8)
    tail = bits[whole : -(-units // 8)]
    rest[: len(tail)] = tail
    last = rest.view(torch.int64)
    found = _count(bits[:whole].view(torch.int64)) + _count(last)
    return (found == changed) & (last[0] >> units % 64 == 0)


def _count(words: torch.Tensor) -> torch.Tensor:
    """Returns the number of bits that are set: int64 []."""
    if not len(words):
        return words.sum()
    found = (words >> 1).bitwise_and_(_PAIRS)
    torch.sub(words, found, out=found)
    fours = (found >> 2).bitwise_and_(_FOURS)
    found.bitwise_and_(_FOURS).add_(fours)
    torch.bitwise_right_shift(found, 4, out=fours)
    found.add_(fours).bitwise_and_(_BYTES).mul_(_ONES).bitwise_right_shift_(56)
    return found.sum()
