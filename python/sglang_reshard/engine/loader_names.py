"""Finds the names under which an engine's loader reads a trainer's tensors, if it does not read the given names.

A trainer's names may have prefixes of wrappers (`module.`, `_orig_mod.`), or the language model elsewhere than a
multimodal engine has it. Only the loader knows which names it reads. So where it refuses names as they are given, or
leaves some unread, each engine rank runs it over other candidates, and all ranks together choose those that are read. A
name that the loader reads is not changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import compress

import msgspec
import numpy as np

from sglang_reshard.engine.name_candidates import MAPPINGS, mapped, unwrapped
from sglang_reshard.errors import Mismatch
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.names_read import NamesRead

_ROUNDS = 8  # in which names lose their wrappers; each runs the loader once
_SHOWN_NAMES = 3


class Reading(msgspec.Struct, frozen=True):
    """The names that one engine rank's loader reads: a packed bit for each. refused: the index at which it raised."""

    read: bytes
    refused: int = -1


Probe = Callable[[Sequence[str]], Sequence[Reading]]


@dataclass(frozen=True, slots=True)
class LoaderNames:
    """The names of one source layout's tensors, in its order.

    layout  content hash of the layout; empty as long as no other names were looked for
    given   as the trainer has them
    names   as the loader reads them; empty if those are the names that were given
    hint    what to do about names that the loader does not read, for error messages
    digest  of `names`; empty if there are none
    """

    layout: str = ""
    given: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    hint: str = ""
    digest: str = ""

    def trainer_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the trainer's names of the tensors that the loader reads as `names`."""
        given = dict(zip(self.names, self.given, strict=True)) if self.names else {}
        return tuple(given.get(name, name) for name in names)

    @property
    def remark(self) -> str:
        """Says which names were changed, for the trainer's report; empty if none was."""
        changed = [(old, new) for old, new in zip(self.given, self.names, strict=False) if old != new]
        if not changed:
            return ""
        return some_names([f"{old} is read as {new}" for old, new in changed], _SHOWN_NAMES)


def find_names(layout: str, given: Sequence[str], ignore: Sequence[str], probe: Probe) -> LoaderNames:
    """Returns the names under which the engine reads most of the given tensors. Every engine rank finds the same.

    layout  content hash of the layout whose tensors have the names `given`
    ignore  fnmatch patterns of given names that need not be read
    probe   returns what the loader of each engine rank reads of these tensors under other names. Collective

    Raises Mismatch if it is ambiguous where the language model is.
    """
    search, hint = _Search(tuple(given), ignore, probe), ""
    best = search.without_wrappers()
    if not best.complete:
        best, hint = search.within_larger_model(best)
    hint = "; ".join(filter(None, (search.collision, hint)))
    if best.names == tuple(given):
        return LoaderNames(layout, hint=hint)
    digest = hashlib.sha256("\n".join(best.names).encode()).hexdigest()
    return LoaderNames(layout, tuple(given), best.names, hint, digest)


def reading(found: NamesRead, names: Sequence[str]) -> Reading:
    """Returns a rank's answer to a probe of these names."""
    bits = np.packbits([name in found.read for name in names]).tobytes()
    return Reading(bits, names.index(found.refused) if found.refused in names else -1)


@dataclass(frozen=True, slots=True)
class _Tried:
    """Names, and the result of the engine's loader for them.

    read      whether some engine rank reads each
    refused   indices at which a rank's loader raised
    complete  no rank's did, and all are read that have to be
    """

    names: tuple[str, ...]
    read: tuple[bool, ...]
    refused: tuple[int, ...]
    complete: bool

    @property
    def number_read(self) -> int:
        return sum(self.read)


