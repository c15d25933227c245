"""Finds the names under which an engine's loader reads a trainer's tensors, if it does not read the given names.

A trainer's names may have prefixes of wrappers (`module.`, `_orig_mod.`), or the language model and its towers
elsewhere than a multimodal engine has them. Only the loader knows which names it reads. So where it refuses names as
they are given, or leaves some unread, each engine rank runs it over other candidates, and all ranks together choose
those that are read. A name that the loader reads is not changed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from sglang_reshard.engine.context import UpdateContext
from sglang_reshard.engine.names.parts import Part, Tried, is_adapter, parts_of, placed, rename_of, unwrapped
from sglang_reshard.engine.targets import LoaderNames, Target
from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.names import held_back, matches_any
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.loader import NamesRead

_ROUNDS = 8  # in which names lose their wrappers; each runs the loader once
_PLACES_TRIED = 32  # for all parts of a model together; each runs the loader once


class Reading(msgspec.Struct, frozen=True):
    """The names that one engine rank's loader reads: a packed bit for each. refused: the index at which it raised."""

    read: bytes
    refused: int = -1


Probe = Callable[[Sequence[str]], Sequence[Reading]]


def search_names(context: UpdateContext, target: Target, layout: SourceLayout) -> LoaderNames:
    """Returns the names of the update's tensors (`layout`) as loaders read them. Collective over engine ranks.

    Raises, on all engine ranks, what `find_names` raises.
    """
    rounds = itertools.count()

    def probe(names: Sequence[str]) -> list[Reading]:
        specs = [replace(tensor.spec, name=name) for tensor, name in zip(layout.tensors, names, strict=True)]
        return context.all_gather(f"names/{next(rounds)}", reading(target.names_read(specs), names))

    request = context.request
    return find_names(request.layout, [tensor.name for tensor in layout.tensors], request.ignore, probe)


def find_names(layout: str, given: Sequence[str], ignore: Sequence[str], probe: Probe) -> LoaderNames:
    """Returns the names under which the engine reads most of the given tensors. Every engine rank finds the same.

    layout  content hash of the layout whose tensors have the names `given`
    ignore  fnmatch patterns of given names that need not be read. If the loader raises at one of them, those that the
            same pattern matches are kept from it
    probe   returns what the loader of each engine rank reads of these tensors under other names. Collective

    Raises Mismatch if it is ambiguous where a part of the model is.
    """
    search, hint = _Search(tuple(given), ignore, probe), ""
    best = search.without_wrappers()
    if not best.complete:
        best, hint = search.at_other_places(best)
    hint = "; ".join(filter(None, (search.collision, hint, search.adapter_hint(best))))
    names = search.kept_from_loader(best.names)
    if names == tuple(given):
        return LoaderNames(layout, hint=hint)
    digest = hashlib.sha256(msgspec.msgpack.encode(names)).hexdigest()
    pairs = zip(given, names, strict=True)
    changed = [f"{old} is read as {new}" for old, new in pairs if new not in (old, held_back(old))]
    return LoaderNames(layout, tuple(given), names, hint, digest, some_names(changed) if changed else "")


def reading(found: NamesRead, names: Sequence[str]) -> Reading:
    """Returns a rank's answer to a probe of these names."""
    bits = np.packbits([name in found.read for name in names]).tobytes()
    return Reading(bits, names.index(found.refused) if found.refused in names else -1)


