"""An item of the battery: what is expected, what was seen, and a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmark.gpu.peer import Here, Peer
from benchmark.gpu.place import Place

LIMIT_S = 60.0


class Skip(Exception):
    """The item cannot run here; the message says why."""


class Row(msgspec.Struct, frozen=True):
    """The outcome of an item, as it is written.

    verdict  "pass", "fail" or "skipped"
    why      of the latter two
    """

    number: int
    name: str
    expected: str
    verdict: str
    why: str
    seconds: float
    seen: dict[str, Any]


class Bench:
    """What an item is given to do its work, and to report what it sees.

    Peers have to be made before the item itself uses the GPU, with `enter`.
    """

    def __init__(self, place: Place, send: Callable[[dict[str, Any]], None]) -> None:
        self.place, self._send = place, send
        self.here = Here(place)
        self.faults: list[str] = []
        self.open: list[str] = []

    def peer(self, name: str, *, fresh: bool = False, **changes: Any) -> Peer:
        return Peer(dataclasses.replace(self.place, name=name, **changes), fresh=fresh)

    def enter(self) -> None:
        self.place.enter()

    def saw(self, **figures: Any) -> None:
        """Reports figures at once: they are known also of an item that never ends."""
        self._send(figures)

    def check(self, right: bool, fault: str) -> None:
        """Reports a fault unless it is right. The item goes on: what follows may say more."""
        if not right:
            self.faults.append(fault)

    def leave_open(self, why: str) -> None:
        """Says what cannot be judged here. If nothing is wrong, the item counts as skipped, for this reason."""
        if why not in self.open:
            self.open.append(why)

    def fitted(self, name: str, wanted: int, most: int) -> int:
        """Returns how much of `wanted` is taken, of which `most` finds room. Reports it, and when it is less."""
        found = max(0, min(wanted, most))
        self.saw(**{name: found})
        if found < wanted:
            self.saw(**{f"{name}_on_a_larger_card": wanted})
        return found


@dataclass(frozen=True)
class Item:
    """One question to a GPU.

    number    of the battery's list
    run       answers it; raises Skip where it cannot be asked
    expected  the answer, in words
    gpus      that it needs
    """

    number: int
    name: str
    expected: str
    run: Callable[[Bench], None]
    gpus: int = 1
    limit_s: float = LIMIT_S
