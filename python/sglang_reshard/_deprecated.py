"""Keeps the public names of 0.1 importable, with a DeprecationWarning that gives the new name.

`_MovedModules` finds modules that have moved; a package's `__getattr__` finds names that have changed in it, and
`renamed_keywords` accepts old keywords. All will be removed in 1.0.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_PACKAGE = "sglang_reshard"

# Module of 0.1 -> module of today, both within the package.
MODULES = {
    "channel": "control",
    "cpu_host": "testing.cpu_host",
    "cpu_host.verl_platform": "testing.cpu_host.verl_platform",
    "cpu_host.verl_settings": "testing.cpu_host.verl_settings",
    "embedded": "patches.embedded_engine",
    "fleet": "api.multi_engine",
    "launch": "patches.launch",
    "logs": "observability.logs",
    "messages": "protocol.messages",
    "receiver": "engine.receiver",
    "remote": "api.remote_engine",
    "report": "observability.report",
    "sender": "api.weight_sender",
    "session": "protocol.session",
    "sources.holdings": "layout.shard_map",
    "sources.placements": "layout.source_layout",
    "sources.stacked": "sources.fused",
    "spans": "observability.spans",
    "verl_engine": "api.verl_engine",
    "weights_info": "protocol.weights_info",
}

# Module of today -> name of 0.1 -> module and name of today.
NAMES: dict[str, dict[str, tuple[str, str]]] = {
    "": {"Fleet": ("api.multi_engine", "MultiEngineSender")},
    "api.multi_engine": {"Fleet": ("api.multi_engine", "MultiEngineSender")},
    "control": {
        "Hub": ("control.server", "ControlServer"),
        "HubStore": ("control.torch_store", "ControlStore"),
        "Late": ("control.client", "WaitTimedOut"),
        "Line": ("control.client", "ControlClient"),
    },
    "layout": {name: ("layout.regions", name) for name in ("Box", "ITEM_BYTES", "Region", "TensorSpec", "split")},
    "layout.shard_map": {
        "Held": ("layout.shard_map", "ExplicitSharding"),
        "Holdings": ("layout.shard_map", "ShardMap"),
        "Piece": ("layout.shard_map", "ShardBox"),
    },
    "layout.source_layout": {
        "Layout": ("layout.source_layout", "SourceLayout"),
        "Meshed": ("layout.source_layout", "MeshSharding"),
        "holdings": ("layout.source_layout", "compute_shard_map"),
    },
    "sources": {
        "Held": ("layout.shard_map", "ExplicitSharding"),
        "Holdings": ("layout.shard_map", "ShardMap"),
        "Layout": ("layout.source_layout", "SourceLayout"),
        "Part": ("sources.fused", "FusedSlice"),
        "Piece": ("layout.shard_map", "ShardBox"),
        "Stack": ("sources.fused", "FusedTensor"),
        "aliases": ("sources.state", "tied_names"),
        "part_of": ("sources.fused", "slice_of"),
        "listed": ("sources.state", "as_list"),
        "slots": ("sources.converter_slices", "fused_slices"),
    },
    "sources.fused": {
        "Part": ("sources.fused", "FusedSlice"),
        "Stack": ("sources.fused", "FusedTensor"),
    },
}


F = TypeVar("F", bound=Callable[..., Any])


def renamed_keywords(**new_names: str) -> Callable[[F], F]:
    """Decorates a function to accept keywords under their names of 0.1, `old="new"`; warns."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for old, new in new_names.items():
                if old in kwargs:
                    warnings.warn(f"{old}= is deprecated; use {new}=", DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


def attribute(module: str, name: str) -> Any:
    """Returns what `name` of 0.1 in `module` is today, and warns. Raises AttributeError for any other name."""
    new = NAMES.get(module.removeprefix(_PACKAGE).removeprefix("."), {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    target = f"{_PACKAGE}.{new[0]}"
    warnings.warn(f"{module}.{name} is deprecated; use {target}.{new[1]}", DeprecationWarning, stacklevel=3)
    return getattr(import_module(target), new[1])


class _MovedModule(ModuleType):
    """A module of 0.1, which has the attributes of the module that has replaced it."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"Moved to {target}.")
        self.__target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for these
            raise AttributeError(name)
        try:
            return getattr(import_module(self.__target), name)
        except AttributeError:
            return attribute(self.__target, name)


class _MovedModules(MetaPathFinder, Loader):
    """Finds modules of 0.1 under their old names. Comes last on `sys.meta_path`, so that it shadows nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = MODULES.get(fullname.removeprefix(f"{_PACKAGE}."))
        if new is None or not fullname.startswith(f"{_PACKAGE}."):
            return None
        # A package, so that the import system looks for its modules here, too.
        return ModuleSpec(fullname, self, origin=f"{_PACKAGE}.{new}", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        warnings.warn(f"{spec.name} has moved to {spec.origin}", DeprecationWarning, stacklevel=2)
        return _MovedModule(spec.name, spec.origin)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: attributes are looked up in the new module when they are used."""


def install_module_finder() -> None:
    """Makes modules that have moved since 0.1 importable under their old names. Idempotent."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