class _Search:
    """`collision`: which two tensors have one name without their wrappers; empty if none have."""

    def __init__(self, given: tuple[str, ...], ignore: Sequence[str], probe: Probe) -> None:
        self._given, self._ignore, self._probe = given, ignore, probe
        self._needless = tuple(matches_any(name, ignore) for name in given)
        self._held: frozenset[int] = frozenset()
        self.collision = ""

    def without_wrappers(self) -> Tried:
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
        return Tried(tuple(new if r else old for old, new, r in names), best.read, best.refused, best.complete)

    def at_other_places(self, best: Tried) -> tuple[Tried, str]:
        """Puts parts of the model elsewhere, if at one place of each and no other all is read. Returns a hint, too."""
        unread = [n for n, read in enumerate(best.read) if not read and not self._needless[n]]
        bare = list(best.names)
        for n in unread:
            bare[n] = next(iter(unwrapped(bare[n])), bare[n])
        if _clashes(bare):
            return best, ""
        parts = parts_of(bare, unread)
        if tuple(bare) == best.names:
            for part in parts:
                part.learn(best)
        for _ in range(_PLACES_TRIED):
            if not self._try_places(bare, parts):
                break
        chosen = {part.prefix: part.best for part in parts}
        names = placed(bare, parts, chosen)
        if names == best.names or _clashes(names):
            return best, ""
        tried = self._try(names)
        rename = rename_of(self._given, bare, parts, chosen)
        if tried.complete:
            if several := next((part for part in parts if len(part.whole) > 1), None):
                ways = [rename_of(self._given, bare, parts, chosen | {several.prefix: at}) for at in several.whole]
                raise Mismatch(
                    f"{self._given[several.of[0]]} matches several tensors of this engine; pass "
                    f"{' or '.join(f'rename={way!r}' for way in ways)} to the update"
                )
            return tried, ""
        if (more := tried.number_read - best.number_read) <= 0:
            return best, ""
        return best, f"With rename={rename!r} the engine would read {more} more of the tensors that are sent"

    def _try_places(self, names: Sequence[str], parts: Sequence[Part]) -> bool:
        """Tries the next place of each part. Returns whether anything was learned."""
        at = {part.prefix: next(iter(part.untried), part.best) for part in parts}
        new = placed(names, parts, at)
        if clashes := {n for pair in _clashes(new) for n in pair}:
            moved = (part for part in parts if at[part.prefix] != part.prefix and part.untried)
            taken = next((part for part in moved if not clashes.isdisjoint(part.of)), None)
            if taken is not None:
                taken.read[at[taken.prefix]] = 0
            return taken is not None
        tried = self._try(new)
        return any([part.learn(tried, at[part.prefix]) for part in parts])

    def _try(self, names: tuple[str, ...]) -> Tried:
        answers = self._probe(self.kept_from_loader(names))
        bits = [np.unpackbits(np.frombuffer(a.read, np.uint8), count=len(names)).astype(bool) for a in answers]
        read = np.logical_or.reduce(bits)
        refused = tuple(sorted({a.refused for a in answers if a.refused >= 0}))
        if self._hold_back(refused):
            return self._try(names)
        complete = not refused and bool((read | np.array(self._needless)).all())
        return Tried(names, tuple(read.tolist()), refused, complete)

    def _hold_back(self, refused: Iterable[int]) -> bool:
        """Keeps needless tensors from the loader at which it raises. Returns whether it has been given one of them."""
        names = [self._given[n] for n in refused if self._needless[n]]
        patterns = [pattern for pattern in self._ignore if any(matches_any(name, [pattern]) for name in names)]
        more = {n for n, name in enumerate(self._given) if matches_any(name, patterns)}
        known, self._held = self._held, self._held | more
        return known != self._held

    def kept_from_loader(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names as the loader gets them: marked if it does not."""
        if not self._held:
            return names
        return tuple(held_back(self._given[n]) if n in self._held else name for n, name in enumerate(names))

    def adapter_hint(self, best: Tried) -> str:
        """Says what to send of a PEFT model; empty unless tensors of an adapter are unread."""
        unread = (n for n, read in enumerate(best.read) if not read and not self._needless[n])
        if best.complete or not any(is_adapter(self._given[n]) for n in unread):
            return ""
        return (
            "These are the tensors of a PEFT model with its adapter. Send the adapter as one, with "
            "sender.lora_adapter(name, adapter_config(model)).update(adapter_tensors(model)); or call "
            "model.merge_adapter() and send base_tensors(model); or send the base weights alone, with "
            "ignore=['*lora_*']. The functions are in sglang_reshard.sources"
        )

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
