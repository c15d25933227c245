"""State that a model's forward pass makes of its weights, which an update of the weights leaves as it was.

A router may keep its weight in float32, an attention its padded sinks, a layer the product of two scales: the first
forward pass computes them and keeps them in an attribute, a closure or a cache. An update drops them. The next forward
pass computes them from the new weights by the model's own code, as in an engine that has just started. Where CUDA
graphs hold their addresses, the update computes them again in place (`in_place`).
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable
from typing import Any

import torch

from sglang_reshard.derived.in_place import Remake, rehearse
from sglang_reshard.derived.loaded_state import Appeared, LoadedState, loaded_state
from sglang_reshard.derived.reachable import Table, tables, tensors_in
from sglang_reshard.errors import Unsupported
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.folded import flags_of, label
from sglang_reshard.trace.live import storage_key
from sglang_reshard.trace.live_signature import LiveSignature

logger = get_logger(__name__)
_flatten = itertools.chain.from_iterable
_SHOWN = 3


class DerivedState:
    """The derived state of one engine rank's model."""

    def __init__(self, model: torch.nn.Module, addresses_stay: bool = False) -> None:
        """Must be called before the first forward pass, unless `remember_loaded` was.

        addresses_stay  CUDA graphs hold the addresses of tensors: what they read is made again in place
        """
        self._model, self._addresses_stay = model, addresses_stay
        loaded = [(m, state) for m in model.modules() if (state := loaded_state(m)) is not None]
        self._loaded = loaded or [(model, LoadedState(model))]
        self._flags = flags_of(model)
        self._set_by_loading = {label(flag) for flag in self._flags if flag.is_set}
        self._live = LiveSignature(model)
        self._walk = -1  # of `_live`, at the last search
        self._others: tuple[Any, ...] = ()
        self._lazy: list[Appeared] = []
        self._remakes: list[Remake] = []
        self._judged: set[tuple[int, Any]] = set()  # tables and keys
        self._unknown: list[str] = []

    def signature(self) -> int:
        """Drops what will be made again, and returns the `live_signature` of the model without it.

        Raises Unsupported, naming the tensor, if what CUDA graphs read cannot be made again in place.
        """
        for flag in self._flags if self._addresses_stay else ():
            if flag.is_set and label(flag) not in self._set_by_loading:
                raise Unsupported(
                    f"the first forward pass changed weights in place and set {label(flag)}; CUDA graphs do not repeat "
                    "that. Start the engine with disable_cuda_graph=True"
                )
        for lazy in self._lazy:
            lazy.restore()
        signature = self._live.current()
        if self._live.walk != self._walk or self._fingerprint_of_others() != self._others:
            self._search()
            signature = self._live.current()
            self._walk = self._live.walk
            self._others = self._fingerprint_of_others()
        return signature

    def renew(self, *, model_ran: bool) -> None:
        """Must be called when new weights are live: drops what is made of the old ones, or makes it again in place.

        model_ran  code of the model may have run since `signature` dropped it: a staged update has served requests,
                   a first one has traced the loader
        """
        self._set_by_loading = {label(flag) for flag in self._flags if flag.is_set}
        if model_ran:
            self.signature()
        for remake in self._remakes:
            remake.run()

    @property
    def remark(self) -> str:
        """Names the tensors that the engine has set since its start and whose inputs are unknown."""
        if not self._unknown:
            return ""
        return f"not known to be independent of weights: {some_names(self._unknown, _SHOWN)}"

    def _search(self) -> None:
        weights = {storage_key(t) for t in (*self._model.parameters(), *self._model.buffers())}
        for model, state in self._loaded:
            for found in state.appeared(model):
                key = id(found.table.identity), found.key
                if key in self._judged or (_is_global(found.table) and not self._resembles_weights(found)):
                    continue
                if not found.lazy:
                    self._judged.add(key)
                    if not _storages(found) <= weights:
                        self._unknown.append(found.path)
                        logger.warning("%s was set after loading; updates do not write it", found.path)
                elif self._addresses_stay:
                    self._judge_in_place(found, weights - _storages(found))
                    self._judged.add(key)
                else:
                    found.restore()
                    self._lazy.append(found)
        modules = {id(module) for module in self._model.modules()}  # `_live` sees their attributes
        others = [t for t in tables(self._model) if id(t.owner) not in modules or t.kind != "attributes"]
        self._dicts = [t.entries for t in others if isinstance(t.entries, dict) and t.kind != "closure"]
        self._lists = [t.entries for t in others if isinstance(t.entries, list)]
        self._cells = list(_flatten(t.entries.values() for t in others if t.kind == "closure"))
        self._caches = [t.entries for t in others if t.kind == "cache"]

    def _judge_in_place(self, found: Appeared, weights: set[int]) -> None:
        outcome = rehearse(found, weights)
        if outcome.remake is not None:
            self._remakes.append(outcome.remake)
        elif outcome.refusal and self._resembles_weights(found):
            raise Unsupported(
                f"the first forward pass computed {found.path} from weights. CUDA graphs hold its address, and it "
                f"cannot be recomputed in place: {outcome.refusal}. Start the engine with disable_cuda_graph=True"
            )
        elif outcome.refusal:
            self._unknown.append(found.path)

    def _resembles_weights(self, found: Appeared) -> bool:
        """Returns whether something in it has as many elements as a weight."""
        value, owner = found.table.get(found.key), found.table.owner
        model = owner if isinstance(owner, torch.nn.Module) else self._model
        sizes = {p.numel() for p in model.parameters()} - {1}
        return any(t.numel() in sizes for t in tensors_in(value))

    def _fingerprint_of_others(self) -> tuple[Any, ...]:
        """Returns what changes when state appears that `_live` does not see: outside of modules."""
        if self._walk < 0:
            return ()
        return (
            [list(map(type, _flatten(map(_values, self._dicts)))), list(map(len, self._lists))],
            list(map(_cell_type, self._cells)),
            [cache.cache_info().currsize for cache in self._caches],
        )


def _values(entries: dict[Any, Any]) -> Iterable[Any]:
    return entries.values()


def _cell_type(cell: Any) -> type:
    try:
        return type(cell.cell_contents)
    except ValueError:
        return type(None)


def _is_global(table: Table) -> bool:
    if table.kind == "container":
        return table.keeper is not None and isinstance(table.keeper[0], types.ModuleType)
    return table.kind in ("globals", "cache")


def _storages(found: Appeared) -> set[int]:
    return {storage_key(t) for t in tensors_in(found.table.get(found.key))}
