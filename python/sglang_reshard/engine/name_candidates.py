"""Names that a trainer may mean: without the prefixes of wrappers, and of a language model within a larger one.

Pure functions. Which of the candidates the engine's loader reads is found in `loader_names`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# No checkpoint has the first anywhere in a name. It may have the second, but not at the beginning.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
_OUTERMOST = ("module",), ("base_model", "model")
_DRAFT = "draft."  # begins names that are for draft models alone

# Where multimodal engines have the language model, and text trainers have it, and the other way round.
MAPPINGS: tuple[Mapping[str, str], ...] = (
    {"model.": "model.language_model."},
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.language_model.": "model."},
    {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
)


def unwrapped(name: str) -> list[str]:
    """Returns what a name may be without its wrappers' prefixes, most of the name first; empty if it has none.

    `module.` and `base_model.model.` are first taken off the beginning only, and then `module.` everywhere, as a
    checkpoint may have a module of that name.
    """
    draft = _DRAFT if name.startswith(_DRAFT) else ""
    outer = [part for part in name.removeprefix(draft).split(".") if part not in _WRAPPERS]
    while found := next((w for w in _OUTERMOST if tuple(outer[: len(w)]) == w and len(outer) > len(w)), None):
        outer = outer[len(found) :]
    inner = [part for part in outer[:-1] if part != "module"] + outer[-1:]
    candidates = dict.fromkeys(draft + ".".join(kept) for kept in (outer, inner) if kept)
    return [other for other in candidates if other != name]


def mapped(names: Sequence[str], mapping: Mapping[str, str], among: Sequence[bool]) -> tuple[str, ...]:
    """Returns the names with other prefixes where `among` says so."""

    def one(name: str) -> str:
        return next((new + name[len(old) :] for old, new in mapping.items() if name.startswith(old)), name)

    return tuple(one(name) if chosen else name for name, chosen in zip(names, among, strict=True))
