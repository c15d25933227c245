"""State that a model's forward pass makes of its weights, which an update of the weights leaves as it was.

A router may keep its weight in float32, an attention its padded sinks, a layer the product of two scales: the first
forward pass computes them and keeps them in an attribute, a closure or a cache. An update drops them. The next forward
pass computes them from the new weights by the model's own code, as in an engine that has just started. Where CUDA
graphs hold their addresses, the update computes them again in place (`in_place`). An update is refused if no code of
the model computes such state again.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.derived.live_signature import LiveSignature
from sglang_reshard.derived.loaded_state import RESTART, LoadedState, loaded_state
from sglang_reshard.derived.reachable import MISSING, Named, Table, tables
from sglang_reshard.errors import Unsupported
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.loader import has_flags

if TYPE_CHECKING:
    from sglang_reshard.derived.search import Search
    from sglang_reshard.trace.folded import Flag


class DerivedState:
    """The derived state of one engine rank's model."""

    def __init__(self, model: torch.nn.Module, addresses_stay: bool = False) -> None:
        """Must be called before the first forward pass, unless `remember_loaded` was.

        addresses_stay  CUDA graphs hold the addresses of tensors: what they read is made again in place
        """
        self._model, self._addresses_stay = model, addresses_stay
        loaded = [(m, state) for m in model.modules() if (state := loaded_state(m)) is not None]
        self._loaded = loaded or [(model, LoadedState(model))]
        self._flags: Sequence[Flag] = ()
        if any(map(has_flags, model.modules())):
            from sglang_reshard.trace.folded import flags_of

            self._flags = flags_of(model)
        self._set_by_loading = self._set_flags()
        self._live = LiveSignature(model)
        self._walk = -1  # of `_live`, when nothing was found that had appeared since
        self._fingerprint: Callable[[], tuple[Any, ...]] = tuple
        self._others: tuple[Any, ...] = ()
        self._found: Search | None = None  # once anything has appeared
        if not loaded:
            self._live.current()
            self._watch()

    def signature(self) -> int:
        """Drops what will be made again, and returns the `LiveSignature` of the model without it.

        Raises Unsupported, naming it, if a forward pass has computed something from weights that cannot be made again,
        or not in place where CUDA graphs read it.
        """
        if self._addresses_stay and (folded := sorted(self._set_flags() - self._set_by_loading)):
            raise Unsupported(
                f"the first forward pass changed weights in place and set {folded[0]}; CUDA graphs do not repeat "
                f"that. {RESTART}"
            )
        for lazy in self._found.lazy if self._found is not None else ():
            lazy.restore()
        signature = self._live.current()
        written = any(state.writes.changed for _, state in self._loaded)
        if self._live.walk != self._walk or written or self._fingerprint() != self._others:
            if self._found is None:
                from sglang_reshard.derived.search import Search

                self._found = Search(self._model, self._loaded, self._flags, self._addresses_stay)
            self._found.run()
            signature = self._live.current()
            self._watch()
        return signature

    def renew(self, *, model_ran: bool) -> None:
        """Must be called when new weights are live: drops what is made of the old ones, or makes it again in place.

        model_ran  code of the model may have run since `signature` dropped it: a staged update has served requests,
                   a first one has traced the loader
        """
        self._set_by_loading = self._set_flags()
        for _, state in self._loaded:
            state.writes.accept()
        for fold in self._found.folds if self._found is not None else ():
            fold.restore()
        if model_ran:
            self.signature()
        for remake in self._found.remakes if self._found is not None else ():
            remake.run()

    @property
    def remark(self) -> str:
        """Names the tensors that the engine has set since its start, and that no known code computes from weights."""
        if self._found is None or not self._found.unknown:
            return ""
        return f"not known to be independent of weights: {some_names(self._found.unknown)}"

    def _watch(self) -> None:
        """Remembers what the model has now: nothing of it has to be searched again."""
        self._walk = self._live.walk
        modules = {id(module) for module in self._model.modules()}  # `_live` sees their attributes
        others = (t for t in tables(self._model) if id(t.owner) not in modules or t.kind != "attributes")
        self._fingerprint = fingerprint_of(others)
        self._others = self._fingerprint()

    def _set_flags(self) -> set[str]:
        return {flag.label for flag in self._flags if flag.is_set}


def fingerprint_of(tables: Iterable[Table]) -> Callable[[], tuple[Any, ...]]:
    """Returns a function whose result changes when state appears in these tables.

    It compares types of values, numbers of values and sizes of caches, column by column as `LiveSignature` does it.
    """
    mappings, keys, sized, objects, names, empty, caches = (list[Any]() for _ in range(7))
    for table in tables:
        if table.kind == "cache":
            caches.append(table.entries)
        elif table.kind == "closure":
            for cell in table.owner.__closure__:
                if _is_empty(cell):
                    empty.append(cell)
                elif not callable(cell.cell_contents):
                    objects.append(cell)
                    names.append("cell_contents")
        elif isinstance(table.entries, Named):  # slots, variables of classes
            objects += [table.owner] * len(table.entries.places)
            names += table.entries.places
        else:
            entries = table.entries
            sized.append(entries)
            keyed = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
            kept = [key for key, value in keyed if not callable(value)]
            mappings += [entries] * len(kept)
            keys += kept

    def fingerprint() -> tuple[Any, ...]:
        try:
            values = [*map(type, map(operator.getitem, mappings, keys))]
            values += map(type, map(getattr, objects, names, repeat(MISSING)))
        except (KeyError, IndexError, ValueError):  # something is gone
            return (object(),)
        filled = sum(not _is_empty(cell) for cell in empty)
        return values, filled, list(map(len, sized)), [cache.cache_info().currsize for cache in caches]

    return fingerprint


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is MISSING
    except ValueError:
        return True
