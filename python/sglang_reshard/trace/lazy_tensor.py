"""Tensors without memory, and the dispatch mode under which the engine's loader runs over them.

A loader gets a `LazyTensor` in place of each checkpoint tensor; its `__torch_dispatch__` passes every operator called
on one, in any thread, to the recorder. `LiveWriteMode` adds the operators that involve live tensors only: fills of
parameters, and reads of values that the loader has just written.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.torch_private import TorchDispatchMode
from sglang_reshard.trace.lazy_storage import LazyStorage


class Interpreter(Protocol):
    """Interprets the operators of one trace, see `recorder`."""

    device: torch.device

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def record_or_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def item(self, tensor: LazyTensor) -> float: ...


class LazyTensor(torch.Tensor):
    """A view of a `LazyStorage`. `meta` is the same view of a meta tensor, so that torch computes the geometry."""

    meta: torch.Tensor
    lazy_storage: LazyStorage
    recorder: Interpreter

    @staticmethod
    def __new__(cls, meta: torch.Tensor, storage: LazyStorage, recorder: Interpreter) -> LazyTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=recorder.device,
        )
        self.meta, self.lazy_storage, self.recorder = meta, storage, recorder
        return self

    def __init__(self, *_: Any) -> None:
        """Does nothing: torch's own __init__ takes no arguments."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.meta.shape)}, {self.meta.dtype})"

    def item(self) -> float:
        # torch's own item() would turn a TracedScalar into a plain float.
        return self.recorder.item(self)

    def data_ptr(self) -> int:
        # torch would return 0, and a kernel would dereference it.
        raise Unsupported(
            "The loader takes the address of a checkpoint tensor, which has no memory while the loader is traced. "
            "Update this model with SGLang's own update_weights_from_tensor."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for a in tensors_in(args, kwargs):
            if type(a) is LazyTensor:
                return a.recorder.record(func, args, kwargs)
        return func(*args, **kwargs)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class LiveWriteMode(TorchDispatchMode):
    """Passes every operator that this thread calls to the recorder."""

    def __init__(self, recorder: Interpreter) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for a in args:
            if type(a) is LazyTensor:
                return self.recorder.record(func, args, kwargs)
        return self.recorder.record_or_run(func, args, kwargs)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments of an operator, which nests them one list deep at most."""
    found: list[torch.Tensor] = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif type(a) in (list, tuple):
            found.extend(x for x in a if isinstance(x, torch.Tensor))
    return found
