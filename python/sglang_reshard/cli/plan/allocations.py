"""Says in which allocations of the driver torch's CUDA allocator places tensors, if it is asked in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MIB = 1 << 20
_ROUND, _SMALL, _SMALL_SEGMENT, _MEDIUM, _MEDIUM_SEGMENT, _LARGE_ROUND = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB


def segments(sizes: Iterable[int]) -> Iterator[int]:
    """Yields the number of the segment in which torch's allocator places each of these tensors (bytes); -1 for none.

    Up to 1 MiB it places them in segments of 2 MiB, up to 10 MiB in segments of 20 MiB, larger ones in a segment each.
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
