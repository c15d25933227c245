"""Interprets the torch operators that a loader calls: views, copies, fills, and everything else.

Every operator on a lazy tensor, and every one of the loader's thread on a live tensor, arrives here. Views and copies
are followed element by element. Any other operator is kept as an `OpOutput`, to be called when an update runs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.geometry import IndexMap, TooFragmented
from sglang_reshard.trace.lazy_tensor import (
    CheckpointTensor,
    LazyStorage,
    LazyTensor,
    LiveStorage,
    NotPlainCopy,
    Number,
    OpOutput,
    Record,
    UninitializedRead,
    VersionedView,
    Write,
    geometry_of,
    origins,
    storage_like,
    tensors_in,
)
from sglang_reshard.trace.live import flat_view, live_storages, storage_key
from sglang_reshard.trace.program import equals_one_cast, torch_dtype

if TYPE_CHECKING:
    from sglang_reshard.trace.scalars import Scalars, TracedScalar

aten = torch.ops.aten

# An expanded dimension of at most this size becomes that many copies; a larger one is computed.
MAX_REPEATS = 64

COPY = aten.copy_.default
FILLS = (aten.fill_.Scalar, aten.zero_.default)
FILL_TENSOR = aten.fill_.Tensor
ITEMS = (aten._local_scalar_dense.default, aten.item.default)
CAST = aten._to_copy.default
CLONE = aten.clone.default
CAT = aten.cat.default
STACK = aten.stack.default
PAD = aten.constant_pad_nd.default
# Factories shaped after a lazy tensor, and the value that they fill in.
FACTORIES = {
    aten.empty_like.default: None,
    aten.new_empty.default: None,
    aten.new_empty_strided.default: None,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}


@cache
def is_view(func: Any) -> bool:
    """Returns True if the result aliases an argument. (That of _unsafe_view does, though its schema hides it.)"""
    return func is aten._unsafe_view.default or any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )


@cache
def _written_parameters(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    parameters = _written_parameters(func)
    if not parameters:
        return []
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in parameters]


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    written = written_arguments(func, args, kwargs)
    return tensors_in(tuple(written), {}) if written else []


@cache
def out_of_place(func: Any) -> Any:
    """Returns the operator that computes what an in-place one (`mul_`) would leave behind; None if there is none."""
    namespace, name = func._schema.name.split("::")
    if namespace != "aten" or not name.endswith("_") or len(_written_parameters(func)) != 1:
        return None
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, func._overloadname, None)


def map_leaves(function: Any, value: Any) -> Any:
    """Returns the arguments of an operator with `function` applied to every leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, v) for v in value])
    if kind is dict:
        return {k: map_leaves(function, v) for k, v in value.items()}
    return function(value)


