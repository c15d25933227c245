"""Finds out what the engine's own start loads: which live tensors a checkpoint fills, and which it leaves alone.

An update must write all that a start on the model's checkpoint writes, and need not write more. Two sources show it.
Neither costs anything while an update writes every parameter and every persistent buffer.

    the engine's checkpoint   the loader is traced once more, with the names and shapes in the headers of the files that
                              the engine was started with. Decides, if the checkpoint is complete
    a probe                   without these files. The loader is traced with one more tensor for each persistent buffer
                              that was not written, to see whether it takes it
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.names import matches_any
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.kept import engine_name, patterns_of
from sglang_reshard.trace.lazy_tensor import CheckpointTensor, Record, VersionedView, checkpoint_tensors, leaves
from sglang_reshard.trace.loader import Loader, check_names
from sglang_reshard.trace.program import MayStay

_MOST_PATTERNS = 12  # that an error lists


@dataclass(frozen=True, slots=True)
class EngineStart:
    """The start of an engine.

    specs       the tensors of its own checkpoint, under the names that its loader gets; None if they are not known
    unknown     why not
    randomized  the models whose start on dummy weights was not seen by `keep_initial_values`
    """

    specs: Sequence[TensorSpec] | None
    unknown: str = ""
    randomized: Sequence[torch.nn.Module] = ()


class StockLoad:
    """Finds what the loader writes with the engine's own checkpoint. Traces at most once, when it is asked.

    unknown  why nothing is known; empty if it is, or before it is asked
    """

    def __init__(
        self,
        loader: Loader,
        specs: Sequence[TensorSpec],
        records: Sequence[Record],
        start: Callable[[], EngineStart] | None,
        may_stay: MayStay,
    ) -> None:
        """`records` are those of an update that sends `specs`. `start`, `may_stay`: see `tracer.trace`."""
        self.loader, self._specs, self._records, self._may_stay = loader, specs, records, may_stay
        self.frozen = may_stay.frozen
        self._sent = {spec.name for spec in specs}
        self._start = functools.cache(start if start is not None else lambda: EngineStart(None))
        self.unknown = ""

    def stays(self, name: str) -> bool:
        """Returns whether nothing at all need write the tensor of this name."""
        return self._may_stay(engine_name(self.loader.model, name))

    def _trace(self, specs: Sequence[TensorSpec], last: list[str]) -> Sequence[Record]:
        check_names(specs)
        return self.loader.run(specs, last).all_written

    @property
    def randomized(self) -> Sequence[torch.nn.Module]:
        """See `EngineStart`."""
        return self._start().randomized

    @functools.cached_property
    def writes(self) -> Mapping[str, Sequence[Record]] | None:
        """The writes of each live storage, by its name; None if the checkpoint is not known."""
        try:
            return self._traced(self._start())
        except ReshardError as error:
            self.unknown = f"the loader cannot be traced with the engine's own checkpoint: {error}"
            return None

    def _traced(self, start: EngineStart) -> Mapping[str, Sequence[Record]] | None:
        if start.specs is None:
            self.unknown = start.unknown
            return None
        if {(s.name, s.shape) for s in start.specs} == {(s.name, s.shape) for s in self._specs}:
            return _by_storage(self._records)
        found = _by_storage(self._trace(start.specs, []))
        # A checkpoint that lacks what a trainer has proves nothing about what else it lacks.
        if lacking := next((r.storage.name for r in self._records if r.storage.name not in found), None):
            self.unknown = f"no tensor of the engine's own checkpoint reaches {lacking}, which the trainer sends"
            return None
        return found

    def fills(self, storage: str) -> Sequence[Record] | None:
        """Returns the writes of one live storage, none if a start leaves it alone; None if that is not known."""
        return None if self.writes is None else self.writes.get(storage, ())

    def could_stay(self, record: Record) -> bool:
        """Returns whether frozen= could name what a start has written: no value in it changes with the update."""
        names = list(_sources(record))
        live = isinstance(record.content, VersionedView) and len(names) < len(list(leaves(record.content)))
        return bool(names) and not live and self._sent.isdisjoint(names)

    def may_stay(self, record: Record) -> bool:
        """Returns whether what a start has written may stay."""
        return self.could_stay(record) and self.tensors_may_stay(list(_sources(record)))

    def tensors_may_stay(self, names: Collection[str]) -> bool:
        """Returns whether tensors of the engine's own checkpoint have filled something, and all of that may stay."""
        return self._sent.isdisjoint(names) and all(matches_any(name, self.frozen) for name in names)

    def all_may_stay(self, *storages: str) -> bool:
        """Returns whether a start fills any of these live storages, and all of that may stay."""
        copies = copies_of(record for storage in storages for record in self.fills(storage) or ())
        return bool(copies) and all(map(self.may_stay, copies))

    def unsent(self, fills: Iterable[Record]) -> list[str]:
        """Returns the names of the tensors that are written, but not sent."""
        return [name for name in source_names(fills) if name not in self._sent]

    def advice(self, unsent: Iterable[str]) -> str:
        """Returns what to do about these tensors of the engine's own checkpoint.

        The patterns are for all engine ranks: tensors that others miss, in other layers for example, have such names.
        """
        kinds = {_kind(name) for name in unsent}
        alike = [s.name for s in self._start().specs or () if s.name not in self._sent and _kind(s.name) in kinds]
        patterns = [*self.frozen, *patterns_of(alike, _MOST_PATTERNS)]
        if len(alike) > len(self._sent) or len(patterns) > _MOST_PATTERNS + len(self.frozen):
            return "Send the missing tensors, or name those whose values may stay in frozen=."
        return f"Send the missing tensors, or pass frozen={patterns} to the update to keep the engine's values."

    def hint(self, storage: str) -> str:
        """Returns what is known about a live storage that is not written completely, as the end of an error message."""
        if names := source_names(self.fills(storage) or ()):
            return f" The engine's own checkpoint fills it from {some_names(names)}."
        if self.unknown:
            return (
                " If a start on the model's checkpoint does not write it either, or frozen= names the tensors that do, "
                f"put the complete checkpoint in the engine's model_path; its headers show that ({self.unknown})."
            )
        return ""

    def takes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Returns live tensor -> name under which the loader takes it, for those that it takes.

        tensors  by path, none of them written. Each is tried under its path and, if the checkpoint's names differ from
                 the model's, as its neighbours are named
        """
        names = _names_in_checkpoint(tensors, self._records)
        probes = {
            name: TensorSpec.of(name, tensors[path])
            for path, candidates in names.items()
            for name in candidates
            if name not in self._sent
        }
        while probes:
            last: list[str] = []
            try:
                records = self._trace((*self._specs, *probes.values()), last)
            except ReshardError:
                # The loader does not know the name that it got last, so that it knows none of this kind.
                refused = _kind(last[-1]) if last else ""
                left = {name: spec for name, spec in probes.items() if _kind(name) != refused}
                if len(left) == len(probes):
                    return {}
                probes = left
                continue
            return {
                record.storage.name: name
                for record in records
                for name in _sources(record)
                if name in probes and record.storage.name in tensors
            }
        return {}


def copies_of(fills: Iterable[Record]) -> list[Record]:
    """Returns the writes that are no numbers, which come with the tensors that fill a storage."""
    return [record for record in fills if not isinstance(record.content, (int, float))]


def source_names(records: Iterable[Record]) -> list[str]:
    """Returns the names of the checkpoint tensors that are written, without duplicates."""
    return list(dict.fromkeys(name for record in records for name in _sources(record)))


def _by_storage(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        found[record.storage.name].append(record)
    return dict(found)


def _sources(record: Record) -> Iterable[str]:
    return (tensor.spec.name for tensor in checkpoint_tensors(record.content))


def _kind(name: str) -> str:
    """Returns the name without the numbers of layers and experts. Those in a longer part of a name are no numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _names_in_checkpoint(paths: Collection[str], records: Iterable[Record]) -> dict[str, list[str]]:
    """Returns the names that live tensors could have in the checkpoint.

    That is their own, and their own with the beginning that the name of the nearest parameter has there.
    """
    nearest: dict[str, tuple[str, str]] = {}  # path of a module -> beginnings of a parameter below it: live, in names
    for record in records:
        if isinstance(record.content, CheckpointTensor):
            a, b = record.storage.name.split("."), record.content.spec.name.split(".")
            while a and b and a[-1] == b[-1]:
                a.pop()
                b.pop()
            beginnings = "".join(f"{part}." for part in a), "".join(f"{part}." for part in b)
            module = record.storage.name
            while module:
                module = module.rpartition(".")[0]
                # The shortest: a fused parameter's name differs from its parts' close to the end.
                if module not in nearest or len(beginnings[0]) < len(nearest[module][0]):
                    nearest[module] = beginnings
    found: dict[str, list[str]] = {}
    for path in paths:
        module, candidates = path.rpartition(".")[0], [path]
        while module and module not in nearest:
            module = module.rpartition(".")[0]
        live, name = nearest.get(module, ("", ""))
        if path.startswith(live):
            candidates.append(name + path[len(live) :])
        found[path] = list(dict.fromkeys(candidates))
    return found
