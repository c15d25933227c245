"""Computes where torch's CUDA allocator places tensors that are allocated in a given order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MIB = 1 << 20
_ROUND, _SMALL, _SMALL_SEGMENT, _MEDIUM, _MEDIUM_SEGMENT, _LARGE_ROUND = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB


def segments(sizes: Iterable[int]) -> Iterator[int]:
    """Yields the segment of each tensor, as a number from 0; -1 for a tensor without bytes.

    sizes  bytes of each tensor

    A segment is an allocation of the driver. Tensors of up to 1 MiB share segments of 2 MiB. Tensors below
    10 MiB share segments of 20 MiB, and a larger tensor has a separate segment.
    """
    rooms: dict[int, tuple[int, int]] = {}  # by size of segments: the last one, and the bytes that are left in it
    made = 0
    for nbytes in sizes:
        nbytes = -(-nbytes // _ROUND) * _ROUND
        if not nbytes:
            yield -1
            continue
        if nbytes <= _SMALL:
            whole = _SMALL_SEGMENT
        elif nbytes < _MEDIUM:
            whole = _MEDIUM_SEGMENT
        else:
            whole = -(-nbytes // _LARGE_ROUND) * _LARGE_ROUND
        number, left = rooms.get(whole, (-1, 0)) if nbytes < _MEDIUM else (-1, 0)
        if left < nbytes:
            number, left = made, whole
            made += 1
        rooms[whole] = number, left - nbytes
        yield number