class Recorder:
    """Records one trace. Writes nothing to the engine's memory.

    records   the loader's writes to live storages, in order
    failure   the first error in an operator, which the loader may have caught
    received  name of the last tensor that the loader was given
    """

    def __init__(self, model: torch.nn.Module, as_built: Collection[int] = (), *, weightless: bool = False) -> None:
        """`as_built`, `weightless`: see `live_storages`."""
        self.records: list[Record] = []
        self.storages = live_storages(model, as_built, weightless=weightless)
        devices = [s.tensor.device for key, s in self.storages.items() if key not in as_built]
        self.device = devices[0] if devices else torch.device("cpu")
        self.scalars: Scalars | None = None  # once the loader has read the value of a tensor
        # By storage key. The bytes of `_written` live storages and of `_adopted` tensors, which are the loader's own
        # and have had lazy tensors written to them, are not what the loader should read.
        self._written: set[int] = set()
        self._adopted: dict[int, LazyStorage] = {}
        self._allocated: set[int] = set()  # that the loader has made
        self._metas: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}
        self._lazy_live: dict[tuple[int, torch.dtype], LazyStorage] = {}
        self.failure: Exception | None = None
        self.received = "none yet"
        self._lock = threading.RLock()
        self._thread = threading.get_ident()

    def lazy(self, meta: torch.Tensor, storage: LazyStorage) -> LazyTensor:
        return LazyTensor(meta, storage, self)

    def checkpoint_tensor(self, spec: TensorSpec) -> LazyTensor:
        kind = spec.shape, spec.dtype
        meta = self._metas.get(kind)
        if meta is None:  # nothing changes a meta tensor
            meta = self._metas[kind] = torch.empty(spec.shape, dtype=torch_dtype(spec), device="meta")
        return self.lazy(meta, storage_like(meta, CheckpointTensor(spec)))

    def view_of(self, tensor: LazyTensor) -> VersionedView:
        """Returns a lazy tensor's view of the values that have been written until now."""
        storage = tensor.lazy_storage
        version = len(self.records) if isinstance(storage.base, LiveStorage) else len(storage.writes)
        return VersionedView(storage, version, geometry_of(tensor.meta), tensor.meta.dtype)

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Returns True if a recorded write has not been made to this tensor's memory."""
        key = storage_key(tensor)
        return key in self._written or key in self._adopted

    def as_lazy(self, value: Any, always: bool = False) -> Any:
        """Returns a lazy tensor for a stale one (with `always`, for any tensor), and any other value as it is."""
        if not isinstance(value, torch.Tensor) or type(value) is LazyTensor:
            return value
        key = storage_key(value)
        if key in self._adopted:
            return self._lazy_view(self._adopted[key], value)
        if key in self.storages:
            if always or key in self._written:
                return self._lazy_view(self._lazy_live_storage(key, value.dtype), value)
        elif always:
            constant = value.detach().clone(memory_format=torch.contiguous_format)
            meta = torch.empty(constant.shape, dtype=constant.dtype, device="meta")
            return self.lazy(meta, storage_like(meta, constant))
        return value

    def _lazy_view(self, storage: LazyStorage, tensor: torch.Tensor) -> LazyTensor:
        flat = torch.empty(storage.numel, dtype=storage.dtype, device="meta")
        if tensor.dtype != storage.dtype:
            flat = flat.view(tensor.dtype)
        view = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return self.lazy(view, storage)

    def _lazy_live_storage(self, key: int, dtype: torch.dtype) -> LazyStorage:
        if (key, dtype) not in self._lazy_live:
            live = self.storages[key]
            self._lazy_live[key, dtype] = storage_like(flat_view(live.tensor, dtype), live)
        return self._lazy_live[key, dtype]

    def as_operand(self, value: Any) -> Any:
        """Returns a view of any tensor as it is now, to be kept in an `OpOutput`; any other value as it is."""
        return self.view_of(self.as_lazy(value, always=True)) if isinstance(value, torch.Tensor) else value

    def write(self, to: torch.Tensor, content: Any) -> None:
        """Records `to.copy_(content)` for a tensor, `to.fill_(content)` for a number."""
        if to.numel() == 0:
            return
        if isinstance(content, torch.Tensor):
            read = self.as_lazy(content, always=True)
            if read.shape != to.shape:  # raises what torch raises when the shapes do not fit
                read = self.lazy(read.meta.expand(to.shape), read.lazy_storage)
            content = self.view_of(read)
        elif self.scalars is not None and (origin := self.scalars.origin(content, tuple(to.shape))) is not None:
            content = origin
        if type(to) is not LazyTensor:
            key = storage_key(to)
            if key in self.storages:
                self._record_write(key, to, content)
                return
            to = self._lazy_view(self._adopted.get(key) or self._adopt(key, to), to)
        storage = to.lazy_storage
        if isinstance(storage.base, LiveStorage):
            self._record_write(storage_key(storage.base.tensor), to.meta, content)
        elif to.meta.dtype != storage.dtype:
            raise Unsupported(
                f"The loader writes to a {storage.dtype} tensor through a {to.meta.dtype} view, which cannot be "
                "traced. Update this model with SGLang's own update_weights_from_tensor."
            )
        else:
            storage.writes.append(Write(geometry_of(to.meta), content))

    def _adopt(self, key: int, tensor: torch.Tensor) -> LazyStorage:
        """Returns a lazy storage for a tensor of the loader's own that a lazy tensor is written to."""
        if key not in self._allocated:
            raise Unsupported(
                f"The loader writes weights to a tensor {tuple(tensor.shape)} that it did not allocate and that is "
                "neither a parameter, a buffer nor an attribute of a module, so its use cannot be traced. Make it a "
                "buffer of the module that uses it."
            )
        everything = flat_view(tensor, tensor.dtype)
        self._adopted[key] = storage_like(everything, everything)
        return self._adopted[key]

    def _record_write(self, key: int, to: torch.Tensor, content: VersionedView | Number) -> None:
        """Records a write to a live storage; `to`, or a meta tensor like it, is the view written to."""
        storage, written, dtype = self.storages[key], geometry_of(to), to.dtype
        self._written.add(key)
        if not isinstance(content, VersionedView):
            self.records.append(Record(storage, dtype, IndexMap.flattening(written).inverted(), content))
            return
        index_map = IndexMap.between(content.geometry, written)
        try:
            self.records += list(_copies(storage, dtype, content, index_map))
        except (NotPlainCopy, TooFragmented):
            self.records.append(Record(storage, dtype, index_map, content))
        except UninitializedRead:
            raise Unsupported(
                f"The loader copies to {storage.name} from a tensor with elements that it did not fill. A checkpoint "
                "tensor is missing, or the loader does not support this model."
            ) from None

    # -- operators

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Interprets an operator called on a lazy tensor."""
        with self._lock:
            try:
                if threading.get_ident() != self._thread:
                    raise Unsupported(
                        "The loader starts its own threads, whose order cannot be traced. Load this model in one "
                        "thread (a ThreadPoolExecutor is fine)."
                    )
                return self._dispatch(func, args, kwargs)
            except Exception as error:
                # The loader may catch it, but a trace with an operator missing must fail.
                self.failure = self.failure or error
                raise

    def record_or_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Interprets an operator without a lazy tensor among its direct arguments if it has to do with the trace.

        That is, if one is in a list, or if it writes live memory or reads stale memory. Any other operator runs.
        """
        if is_view(func):  # of no list
            return func(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        if LazyTensor in map(type, tensors):
            return self.record(func, args, kwargs)
        for tensor in written_tensors(func, args, kwargs):
            if (key := storage_key(tensor)) in self.storages or key in self._adopted:
                return self.record(func, args, kwargs)
        if (self._written or self._adopted) and any(map(self.is_stale, tensors)):
            return self.record(func, args, kwargs)
        self._check_scalars(func, args, kwargs)
        out = func(*args, **kwargs)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._allocated.add(storage_key(tensor))
        return out

    def item(self, tensor: LazyTensor) -> TracedScalar:
        if self.scalars is None:
            from sglang_reshard.trace.scalars import Scalars

            self.scalars = Scalars()
        return self.scalars.take(self.view_of(tensor))

    def _check_scalars(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.scalars is not None:
            self.scalars.check_unused(func, args, kwargs)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is COPY or func is FILL_TENSOR:
            self.write(args[0], self.as_lazy(args[1]))
            return args[0]
        if is_view(func):
            return self._view(func, args, kwargs)
        if func in ITEMS:
            return float(self.item(self.as_lazy(args[0])))
        if func in FILLS:
            self.write(args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        self._check_scalars(func, args, kwargs)
        if written_arguments(func, args, kwargs):
            return self._in_place(func, args, kwargs)
        args, kwargs = map_leaves(self.as_lazy, args), map_leaves(self.as_lazy, kwargs)
        if func is CAST:
            # Casts to another device, too: all lazy tensors are on the engine's.
            dtype = kwargs.get("dtype") or args[0].dtype
            return self._copied(CAST(args[0].meta, dtype=dtype), [(None, args[0])])
        if func is CLONE:
            return self._copied(func(args[0].meta, **kwargs), [(None, args[0])])
        if func is CAT or func is STACK:
            return self._joined(func, args)
        if func is PAD and all(p >= 0 for p in args[1]):
            return self._padded(func, args)
        if func in FACTORIES:
            out = func(*map_leaves(_meta, args), **{**kwargs, "device": "meta"})
            value = FACTORIES[func]
            return self._copied(out, [] if value is None else [(None, value)])
        return self._computed(func, args, kwargs)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = next(a for a in tensors_in(args, kwargs) if type(a) is LazyTensor)
        if kwargs:
            kwargs = map_leaves(_meta, kwargs)
        out = func(*map_leaves(_meta, args), **kwargs)
        if isinstance(out, torch.Tensor):
            return self.lazy(out, base.lazy_storage)
        return type(out)(self.lazy(o, base.lazy_storage) for o in out)

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name == "aten::_foreach_copy_":
            for to, source in zip(args[0], args[1], strict=True):
                self.write(to, self.as_lazy(source))
            return None
        compute = out_of_place(func)
        if compute is None:
            raise Unsupported(
                f"The loader calls {func}, whose writes cannot be traced. Update this model with SGLang's own "
                "update_weights_from_tensor."
            )
        operands = (self.as_lazy(args[0], always=True), *map_leaves(self.as_lazy, args[1:]))
        self.write(args[0], self._computed(compute, operands, map_leaves(self.as_lazy, kwargs)))
        return args[0]

    def _joined(self, func: Any, args: tuple[Any, ...]) -> LazyTensor:
        parts = [self.as_lazy(t, always=True) for t in args[0]]
        dim = args[1] if len(args) > 1 else 0
        # cat ignores empty vectors, whatever their dtype.
        if func is CAT and len(parts) > 1:
            parts = [p for p in parts if p.shape != (0,)] or parts[:1]
        out = func([p.meta for p in parts], dim)
        views = out.split([p.meta.size(dim) for p in parts], dim) if func is CAT else out.unbind(dim)
        return self._copied(out, list(zip(views, parts, strict=True)))

    def _padded(self, func: Any, args: tuple[Any, ...]) -> LazyTensor:
        inner, pad = args[0], args[1]
        out = func(inner.meta, pad)
        at = out
        for i in range(len(pad) // 2):
            dim = out.dim() - 1 - i
            at = at.narrow(dim, pad[2 * i], out.size(dim) - pad[2 * i] - pad[2 * i + 1])
        return self._copied(out, [(None, args[2] if len(args) > 2 else 0), (at, inner)])

    def _copied(self, out: torch.Tensor, writes: Sequence[tuple[torch.Tensor | None, Any]]) -> LazyTensor:
        """Returns a new tensor laid out like `out`, with each content written to a view of `out` (None for all)."""
        storage = storage_like(out, None)
        for at, content in writes:
            value = self.view_of(content) if type(content) is LazyTensor else content
            storage.writes.append(Write(geometry_of(out if at is None else at), value))
        return self.lazy(out, storage)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the results of a call that is made, on its operands as they are now, when an update runs."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.device}
        on_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        out = func(*map_leaves(_meta, args), **map_leaves(_meta, on_meta))
        call = func, map_leaves(self.as_operand, args), map_leaves(self.as_operand, kwargs)
        if isinstance(out, torch.Tensor):
            return self.lazy(out, storage_like(out, OpOutput(*call, None)))
        if isinstance(out, (tuple, list)) and all(isinstance(o, torch.Tensor) for o in out):
            return type(out)(self.lazy(o, storage_like(o, OpOutput(*call, i))) for i, o in enumerate(out))
        raise Unsupported(
            f"The loader calls {func} on weights and uses its result, {type(out).__name__}, whose value is not "
            "available while tracing. Update this model with SGLang's own update_weights_from_tensor."
        )


def _copies(storage: LiveStorage, dtype: torch.dtype, content: VersionedView, index_map: IndexMap) -> Iterator[Record]:
    """Yields a record for each origin of the content. Raises NotPlainCopy if it has to be computed as a whole."""
    for origin, part, casts in origins(content, index_map):
        if not isinstance(origin, VersionedView):
            for cast in casts:
                origin = torch.tensor(origin, dtype=cast).item()
            yield Record(storage, dtype, part, origin)
            continue
        base, base_dtype = origin.storage.base, origin.storage.dtype
        repeats = math.prod(loop.size for loop in part.loops if loop.read == 0)
        if not equals_one_cast((origin.dtype, *casts, dtype)) or repeats > MAX_REPEATS:
            raise NotPlainCopy
        if base is storage:  # moved within it: one part would be written where another one is read
            raise NotPlainCopy
        if not isinstance(base, CheckpointTensor):
            yield Record(storage, dtype, part, origin)
        elif origin.dtype == base_dtype:
            yield Record(storage, dtype, part, base)
        elif origin.dtype == dtype and dtype.itemsize == base_dtype.itemsize:
            # Both ends are viewed as another dtype of the same size: the bits are copied.
            yield Record(storage, base_dtype, part, base)
        else:
            raise NotPlainCopy


def _meta(value: Any) -> Any:
    kind = type(value)
    if kind is LazyTensor:
        return value.meta
    if kind is not int and isinstance(value, torch.Tensor) and value.device.type != "meta" and value.dim():
        return torch.empty_like(value, device="meta")
    return value
