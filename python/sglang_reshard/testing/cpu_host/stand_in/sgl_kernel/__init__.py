"""Replaces SGLang's CUDA kernels on a host without a GPU.

SGLang imports names from `sgl_kernel` in many modules, and calls none of them on a CPU without AMX. Every name can be
imported, including submodules; calling it raises an error.

SGLang's LoRA pins memory, for which torch needs a driver. Here memory is not pinned, although it is asked for.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.jit._builtins import _register_builtin
from torch.utils._device import _device_constructors

# SGLang compares it with the version it was built against.
__version__ = "0.4.2.post2"


class MissingKernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> MissingKernel:
        return _missing(self._name, attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self._name} is a CUDA kernel, which this stub for hosts without a GPU does not have. On a host with a "
            "GPU, do not use sglang_reshard.testing.cpu_host."
        )


def _missing(parent: str, name: str) -> MissingKernel:
    # Python and torch probe for dunder names (__path__, __wrapped__, ...): those must be absent.
    if name.startswith("__"):
        raise AttributeError(name)
    return MissingKernel(f"{parent}.{name}")


class _Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> MissingKernel:
        return _missing(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: the module is empty."""


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> MissingKernel:
    return _missing(__name__, name)


def _unpinned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return factory(*args, **kwargs)

    return make


_device_constructors()  # so that `with torch.device(...)` has seen torch's own functions
for _name in ("tensor", "zeros"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
    # A function that torch.jit compiles still finds torch's operator under this name.
    _register_builtin(getattr(torch, _name), f"aten::{_name}")
setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)  # noqa: B010
