"""Finds the names under which an engine's loader reads a trainer's tensors, if it does not read the given names.

A trainer's names may have prefixes of wrappers (`module.`, `_orig_mod.`). Text trainers, transformers 5 and the
checkpoints of multimodal models begin the names of one part with different prefixes: of the language model, its head,
towers. Only the loader knows which names it reads. So where it refuses names as they are given, or leaves some unread,
each engine rank runs it over other candidates, and all ranks together choose those that are read. A name that the
loader reads is not changed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from sglang_reshard.engine.context import UpdateContext
from sglang_reshard.engine.targets import LoaderNames, Target
from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.names import held_back, matches_any
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.loader import NamesRead

_ROUNDS = 8  # in which names lose their wrappers; each runs the loader once
_PLACES_TRIED = 32  # for all parts of a model together; each runs the loader once
# No checkpoint has the first anywhere in a name. It may have the second, but not at the beginning.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
_OUTERMOST = ("module",), ("base_model", "model")
DRAFT = "draft."  # begins names that are for draft models alone
_OF_ADAPTERS = {"modules_to_save", "original_module"}  # in names that PEFT gives
_BODY = "model."
# Of the same part; the first ones of the language model.
_LANGUAGE = (_BODY, "model.language_model.", "language_model.model.", "thinker.model.")
_PLACES: tuple[tuple[str, ...], ...] = (
    _LANGUAGE,
    ("lm_head.", "language_model.lm_head.", "thinker.lm_head."),
    (
        *("visual.", "vision_tower.", "vision_tower.vision_model.", "vision_model."),
        *("model.visual.", "model.vision_tower.", "model.vision_tower.vision_model.", "model.vision_model."),
        "thinker.visual.",
    ),
    ("multi_modal_projector.", "model.multi_modal_projector.", "model.projector.", "mlp_AR."),
)
_WHOLES = "", "model.", "thinker."  # in which a part with any other name is


def unwrapped(name: str) -> list[str]:
    """Returns what a name may be without its wrappers' prefixes, most of the name first; empty if it has none.

    `module.` and `base_model.model.` are first taken off the beginning only, and then `module.` everywhere, as a
    checkpoint may have a module of that name.
    """
    draft = DRAFT if name.startswith(DRAFT) else ""
    outer = [part for part in name.removeprefix(draft).split(".") if part not in _WRAPPERS]
    while found := next((w for w in _OUTERMOST if tuple(outer[: len(w)]) == w and len(outer) > len(w)), None):
        outer = outer[len(found) :]
    inner = [part for part in outer[:-1] if part != "module"] + outer[-1:]
    candidates = dict.fromkeys(draft + ".".join(kept) for kept in (outer, inner) if kept)
    return [other for other in candidates if other != name]


def is_adapter(name: str) -> bool:
    """Returns whether PEFT gives this name to a tensor that the model has because of an adapter."""
    parts = name.split(".")
    return any(part.startswith("lora_") for part in parts) or not _OF_ADAPTERS.isdisjoint(parts)


@dataclass(frozen=True, slots=True)
class Tried:
    """Names, and the result of the engine's loader for them.

    read      whether some engine rank reads each
    refused   indices at which a rank's loader raised
    complete  no rank's did, and all are read that have to be
    """

    names: tuple[str, ...]
    read: tuple[bool, ...]
    refused: tuple[int, ...]
    complete: bool


@dataclass(slots=True)
class Part:
    """A part of the model, and where the loader reads it.

    prefix  of its names as they are
    of      numbers of its tensors
    read    place (a prefix) -> how many of its names the loader reads there, of places that were tried
    """

    prefix: str
    of: list[int]
    read: dict[str, int] = field(default_factory=dict)

    @property
    def whole(self) -> list[str]:
        """The places at which all of its names are read."""
        return [place for place, count in self.read.items() if count == len(self.of)]

    @property
    def untried(self) -> list[str]:
        """The places to try; none if all of its names are read as they are."""
        if self.prefix in self.whole:
            return []
        whole = _whole(self.prefix)
        default = tuple(other + self.prefix.removeprefix(whole) for other in _WHOLES)
        places = next((places for places in _PLACES if self.prefix in places), default)
        return [place for place in dict.fromkeys((self.prefix, *places)) if place not in self.read]

    @property
    def best(self) -> str:
        return max(self.read, key=lambda place: self.read[place], default=self.prefix)

    def learn(self, tried: Tried, place: str) -> bool:
        """Notes what the loader has read at `place`. Returns False if that is known, or if it stopped too early."""
        count = sum(tried.read[n] for n in self.of)
        seen = count == len(self.of) or not tried.refused or not set(tried.refused).isdisjoint(self.of)
        if place in self.read or not seen:
            return False
        self.read[place] = count
        return True


def parts_of(names: Sequence[str], among: Iterable[int]) -> list[Part]:
    """Returns the parts that names `among` them belong to. Names for draft models alone belong to none."""
    nested = any(name.startswith(_LANGUAGE[1:]) for name in names)
    parts: dict[str, list[int]] = {}
    for number in among:
        if not names[number].startswith(DRAFT):
            parts.setdefault(_prefix(names[number], nested), []).append(number)
    return [Part(prefix, of) for prefix, of in parts.items()]


def placed(names: Sequence[str], parts: Iterable[Part], at: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names with each part at its place in `at`, which has the places by prefixes."""
    new = list(names)
    for part in parts:
        for number in part.of:
            new[number] = at[part.prefix] + names[number].removeprefix(part.prefix)
    return tuple(new)


def rename_of(
    given: Sequence[str], bare: Sequence[str], parts: Iterable[Part], at: Mapping[str, str]
) -> dict[str, str]:
    """Returns the `rename` of an update that does the same.

    given, bare  the names with and without the prefixes of wrappers
    """
    found = {}
    for prefix, n in [(part.prefix, n) for part in parts if at[part.prefix] != part.prefix for n in part.of]:
        modules = given[n].split(".")
        rests = (".".join(modules[m:]) for m in range(len(modules)))
        rest = next((r for r in rests if r.startswith(prefix) and bare[n] in (r, *unwrapped(r))), given[n])
        found[given[n].removesuffix(rest) + prefix] = at[prefix]  # with the wrappers' before it
    return found


def _prefix(name: str, nested: bool) -> str:
    """`nested`: the language model is within `model.`, next to towers."""
    known = [p for places in _PLACES for p in places if name.startswith(p) and not (nested and p == _BODY)]
    if known:
        return max(known, key=len)
    whole = _whole(name)
    part, dot, _ = name.removeprefix(whole).partition(".")
    return whole + part + dot


def _whole(name: str) -> str:
    return max((whole for whole in _WHOLES if name.startswith(whole)), key=len)


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
            best = max(best, tried, key=lambda one: (one.complete, sum(one.read)))
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
                part.learn(best, part.prefix)
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
        if (more := sum(tried.read) - sum(best.read)) <= 0:
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
