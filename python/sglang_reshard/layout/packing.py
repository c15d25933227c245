"""Places several tensors in one buffer."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

ALIGN_BYTES = 16  # offsets in buckets and messages are multiples of it, so that any dtype can view them
Bytes = TypeVar("Bytes", int, np.ndarray)


def aligned(nbytes: Bytes, unit: int = ALIGN_BYTES) -> Bytes:
    """Rounds up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit
