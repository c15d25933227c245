"""Names that a trainer may mean: without the prefixes of wrappers, and with a part of the model at another place.

Text trainers, transformers 5 and the checkpoints of multimodal models begin the names of one part with different
prefixes: of the language model, its head, towers. `search` finds which of the names the engine's loader reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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

    @property
    def number_read(self) -> int:
        return sum(self.read)


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

    def learn(self, tried: Tried, place: str | None = None) -> bool:
        """Notes what the loader has read at `place`. Returns False if that is known, or if it stopped too early."""
        place = self.prefix if place is None else place
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
