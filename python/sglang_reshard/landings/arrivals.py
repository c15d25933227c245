"""Memory for weights that are quantized or repacked where they have arrived, see `trace.block_fp8` and `trace.repack`.

They are in it from the first message that brings a part of them to the last one, and others are in the same memory
before and after. A transport goes through its messages in turns, says which turn brings what, and when a turn is over:

    arrivals.place(written, read, ahead=1)   # before it makes views of `arrivals.program`
    arrivals.begin()                         # if anybody asks for `arrivals.finished`
    arrivals.finish(turn)                    # in ascending order, when the copies of a turn have been made

What a rank reads from mapped memory itself, it copies in the last turn of the messages that bring other parts of the
same, or in turns of their own that fill a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_reshard.plan.lifetimes import Lifetime, share_memory

if TYPE_CHECKING:  # trainer ranks load no tracer
    from sglang_reshard.trace.program import Arrival, Program


class Observer(Protocol):
    """Reads what has arrived before it is converted."""

    def place(self, program: Program, arriving: Sequence[Collection[str]]) -> None:
        """`program` has its memory now; `arriving` are the targets that are complete after each turn."""

    def arrived(self, turn: int) -> None: ...


class ArrivalMemory:
    """One transport's memory for the arrivals of a program.

    program   the given one, and with memory for its arrivals once they are placed
    turns     number of turns
    finished  number of those that are over, in this update
    nbytes    of the memory
    """

    def __init__(self, program: Program, device: torch.device, bucket_bytes: int, observer: Observer | None = None):
        """`bucket_bytes`: of what is read from mapped memory in one turn, or one weight if that has more."""
        self.program, self.turns, self.finished, self.nbytes = program, 0, 0, 0
        self._given, self._device, self._bucket_bytes, self._observer = program, device, bucket_bytes, observer
        self._last: dict[str, int] = {}
        self._finishers: list[list[Callable[[], None]]] = []

    def place(self, written: Sequence[Collection[str]], read: Collection[str], ahead: int = 0) -> None:
        """Allocates memory for all arrivals that any turn brings.

        written  targets of the messages of each turn; only those of arrivals count
        read     targets that are copied from mapped memory
        ahead    number of turns before its own in which a message may already be received
        """
        known = self._given.arrivals
        if not known:
            return
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

    def begin(self) -> None:
        """Must be called at the start of an update in which `finished` is used."""
        self.finished = 0

    def turn_of(self, target: str) -> int | None:
        """Returns the turn in which what is read from mapped memory is copied to `target`; None if before all."""
        return self._last.get(target)

    def finish(self, turn: int) -> None:
        """Quantizes what is complete after `turn`."""
        if self._observer is not None:
            self._observer.arrived(turn)
        with torch.no_grad():
            for finish in self._finishers[turn]:
                finish()
        self.finished = turn + 1

    def _allocate(self, groups: Mapping[tuple[object, ...], Sequence[str]], turns: int) -> None:
        known, targets = self._given.arrivals, dict(self._given.targets)
        sizes = [sum(known[target].nbytes for target in members) for members in groups.values()]
        lifetimes = [Lifetime(key[0], key[1], n) for key, n in zip(groups, sizes, strict=True)]  # type: ignore[arg-type]
        offsets, self.nbytes = share_memory(lifetimes)
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self.turns, self._finishers = turns, [[] for _ in range(turns)]
        arriving: list[list[str]] = [[] for _ in range(turns)]
        complete: list[tuple[int, list[Arrival], torch.Tensor]] = []
        for members, lifetime, offset in zip(groups.values(), lifetimes, offsets, strict=True):
            own = memory[offset : offset + lifetime.nbytes]
            begin = 0
            for target in members:
                end = begin + known[target].nbytes
                targets[target] = own[begin:end].view(self._given.targets[target].dtype)
                begin = end
            alike = [known[target] for target in members]
            complete.append((lifetime.last, alike, own))
            arriving[lifetime.last] += members
        for turn, alike, own in complete:
            self._finishers[turn].append(alike[0].finisher(alike, own, targets))
        self.program = replace(self._given, targets=targets)
        if self._observer is not None:
            self._observer.place(self.program, arriving)


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
