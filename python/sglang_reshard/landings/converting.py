"""Converts weights where they have arrived, before they are written: quantizes or repacks them.

They are in temporary memory from the first message with a part of them to the last one; other weights use the same
memory before and after. See `trace.block_fp8` and `trace.repack` for the conversions.

A rank copies its own reads from mapped memory in the last turn of the messages that bring other parts of the same
weight, or in separate turns that fill a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_reshard.errors import Unsupported

if TYPE_CHECKING:  # trainer ranks load no tracer
    from sglang_reshard.trace.program import Arrival, Program

_ALIGN_BYTES = 256  # of offsets, as torch's own allocator has it on GPUs


class Conversions:
    """Memory for the arrivals of a program, and the places where it writes the converted weights.

    nbytes   of that memory
    turn_of  see `Landing.turn_of`
    """

    nbytes = 0

    def __init__(self, program: Program, device: torch.device, bucket_bytes: int) -> None:
        """`bucket_bytes`: read from mapped memory in one turn, or one weight if that has more."""
        self._given, self._device, self._bucket_bytes = program, device, bucket_bytes
        self.turn_of: dict[str, int] = {}
        self._finishers: list[list[Callable[[], None]]] | None = None

    def place(
        self, written: Sequence[Collection[str]], read: Collection[str], ahead: int
    ) -> tuple[Program, list[list[str]]]:
        """See `Landing.place`. Returns the program with memory for its arrivals, and the targets complete by turn."""
        known = self._given.arrivals
        first: dict[str, int] = {}
        self.turn_of = last = {}
        for turn, targets in enumerate(written):
            for target in targets:
                if target in known:
                    first.setdefault(target, max(0, turn - ahead))
                    last[target] = turn
        turns = len(written)
        alone: list[list[str]] = []
        for members in _units(known, {*read, *first}):
            if arriving := [target for target in members if target in first]:
                begin, end = min(first[t] for t in arriving), max(last[t] for t in arriving)
                first.update(dict.fromkeys(members, begin))
                last.update(dict.fromkeys(members, end))
            else:
                alone.append(members)
        for chunk in _chunks(alone, known, self._bucket_bytes):
            for target in chunk:
                first[target], last[target] = turns, turns
            turns += 1
        groups: dict[tuple[object, ...], list[str]] = {}  # those that can be converted together
        for target, weights in known.items():
            if target in first:
                key = first[target], last[target], weights.kind
                groups.setdefault(key, []).append(target)
        return self._allocate(groups, turns)

    def check_placed(self) -> None:
        """Raises Unsupported if the route has not placed it: what arrived would be written unconverted."""
        if self._finishers is None:
            raise Unsupported(
                f"the engine converts {len(self._given.arrivals)} weights where they arrive, and the route has not "
                "called Landing.place: it does not know of them. Choose another transport"
            )

    def finish(self, turn: int) -> None:
        """Converts what is complete after a turn."""
        assert self._finishers is not None, "place() comes first"
        with torch.no_grad():
            for finish in self._finishers[turn]:
                finish()

    def _allocate(
        self, groups: Mapping[tuple[object, ...], Sequence[str]], turns: int
    ) -> tuple[Program, list[list[str]]]:
        given = self._given
        known, targets = given.arrivals, dict(given.targets)
        sizes = [sum(known[target].nbytes for target in members) for members in groups.values()]
        lifetimes = [Lifetime(key[0], key[1], n) for key, n in zip(groups, sizes, strict=True)]  # type: ignore[arg-type]
        offsets, nbytes = share_memory(lifetimes)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.nbytes = nbytes
        finishers: list[list[Callable[[], None]]] = [[] for _ in range(turns)]
        arriving: list[list[str]] = [[] for _ in range(turns)]
        complete: list[tuple[int, list[Arrival], torch.Tensor]] = []
        for members, lifetime, offset in zip(groups.values(), lifetimes, offsets, strict=True):
            own = memory[offset : offset + lifetime.nbytes]
            begin = 0
            for target in members:
                end = begin + known[target].nbytes
                targets[target] = own[begin:end].view(given.targets[target].dtype)
                begin = end
            alike = [known[target] for target in members]
            complete.append((lifetime.last, alike, own))
            arriving[lifetime.last] += members
        for turn, alike, own in complete:
            finishers[turn].append(alike[0].finisher(alike, own, targets))
        self._finishers = finishers
        return replace(given, targets=targets), arriving


def _units(arrivals: Mapping[str, Arrival], among: Collection[str]) -> list[list[str]]:
    """Returns the targets of each unit that has any `among` those, in order."""
    units: dict[tuple[str | None, str], list[str]] = {}
    for target, arrival in arrivals.items():
        units.setdefault((arrival.unit, target if arrival.unit is None else ""), []).append(target)
    return [members for members in units.values() if any(target in among for target in members)]


def _chunks(units: Iterable[list[str]], arrivals: Mapping[str, Arrival], nbytes: int) -> Iterator[list[str]]:
    """Yields runs of units that have at most so many bytes, or one with more."""
    chunk: list[str] = []
    room = nbytes
    for members in units:
        size = sum(arrivals[target].nbytes for target in members)
        if chunk and size > room:
            yield chunk
            chunk, room = [], nbytes
        chunk += members
        room -= size
    if chunk:
        yield chunk


class Lifetime(NamedTuple):
    """A tensor of `nbytes` is needed from turn `first` to turn `last`, both included."""

    first: int
    last: int
    nbytes: int


def share_memory(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Returns the offset of each tensor, and the bytes of the memory that they share.

    Those whose turns overlap do not overlap in memory. Each takes the first gap that it fits in, in order of turns.
    """
    offsets = [0] * len(lifetimes)
    alive: list[tuple[int, int, int]] = []  # (offset, end, last turn), in ascending order
    total = 0
    for number in sorted(range(len(lifetimes)), key=lambda n: lifetimes[n][:2]):
        first, last, nbytes = lifetimes[number]
        alive = [taken for taken in alive if taken[2] >= first]
        begin = 0
        for offset, end, _ in alive:
            if begin + nbytes <= offset:
                break
            begin = max(begin, -(-end // _ALIGN_BYTES) * _ALIGN_BYTES)
        offsets[number] = begin
        total = max(total, begin + nbytes)
        alive.append((begin, begin + nbytes, last))
        alive.sort()
    return offsets, total
