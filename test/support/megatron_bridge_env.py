"""Megatron-Bridge in an environment of its own, beside the project's: `make setup-bridge`.

It wants an older transformers than SGLang, which is in the same folder, and packages for GPUs, which its converters do
not call: in their place are modules in which every name is an empty class, or a module like them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / ".venv" / "megatron-bridge"
FOR_GPUS = ("transformer_engine", "mamba_ssm", "causal_conv1d")


def use() -> None:
    """For a process of its own, before it imports transformers or Megatron-Core."""
    sys.path.insert(0, str(FOLDER))
    sys.modules["kernels"] = None  # type: ignore[assignment]  # that of the newer transformers; this one does without


def auto_bridge() -> Any:
    """Megatron-Bridge's AutoBridge."""
    import megatron.core.models.gpt.gpt_layer_specs  # finds out first that there is no Transformer Engine  # noqa: F401

    sys.meta_path.append(_ForGPUs())
    from megatron.bridge import AutoBridge

    return AutoBridge


class _ForGPUs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] in FOR_GPUS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Empty(ModuleType):
    __version__ = "2.9.0"  # which is compared

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Empty(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:  # functions, whose parameters are looked at
        raise NotImplementedError(f"{self.__name__} needs a GPU")
