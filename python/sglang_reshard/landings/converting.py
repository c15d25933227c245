"""Converts weights where they have arrived, before they are written: quantizes or repacks them.

They are in temporary memory from the first message with a part of them to the last one; other weights use the same
memory before and after. See `trace.block_fp8` and `trace.repack` for the conversions.

A rank copies its own reads from mapped memory in the last turn of the messages that bring other parts of the same
weight, or in separate turns that fill a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.landings.base import Landing, LandingAround
from sglang_reshard.landings.lifetimes import Lifetime, share_memory

if TYPE_CHECKING:  # trainer ranks load no tracer
    from sglang_reshard.engine.context import UpdateContext
    from sglang_reshard.trace.program import Arrival


class Converting(LandingAround):
    """Memory for the arrivals of a program, and the places where it writes the converted weights.

    program  the inner landing's, and with memory for its arrivals once they are placed
    """

    def __init__(self, inner: Landing, device: torch.device, bucket_bytes: int) -> None:
        """`bucket_bytes`: read from mapped memory in one turn, or one weight if that has more."""
        super().__init__(inner)
        self._device, self._bucket_bytes = device, bucket_bytes
        self._last: dict[str, int] = {}
        self._finishers: list[list[Callable[[], None]]] = []
        self._placed = False

    def place(self, written: Sequence[Collection[str]], read: Collection[str], ahead: int = 0) -> None:
        self._placed = True
        known = self.inner.program.arrivals
        first: dict[str, int] = {}
        self._last = {}
        for turn, targets in enumerate(written):
            for target in targets:
                if target in known:
                    first.setdefault(target, max(0, turn - ahead))
                    self._last[target] = turn
        turns = len(written)
        alone: list[list[str]] = []
        for members in _units(known, {*read, *first}):
            if arriving := [target for target in members if target in first]:
                begin, end = min(first[t] for t in arriving), max(self._last[t] for t in arriving)
                first.update(dict.fromkeys(members, begin))
                self._last.update(dict.fromkeys(members, end))
            else:
                alone.append(members)
        for chunk in _chunks(alone, known, self._bucket_bytes):
            for target in chunk:
                first[target], self._last[target] = turns, turns
            turns += 1
        groups: dict[tuple[object, ...], list[str]] = {}  # those that can be converted together
        for target, weights in known.items():
            if target in first:
                key = first[target], self._last[target], weights.kind
                groups.setdefault(key, []).append(target)
        self._allocate(groups, turns)

    def begin(self, update: UpdateContext) -> None:
        """Raises Unsupported if the route has not placed it: what arrived would be written unconverted."""
        if not self._placed:
            raise Unsupported(
                f"the engine converts {len(self.inner.program.arrivals)} weights where they arrive, and the route has "
                "not called Landing.place: it does not know of them. Choose another transport"
            )
        self.inner.begin(update)
        self.finished = 0

    def check(self, update: UpdateContext) -> str:
        """Raises Mismatch if the route has not reported the end of every turn."""
        if self.finished < self.turns:
            raise Mismatch(
                f"the route has reported the end of {self.finished} of {self.turns} turns: weights of the others were "
                "not converted. Choose another transport"
            )
        return self.inner.check(update)

    def turn_of(self, target: str) -> int | None:
        return self._last.get(target)

    def arrived(self, turn: int) -> None:
        with torch.no_grad():
            for finish in self._finishers[turn]:
                finish()
        self.finished = turn + 1

    def _allocate(self, groups: Mapping[tuple[object, ...], Sequence[str]], turns: int) -> None:
        given = self.inner.program
        known, targets = given.arrivals, dict(given.targets)
        sizes = [sum(known[target].nbytes for target in members) for members in groups.values()]
        lifetimes = [Lifetime(key[0], key[1], n) for key, n in zip(groups, sizes, strict=True)]  # type: ignore[arg-type]
        offsets, nbytes = share_memory(lifetimes)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.nbytes, self.turns, self.finished = nbytes + self.inner.nbytes, turns, 0
        self._finishers = [[] for _ in range(turns)]
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
            self._finishers[turn].append(alike[0].finisher(alike, own, targets))
        self.program, self.complete = replace(given, targets=targets), arriving


def converting(landing: Landing, device: torch.device, bucket_bytes: int) -> Landing:
    """Returns what converts for `landing`; that itself if its program converts nothing. See `Converting`."""
    return Converting(landing, device, bucket_bytes) if landing.program.arrivals else landing


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
