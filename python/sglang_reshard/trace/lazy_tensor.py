"""Tensors without bytes that remember where they come from, and the mode that watches live tensors.

`LazyTensor` is handed to the loader in place of a checkpoint tensor: every torch operation on one, in any
thread, arrives at the recorder. `LiveWriteMode` sees the operations that involve no stand-in: fills of live
parameters and reads of what was just "loaded".
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.buffers import Buffer


class Handler(Protocol):
    """What the recorder is to this module."""

    device: torch.device

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def guard(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def item(self, standin: LazyTensor) -> float: ...


class LazyTensor(torch.Tensor):
    """A view of a buffer. `meta` is the same view of a meta tensor: torch itself computes the geometry."""

    meta: torch.Tensor
    buffer: Buffer
    handler: Handler

    @staticmethod
    def __new__(cls, meta: torch.Tensor, buffer: Buffer, handler: Handler) -> LazyTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=handler.device,
            requires_grad=False,
        )
        self.meta, self.buffer, self.handler = meta, buffer, handler
        return self

    def __init__(self, *_: Any) -> None:
        """Everything is done in __new__; torch's own __init__ takes no arguments."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StandIn({tuple(self.meta.shape)}, {self.meta.dtype})"

    def item(self) -> float:
        # Past torch's own item(), which would turn a TracedScalar into a plain float.
        return self.handler.item(self)

    def data_ptr(self) -> int:
        # torch would say 0, and a kernel would go there.
        raise Unsupported("The loader takes the address of a checkpoint tensor; the trace has no bytes.")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for a in tensors_in(args, kwargs):
            if type(a) is LazyTensor:
                return a.handler.handle(func, args, kwargs)
        return func(*args, **kwargs)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class LiveWriteMode(TorchDispatchMode):
    """Shows the recorder every operation of this thread."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self.handler = handler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for a in args:
            if type(a) is LazyTensor:
                return self.handler.handle(func, args, kwargs)
        return self.handler.guard(func, args, kwargs)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of an operator, which nests them one list deep at most."""
    found: list[torch.Tensor] = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, torch.Tensor):
            found.append(a)
        elif type(a) in (list, tuple):
            found.extend(x for x in a if isinstance(x, torch.Tensor))
    return found
