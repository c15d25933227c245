"""State that a model's forward pass makes of its weights, which an update of the weights leaves as it was.

A router may keep its weight in float32, an attention its padded sinks, a layer the product of two scales: the first
forward pass computes them and keeps them in an attribute, a closure or a cache. An update drops them. The next forward
pass computes them from the new weights by the model's own code, as in an engine that has just started. Where CUDA
graphs hold their addresses, the update computes them again in place (`in_place`). What no code of the model computes
again is refused, if it may depend on weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from sglang_reshard.derived.in_place import Remake, rehearse
from sglang_reshard.derived.laziness import guards, is_lazy, is_made_of_values, may_read, writes_with
from sglang_reshard.derived.loaded_state import Change, LoadedState, loaded_state
from sglang_reshard.derived.reachable import numbers_in, tables, tensors_in
from sglang_reshard.derived.watched import Watched
from sglang_reshard.errors import Unsupported
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.folded import flags_of, label
from sglang_reshard.trace.live import storage_key
from sglang_reshard.trace.live_signature import LiveSignature

logger = get_logger(__name__)
_SHOWN = 3
_INDICES = (torch.int32, torch.int64, torch.bool)  # dtypes of what is no function of weights, if no weight has them
_RESTART = "Start the engine with disable_cuda_graph=True"


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
        self._watched, self._others = Watched(), ()
        self._lazy: list[Change] = []
        self._folds: list[Change] = []  # guards of what a forward pass does to weights in place
        self._remakes: list[Remake] = []
        self._judged: set[tuple[int, Any]] = set()  # tables and keys
        self._unknown: list[str] = []

    def signature(self) -> int:
        """Drops what will be made again, and returns the `live_signature` of the model without it.

        Raises Unsupported, naming it, if a forward pass has computed something from weights that cannot be made again,
        or not in place where CUDA graphs read it.
        """
        for flag in self._flags if self._addresses_stay else ():
            if flag.is_set and label(flag) not in self._set_by_loading:
                raise Unsupported(
                    f"the first forward pass changed weights in place and set {label(flag)}; CUDA graphs do not repeat "
                    f"that. {_RESTART}"
                )
        for lazy in self._lazy:
            lazy.restore()
        signature = self._live.current()
        written = any(state.written for _, state in self._loaded)
        if self._live.walk != self._walk or written or self._watched.fingerprint() != self._others:
            self._search()
            signature = self._live.current()
            self._walk = self._live.walk
            self._others = self._watched.fingerprint()
        return signature

    def renew(self, *, model_ran: bool) -> None:
        """Must be called when new weights are live: drops what is made of the old ones, or makes it again in place.

        model_ran  code of the model may have run since `signature` dropped it: a staged update has served requests,
                   a first one has traced the loader
        """
        self._set_by_loading = {label(flag) for flag in self._flags if flag.is_set}
        for _, state in self._loaded:
            state.accept()
        for fold in self._folds:
            fold.restore()
        if model_ran:
            self.signature()
        for remake in self._remakes:
            remake.run()

    @property
    def remark(self) -> str:
        """Names the tensors that the engine has set since its start, and that no known code computes from weights."""
        if not self._unknown:
            return ""
        return f"not known to be independent of weights: {some_names(self._unknown, _SHOWN)}"

    def _search(self) -> None:
        parameters = list(self._model.named_parameters())
        self._names = {name.rpartition(".")[2] for name, _ in parameters}
        self._of_weights = {p.dtype for _, p in parameters}
        self._weights = {storage_key(t) for t in (*self._model.parameters(), *self._model.buffers())}
        for model, state in self._loaded:
            changes = list(state.changes(model))
            for change in changes:
                key = id(change.table.identity), change.key
                if key not in self._judged and self._may_hold(state, change):
                    self._judge(change, changes, state, key)
        modules = {id(module) for module in self._model.modules()}  # `_live` sees their attributes
        others = [t for t in tables(self._model) if id(t.owner) not in modules or t.kind != "attributes"]
        self._watched = Watched.of(others)

    def _may_hold(self, state: LoadedState, change: Change) -> bool:
        """Returns whether something of weights may be in it: not in flags, and not in most whole numbers."""
        value = change.value
        if isinstance(value, int) and not isinstance(value, bool):
            return change.how == "appeared" and is_made_of_values(change.table, change.key)
        return bool(state.new_tensors(change) or numbers_in(value))

    def _judge(self, change: Change, changes: Sequence[Change], state: LoadedState, key: tuple[int, Any]) -> None:
        of_parameter = state.replaces_parameter(change)
        if change.how == "written" and isinstance(change.value, torch.nn.Parameter):
            self._judge_folded(change, changes)
        elif change.how == "appeared" and not of_parameter and is_lazy(change.table, change.key):
            if not self._addresses_stay:
                return self._drop((change, *guards(change, changes)))
            self._judge_in_place(change, guards(change, changes))
        elif change.how == "replaced" and isinstance(change.value, torch.nn.Parameter):
            return  # `_live` sees it, and it is loaded
        elif (guarding := guards(change, changes)) and not self._addresses_stay:
            self._drop((change, *guarding))
        elif change.how == "appeared":
            self._judge_unknown(state, change, of_parameter)
        elif (guarding or self._resembles_weights(change)) and writes_with(change, self._names):
            self._refuse(change, "changed")
        self._judged.add(key)

    def _drop(self, changes: Iterable[Change]) -> None:
        """Restores values now and before each update: the model's code makes them again."""
        for change in changes:
            change.restore()
            self._lazy.append(change)

    def _judge_folded(self, change: Change, changes: Sequence[Change]) -> None:
        """A forward pass has changed a parameter in place."""
        path = change.table.path
        if any(flag.is_set and flag.path == path for flag in self._flags):
            return  # the flag is put back when new weights are live
        guarding = guards(change, changes)
        if not guarding or self._addresses_stay:
            self._refuse(change, "changed")
        self._folds += guarding

    def _judge_in_place(self, change: Change, guarding: Sequence[Change]) -> None:
        outcome = rehearse(change, guarding, self._weights - _storages(change))
        if outcome.remake is not None:
            self._remakes.append(outcome.remake)
        elif outcome.refusal and self._may_depend(change):
            raise Unsupported(
                f"the first forward pass computed {change.path} from weights. CUDA graphs hold its address, and it "
                f"cannot be recomputed in place: {outcome.refusal}. {_RESTART}"
            )
        elif outcome.refusal and not change.table.is_global:
            self._unknown.append(change.path)

    def _judge_unknown(self, state: LoadedState, change: Change, of_parameter: bool) -> None:
        """No code is known to make again what has appeared."""
        value, held = change.value, state.new_tensors(change)
        plain = isinstance(value, (float, complex, int, Mapping, Sequence)) or type(value).__module__ == "numpy"
        if not held and not (plain and numbers_in(value)):
            return
        if not of_parameter and self._may_depend(change):
            self._refuse(change, "computed")
        if held and (not change.table.is_global or self._resembles_weights(change)):
            self._unknown.append(change.path)
            logger.warning("%s was set after loading; updates do not write it", change.path)

    def _may_depend(self, change: Change) -> bool:
        """Returns whether weights may be in it, as far as its shape and the code that stores it tell."""
        indices = set(_INDICES) - self._of_weights
        tensors = [t for t in tensors_in(change.value, new=True) if t.dtype not in indices]
        if not tensors and not numbers_in(change.value) and not isinstance(change.value, int):
            return False
        reads = may_read(change.table, change.key, self._names)
        if change.table.is_global:
            return reads and (not tensors or self._resembles_weights(change))
        return reads or self._resembles_weights(change)

    def _resembles_weights(self, change: Change) -> bool:
        """Returns whether something in it has as many elements as a weight, or is one that was padded."""
        owner = change.table.owner
        model = owner if isinstance(owner, torch.nn.Module) else self._model
        shapes = {tuple(sorted(d for d in p.shape if d != 1)) for p in model.parameters()} - {()}
        return any(_is_like(tuple(sorted(d for d in t.shape if d != 1)), shapes) for t in tensors_in(change.value))

    def _refuse(self, change: Change, what: str) -> NoReturn:
        raise Unsupported(
            f"{change.path} was {what} after the engine had loaded its weights. It may depend on them, and no code of "
            "the model is known to compute it again. To serve new weights, start an engine on their checkpoint. Please "
            "report the model and the engine's options"
        )


def _is_like(dims: tuple[int, ...], shapes: Iterable[tuple[int, ...]]) -> bool:
    return any(
        math.prod(dims) == math.prod(shape)
        or (len(dims) == len(shape) and all(s <= d < 2 * s for d, s in zip(dims, shape, strict=True)))
        for shape in shapes
    )


def _storages(change: Change) -> set[int]:
    return {storage_key(t) for t in tensors_in(change.value)}
