"""Names that a trainer may mean: without the prefixes of wrappers. And names that only PEFT gives.

Pure functions. Which of the candidates the engine's loader reads is found in `loader_names`.
"""

from __future__ import annotations

# No checkpoint has the first anywhere in a name. It may have the second, but not at the beginning.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
_OUTERMOST = ("module",), ("base_model", "model")
DRAFT = "draft."  # begins names that are for draft models alone
_OF_ADAPTERS = {"modules_to_save", "original_module"}  # in names that PEFT gives


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
