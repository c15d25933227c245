"""Searches a model for state that was made since it was loaded, and decides how an update treats each.

    lazy     the model's code makes it again once it is gone: it is dropped
    folds    a forward pass has set these flags and changed weights in place: they are put back with new weights
    remakes  CUDA graphs hold its address, and a method makes it again in place
    unknown  nothing shows that it depends on weights, nor that it does not: it is named in a remark

An update is refused if no code is known to make the state again, and it may depend on weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from sglang_reshard.derived.in_place import Remake, rehearse
from sglang_reshard.derived.laziness import guards, is_lazy, is_made_of_values, is_set_by_loading, making, may_read
from sglang_reshard.derived.loaded_state import RESTART, Change, LoadedState
from sglang_reshard.derived.reachable import numbers_in, tensors_in
from sglang_reshard.errors import Unsupported
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.trace.folded import Flag
from sglang_reshard.trace.live import storage_key

logger = get_logger(__name__)
_INDICES = (torch.int32, torch.int64, torch.bool)  # dtypes of what is no function of weights, if no weight has them


class Search:
    """The state that was found in a model. `loaded`: its parts, each with its state when it had been loaded."""

    def __init__(
        self,
        model: torch.nn.Module,
        loaded: Sequence[tuple[torch.nn.Module, LoadedState]],
        flags: Sequence[Flag],
        addresses_stay: bool,
    ) -> None:
        self._model, self._loaded, self._flags, self._addresses_stay = model, loaded, flags, addresses_stay
        self.lazy: list[Change] = []
        self.folds: list[Change] = []
        self.remakes: list[Remake] = []
        self.unknown: list[str] = []
        self._judged: set[tuple[int, Any]] = set()  # tables and keys

    def run(self) -> None:
        """Judges all that differs from when the model had been loaded. Raises Unsupported."""
        parameters = list(self._model.named_parameters())
        self._names = {name.rpartition(".")[2] for name, _ in parameters}
        self._of_weights = {p.dtype for _, p in parameters}
        self._weights = {storage_key(t) for t in (*self._model.parameters(), *self._model.buffers())}
        for model, state in self._loaded:
            changes = state.changes(model)
            for change in changes:
                key = id(change.table.identity), change.key
                if key not in self._judged and self._may_hold(state, change):
                    self._judge(change, changes, state, key)

    def _may_hold(self, state: LoadedState, change: Change) -> bool:
        """Returns whether something of weights may be in it: not in flags, and not in most whole numbers."""
        value = change.value
        if isinstance(value, int) and not isinstance(value, bool):
            return change.how == "appeared" and is_made_of_values(change)
        return bool(state.new_tensors(change) or _numbers(change))

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
        elif guarding and (self._may_depend(change) if change.how == "appeared" else may_read(change, self._names)):
            self._refuse_in_place(change, f"it is computed together with {guarding[0].path}")
        elif change.how == "appeared":
            self._judge_unknown(state, change, of_parameter)
        elif change.how == "written" and change.table.entries is getattr(change.table.owner, "_buffers", None):
            pass  # SGLang writes buffers when it resumes memory
        elif self._resembles_weights(change) and may_read(change, self._names):
            self._refuse(change, "changed")
        self._judged.add(key)

    def _drop(self, changes: Iterable[Change]) -> None:
        """Restores values now and before each update: the model's code makes them again."""
        for change in changes:
            change.restore()
            self.lazy.append(change)

    def _judge_folded(self, change: Change, changes: Sequence[Change]) -> None:
        """A forward pass has changed a parameter in place."""
        path = change.table.path
        if any(flag.is_set and flag.path == path for flag in self._flags):
            return  # the flag is put back when new weights are live
        if not making(change):
            return  # somebody who has the model has changed it
        guarding = guards(change, changes)
        if not guarding or self._addresses_stay:
            self._refuse(change, "changed")
        self.folds += guarding

    def _judge_in_place(self, change: Change, guarding: Sequence[Change]) -> None:
        outcome = rehearse(change, guarding, self._weights - _storages(change))
        if isinstance(outcome, Remake):
            self.remakes.append(outcome)
        elif outcome and self._may_depend(change):
            self._refuse_in_place(change, outcome)
        elif outcome and not change.table.is_global:
            self.unknown.append(change.path)

    def _judge_unknown(self, state: LoadedState, change: Change, of_parameter: bool) -> None:
        """No code is known to make again what has appeared."""
        if is_set_by_loading(change):
            return
        if not of_parameter and self._may_depend(change):
            self._refuse(change, "computed")
        if _storages(change) <= self._weights:
            return
        if state.new_tensors(change) and (not change.table.is_global or self._resembles_weights(change)):
            self.unknown.append(change.path)
            logger.warning("%s was set after loading; updates do not write it", change.path)

    def _may_depend(self, change: Change) -> bool:
        """Returns whether weights may be in it, as far as its shape and the code that stores it tell."""
        reads, numbers = may_read(change, self._names), bool(_numbers(change)) or isinstance(change.value, int)
        alike = self._resembles_weights(change) or (numbers and is_made_of_values(change))
        if change.table.is_global:  # what many functions use, such as memory to compute in
            return reads and alike
        return alike or (reads and (numbers or bool(self._of_floats(change))))

    def _of_floats(self, change: Change) -> list[torch.Tensor]:
        """Returns the tensors in it, without those that count or index."""
        indices = set(_INDICES) - self._of_weights
        return [t for t in tensors_in(change.value, new=True) if t.dtype not in indices]

    def _resembles_weights(self, change: Change) -> bool:
        """Returns whether some tensor in it has the shape of a weight, padded or not, or of a row, or is a scale."""
        owner = change.table.owner
        shapes = _shapes(owner.parameters()) if isinstance(owner, torch.nn.Module) else set()
        shapes = shapes or _shapes(self._model.parameters())
        return any(_is_like(tensor, shapes) for tensor in self._of_floats(change))

    def _refuse_in_place(self, change: Change, why: str) -> NoReturn:
        raise Unsupported(
            f"the first forward pass computed {change.path} from weights. CUDA graphs hold its address, and it "
            f"cannot be recomputed in place: {why}. {RESTART}"
        )

    def _refuse(self, change: Change, what: str) -> NoReturn:
        raise Unsupported(
            f"{change.path} was {what} after the engine had loaded its weights. It may depend on them, and no code of "
            "the model is known to compute it again. To serve new weights, start an engine on their checkpoint. Please "
            "report the model and the engine's options"
        )


def _numbers(change: Change) -> list[Any]:
    """Returns numbers that may be of weights. Those of a configuration are not."""
    found = numbers_in(change.value)
    return found if not found or is_made_of_values(change) else numbers_in(change.value, in_objects=False)


def _shapes(tensors: Iterable[torch.Tensor]) -> set[tuple[int, ...]]:
    return {tuple(sorted(d for d in t.shape if d != 1)) for t in tensors} - {()}


def _is_like(tensor: torch.Tensor, shapes: Iterable[tuple[int, ...]]) -> bool:
    if tensor.numel() == 1:
        return tensor.device.type != "meta" and tensor.item() not in (0, 1)  # these are no scales
    (dims,) = _shapes([tensor])
    return any(
        tensor.numel() == math.prod(shape)
        or (len(dims) == 1 and dims[0] in shape)
        or (len(dims) == len(shape) and all(s <= d < 2 * s for d, s in zip(dims, shape, strict=True)))
        for shape in shapes
    )


def _storages(change: Change) -> set[int]:
    return {storage_key(t) for t in tensors_in(change.value)}
