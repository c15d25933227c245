"""Parameters that an update leaves as they are: nothing that is sent reaches them, and the trainer allows it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from sglang_reshard.trace.lazy_storage import LiveStorage
from sglang_reshard.trace.live import storage_key
from sglang_reshard.trace.memory import Record
from sglang_reshard.trace.repack import RepackedModule

MAIN = "reshard_main"  # attribute of a model that wraps the engine's: the path of that one


@dataclass(frozen=True, slots=True)
class MayStay:
    """Says which parameters may stay as they are, by fnmatch patterns of their names in the engine's model.

    frozen  they may stay
    only    all others may stay; empty if there is no such rule
    """

    frozen: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __call__(self, name: str) -> bool:
        if any(fnmatchcase(name, pattern) for pattern in self.frozen):
            return True
        return bool(self.only) and not any(fnmatchcase(name, pattern) for pattern in self.only)


def engine_name(model: torch.nn.Module, name: str) -> str:
    """Returns a parameter's name in the engine's own model, which `model` may wrap."""
    main: str = getattr(model, MAIN, "")
    return name.removeprefix(f"{main}.") if main else name


def kept_modules(
    model: torch.nn.Module,
    modules: Iterable[RepackedModule],
    storages: Mapping[int, LiveStorage],
    records: Sequence[Record],
    may_stay: MayStay,
) -> list[RepackedModule]:
    """Returns the repacked modules that are not written and whose parameters may all be kept."""
    written: Collection[LiveStorage] = {record.storage for record in records}
    return [
        module
        for module in modules
        if (names := _names(module))
        and all(may_stay(engine_name(model, name)) for name in names)
        and not any(storages.get(storage_key(p)) in written for p in module.built.parameters.values() if p is not None)
    ]


def names_kept(model: torch.nn.Module, parameters: Iterable[str], modules: Iterable[RepackedModule]) -> tuple[str, ...]:
    """Returns the names, in the engine's own model, of parameters and of those of repacked modules, in order."""
    found = {*parameters, *(name for module in modules for name in _names(module))}
    return tuple(sorted(engine_name(model, name) for name in found))


def _names(module: RepackedModule) -> list[str]:
    return [module.name(name) for name, p in module.built.parameters.items() if p is not None and p.numel()]
