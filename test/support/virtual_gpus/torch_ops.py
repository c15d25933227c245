"""Lets torch's own operations on virtual GPU memory find what their thread's stream has been given before them.

They are done at once, and the stream's earlier work before them. Work of other streams may still be left.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from support.virtual_gpus.memory import VirtualMemory

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OWN_THREADS = "virtual "  # of the virtual GPUs: they have no stream


class StreamOrder:
    """Of one process."""

    def __init__(self, memory: VirtualMemory) -> None:
        self._memory = memory
        self._thread = threading.local()

    def install(self) -> None:
        order, run = self, threading.Thread.run

        @functools.wraps(run)
        def in_order(thread: threading.Thread) -> None:
            if thread.name.startswith(_OWN_THREADS):
                run(thread)
                return
            with order._mode():
                run(thread)

        threading.Thread.run = in_order  # type: ignore[method-assign]
        self._mode().__enter__()
        for name in ("tolist", "numpy"):  # no operations to torch
            setattr(torch.Tensor, name, self._after_earlier_work(getattr(torch.Tensor, name)))

    def _mode(self) -> TorchDispatchMode:
        order = self
        self._thread.is_ordered = True

        class InOrder(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
                order.finish_earlier((args, kwargs))
                return func(*args, **(kwargs or {}))

        return InOrder()

    def finish_earlier(self, arguments: Any) -> None:
        """Does what this thread's streams were given, on GPUs that have any of these tensors."""
        streams = self._memory.streams
        if streams.are_idle or streams.is_doing:
            return
        for tensor in tree_iter(arguments):
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                found = self._memory.find(tensor.data_ptr())
                if found is not None:
                    number = self._memory.gpu_of(found)
                    streams.finish_stream(self._memory.current_stream(number))

    def _after_earlier_work(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def ordered(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._thread, "is_ordered", False):
                self.finish_earlier(tensor)
            return stock(tensor, *args, **kwargs)

        return ordered
