"""Two releases of Megatron-Bridge, in folders next to the project's environment: `make setup-bridge`.

The older one wants an older transformers than SGLang, the newer one a newer Megatron-Core; both are in its folder. Both
want packages for GPUs, which their converters do not call: in their place are modules in which every name is an empty
class, or a module like them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import typing_extensions

_FOLDERS = Path(__file__).parents[2] / ".venv"
FOLDERS = {"0.3.1": _FOLDERS / "megatron-bridge", "0.6.2": _FOLDERS / "megatron-bridge-newest"}
FOR_GPUS = ("transformer_engine", "mamba_ssm", "causal_conv1d")


def use(release: str) -> None:
    """For a separate process, before it imports transformers or Megatron-Core."""
    sys.path.insert(0, str(FOLDERS[release]))
    sys.modules["kernels"] = None  # type: ignore[assignment]  # that of the newer transformers; both do without
    vars(typing).setdefault("override", typing_extensions.override)  # Python 3.12's, which the newer release imports


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
