"""Asks a model's modules what its loader needs in addition to lazy tensors. Only that is imported.

    folded     flags that say that parameters were changed in place once they were loaded
    post_load  calls of `post_load_weights`, which compute with loaded weights
    kv_scales  scales of the KV cache: attention reads copies of them

A module of this package has the class of its pass, `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import torch

from sglang_reshard.trace.program import Step

BUILT = "_reshard_built"  # the attribute of a module that has its `built_modules.BuiltModule`
FLAGS = "_reshard_flags"  # the attribute of a model that has the flags that `folded.remember_built` has found


class Pass:
    """One run of a loader, for one pass. This base class adds nothing to it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    @contextmanager
    def running(self) -> Iterator[None]:
        """The loader runs within it."""
        yield

    def first(self) -> Sequence[Step]:
        """Returns steps that come before the loader's own."""
        return ()

    def last(self, written: Collection[str]) -> Sequence[Step]:
        """Returns steps that come after the loader's own. `written`: names of the storages that are written."""
        return ()


def may_convert(module: torch.nn.Module) -> bool:
    """Returns whether a module has been repacked after loading, or may keep weights that are quantized in blocks."""
    built = vars(module).get(BUILT)
    if built is not None and built.differs(module):
        return True
    return getattr(getattr(module, "quant_method", None), "quant_config", None) is not None


def has_flags(module: torch.nn.Module) -> bool:
    """Returns whether a module may have flags, or had some when it was built. Torch's own modules have none."""
    attributes = vars(module)
    of_torch = type(module).__module__.startswith("torch.")
    return bool(attributes.get(FLAGS)) or (not of_torch and any(value is False for value in attributes.values()))


def _defers(module: torch.nn.Module) -> bool:
    return callable(getattr(module, "post_load_weights", None))


def _has_scales(module: torch.nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), torch.Tensor) for name in ("k_scale", "v_scale"))


# Their last steps come in this order.
_ASKED: dict[str, Callable[[torch.nn.Module], bool]] = {
    "folded": has_flags,
    "kv_scales": _has_scales,
    "post_load": _defers,
}


def passes_of(model: torch.nn.Module) -> list[Pass]:
    """Returns the passes of one run of the model's loader."""
    modules = list(model.modules())
    return [
        import_module(f"sglang_reshard.trace.{name}").Run(model)
        for name, applies in _ASKED.items()
        if any(map(applies, modules))
    ]