class _Search:
    """`collision`: which two tensors have one name without their wrappers; empty if none have."""

    def __init__(self, given: tuple[str, ...], ignore: Sequence[str], probe: Probe) -> None:
        self._given, self._probe = given, probe
        self._needless = tuple(any(fnmatchcase(name, pattern) for pattern in ignore) for name in given)
        self.collision = ""

    def without_wrappers(self) -> _Tried:
        """Takes wrappers' prefixes off names, as far as that lets the loader read them."""
        best = self._try(self._given)
        candidates = [[name, *unwrapped(name)] for name in self._given]
        if best.complete or all(len(of_name) == 1 for of_name in candidates):
            return best
        at = [0 if read else min(1, len(c) - 1) for read, c in zip(best.read, candidates, strict=True)]
        for _ in range(_ROUNDS):
            self._keep_apart(at, candidates)
            tried = self._try(tuple(c[i] for i, c in zip(at, candidates, strict=True)))
            best = max(best, tried, key=lambda one: (one.complete, one.number_read))
            # A loader that raised may not have seen the others.
            moved = tried.refused or [n for n, read in enumerate(tried.read) if not read]
            further = [n for n in moved if not self._needless[n] and at[n] + 1 < len(candidates[n])]
            if tried.complete or not further:
                break
            for n in further:
                at[n] += 1
        # What no other name helps is named as it was given.
        names = zip(self._given, best.names, best.read, strict=True)
        return _Tried(tuple(new if r else old for old, new, r in names), best.read, best.refused, best.complete)

    def within_larger_model(self, best: _Tried) -> tuple[_Tried, str]:
        """Puts the language model elsewhere, if at one place and no other all is read. Returns a hint, too."""
        unread = [not read and not needless for read, needless in zip(best.read, self._needless, strict=True)]
        named = zip(best.names, unread, strict=True)
        bare = tuple(next(iter(unwrapped(name)), name) if open_ else name for name, open_ in named)
        found: list[tuple[_Tried, Mapping[str, str]]] = []
        for mapping in MAPPINGS:
            names = mapped(bare, mapping, unread)
            if names != bare and len(set(names)) == len(names):
                found.append((self._try(names), mapping))
        complete = [(tried, mapping) for tried, mapping in found if tried.complete]
        if len(complete) == 1:
            return complete[0][0], ""
        if complete:
            ways = " or ".join(f"rename={dict(mapping)!r}" for _, mapping in complete)
            first = next(compress(best.names, unread))
            raise Mismatch(f"{first} matches several tensors of this engine; pass {ways} to the update")
        better = max(found, key=lambda one: one[0].number_read, default=None)
        if better is None or (more := better[0].number_read - best.number_read) <= 0:
            return best, ""
        return best, f"With rename={dict(better[1])!r} the engine would read {more} more of the tensors that are sent"

    def _try(self, names: tuple[str, ...]) -> _Tried:
        answers = self._probe(names)
        bits = [np.unpackbits(np.frombuffer(a.read, np.uint8), count=len(names)).astype(bool) for a in answers]
        read = np.logical_or.reduce(bits)
        refused = tuple(sorted({a.refused for a in answers if a.refused >= 0}))
        complete = not refused and bool((read | np.array(self._needless)).all())
        return _Tried(names, tuple(read.tolist()), refused, complete)

    def _keep_apart(self, at: list[int], candidates: list[list[str]]) -> None:
        """Gives tensors back the names that they were given where they would share one with another tensor."""
        while clashes := _clashes([of_name[i] for i, of_name in zip(at, candidates, strict=True)]):
            one, other = clashes[0]
            self.collision = self.collision or (
                f"{self._given[one]} and {self._given[other]} are both {candidates[other][at[other]]} without the "
                "prefixes of wrappers. Leave one of them out, or pass rename= to the update"
            )
            for one, other in clashes:
                changed = other if at[other] else one
                at[changed], candidates[changed] = 0, [self._given[changed]]


def _clashes(names: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the indices of the first and of each other tensor with the same name."""
    first: dict[str, int] = {}
    pairs = ((first.setdefault(name, number), number) for number, name in enumerate(names))
    return [(one, other) for one, other in pairs if one != other]
