"""Follows a loader through torch: what views, what copies, what computes, what writes.

Every operation on a stand-in, and every one of the loader's thread on a live tensor, comes here.
Views and copies are followed exactly; what else is computed is kept as a call to be made later.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace import operators as op
from sglang_reshard.trace.buffers import Buffer, Computed, Write
from sglang_reshard.trace.lazy_tensor import LazyTensor, tensors_in
from sglang_reshard.trace.memory import TraceMemory, buffer_like, geometry_of
from sglang_reshard.trace.scalars import Scalars, TracedScalar


class Recorder(TraceMemory):
    """One trace. `failure` is the first error in an operation, which the loader may have swallowed."""

    def __init__(self, model: torch.nn.Module, scalars: dict[str, float]) -> None:
        super().__init__(model, Scalars(scalars))
        self.failure: Exception | None = None
        self._lock = threading.RLock()
        self._thread = threading.get_ident()

    def standin(self, meta: torch.Tensor, buffer: Buffer) -> LazyTensor:
        return LazyTensor(meta, buffer, self)

    # ---- entry points

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that involves a stand-in."""
        with self._lock:
            try:
                if threading.get_ident() != self._thread:
                    raise Unsupported(
                        "The loader uses threads of its own, whose order the trace cannot follow. Load this model "
                        "in one thread (a ThreadPoolExecutor is fine)."
                    )
                return self._dispatch(func, args, kwargs)
            except Exception as error:
                # A loader may swallow it; a trace with a hole in it must not pass for a whole one.
                self.failure = self.failure or error
                raise

    def guard(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of the loader's thread on tensors that are real, unless they are in a list."""
        tensors = tensors_in(args, kwargs)
        if any(type(t) is LazyTensor for t in tensors):
            return self.handle(func, args, kwargs)
        if op.is_view(func):
            return func(*args, **kwargs)
        for target in op.written(func, args, kwargs):
            for tensor in target if isinstance(target, (list, tuple)) else (target,):
                if isinstance(tensor, torch.Tensor) and self.is_kept(tensor):
                    return self.handle(func, args, kwargs)
        if not self.nothing_traced and any(map(self.is_traced, tensors)):
            return self.handle(func, args, kwargs)
        self.scalars.refuse_arithmetic(func, args, kwargs)
        out = func(*args, **kwargs)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.born(tensor)
        return out

    # ---- operators

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is op.COPY:
            self.write(args[0], self.lifted(args[1]))
            return args[0]
        if op.is_view(func):
            return self._view(func, args, kwargs)
        if func in op.ITEMS:
            return float(self.item(self.lifted(args[0])))
        if func in op.FILLS:
            self.write(args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        if func is op.FILL_TENSOR:
            self.write(args[0], self.lifted(args[1]))
            return args[0]
        self.scalars.refuse_arithmetic(func, args, kwargs)
        if op.written(func, args, kwargs):
            return self._in_place(func, args, kwargs)
        args, kwargs = op.mapped(self.lifted, args), op.mapped(self.lifted, kwargs)
        if func is op.CAST:
            # To another device as well: all stand-ins are on the engine's.
            wanted = kwargs.get("dtype") or args[0].dtype
            return self._moved(op.CAST(args[0].meta, dtype=wanted), [(None, args[0])])
        if func is op.CLONE:
            return self._moved(func(args[0].meta, **kwargs), [(None, args[0])])
        if func is op.CAT or func is op.STACK:
            return self._joined(func, args)
        if func is op.PAD:
            return self._padded(func, args)
        if func in op.FRESH:
            return self._fresh(func, args, kwargs)
        return self._computed(func, args, kwargs)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = next(a for a in tensors_in(args, kwargs) if type(a) is LazyTensor)
        out = func(*op.mapped(_meta, args), **op.mapped(_meta, kwargs))
        if isinstance(out, torch.Tensor):
            return self.standin(out, base.buffer)
        return type(out)(self.standin(o, base.buffer) for o in out)

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name == "aten::_foreach_copy_":
            for to, source in zip(args[0], args[1], strict=True):
                self.write(to, self.lifted(source))
            return None
        compute = op.functional(func)
        if compute is None:
            raise Unsupported(f"The loader calls {func}, which writes in a way that the trace cannot follow.")
        operands = (self.lifted(args[0], always=True), *op.mapped(self.lifted, args[1:]))
        self.write(args[0], self._computed(compute, operands, op.mapped(self.lifted, kwargs)))
        return args[0]

    def _joined(self, func: Any, args: tuple[Any, ...]) -> LazyTensor:
        parts = [self.lifted(t, always=True) for t in args[0]]
        dim = args[1] if len(args) > 1 else 0
        # cat ignores empty vectors of any dtype and shape
        if func is op.CAT and len(parts) > 1:
            parts = [p for p in parts if p.shape != (0,)] or parts[:1]
        out = func([p.meta for p in parts], dim)
        writes: list[tuple[torch.Tensor | None, Any]] = []
        start = 0
        for i, part in enumerate(parts):
            size = part.meta.size(dim) if func is op.CAT else 1
            at = out.narrow(dim, start, size) if func is op.CAT else out.select(dim, i)
            writes.append((at, part))
            start += size
        return self._moved(out, writes)

    def _padded(self, func: Any, args: tuple[Any, ...]) -> LazyTensor:
        inner, pad = args[0], args[1]
        if any(p < 0 for p in pad):
            return self._computed(func, args, {})
        out = func(inner.meta, pad)
        at = out
        for i in range(len(pad) // 2):
            dim = out.dim() - 1 - i
            at = at.narrow(dim, pad[2 * i], out.size(dim) - pad[2 * i] - pad[2 * i + 1])
        return self._moved(out, [(None, args[2] if len(args) > 2 else 0), (at, inner)])

    def _fresh(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyTensor:
        out = func(*op.mapped(_meta, args), **{**kwargs, "device": "meta"})
        value = op.FRESH[func]
        return self._moved(out, [] if value is None else [(None, value)])

    def _moved(self, out: torch.Tensor, writes: Sequence[tuple[torch.Tensor | None, Any]]) -> LazyTensor:
        """A new buffer, laid out like `out`, to which each content is written at a view of `out`."""
        buffer = buffer_like(out, None)
        for at, content in writes:
            place = geometry_of(out if at is None else at)
            buffer.writes.append(Write(place, self.now(content) if type(content) is LazyTensor else content))
        return self.standin(out, buffer)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep a call, with its operands as they are now, to be made when the update runs."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.device}
        on_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        out = func(*op.mapped(_meta, args), **op.mapped(_meta, on_meta))
        kept = op.mapped(self.kept, args), op.mapped(self.kept, kwargs)
        if isinstance(out, torch.Tensor):
            return self.standin(out, buffer_like(out, Computed(func, *kept, None)))
        if isinstance(out, (tuple, list)) and all(isinstance(o, torch.Tensor) for o in out):
            return type(out)(self.standin(o, buffer_like(o, Computed(func, *kept, i))) for i, o in enumerate(out))
        raise Unsupported(f"The loader calls {func} on weights and goes by its result, {type(out).__name__}.")

    def item(self, standin: LazyTensor) -> TracedScalar:
        return self.scalars.give(self.now(standin))


def _meta(value: Any) -> Any:
    if type(value) is LazyTensor:
        return value.meta
    if isinstance(value, torch.Tensor) and value.device.type != "meta" and value.dim():
        return torch.empty_like(value, device="meta")
    return value
