"""What the loader reads and writes: live storages, tensors of its own, and the record of every write.

The recorder follows operators; this is the memory that they work on. Nothing here writes a byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.buffers import (
    Buffer,
    Constant,
    NotMovement,
    Number,
    Reference,
    Source,
    Storage,
    Uninitialised,
    Write,
    movement,
    source_buffer,
)
from sglang_reshard.trace.casts import one_cast_does, torch_dtype
from sglang_reshard.trace.geometry import Geometry, IndexMap, TooFragmented
from sglang_reshard.trace.lazy_tensor import LazyTensor
from sglang_reshard.trace.live import live_storages, storage_key
from sglang_reshard.trace.scalars import Scalars

# An expanded dimension up to this long becomes that many copies; a longer one is computed.
MAX_REPEATS = 64


class Record(NamedTuple):
    """The elements that `walk` reads of `content` are written to a live storage, as `dtype`.

    content  a Source, a number, or a Reference to be computed when the update runs
    """

    storage: Storage
    dtype: torch.dtype
    walk: IndexMap
    content: Source | Number | Reference


class TraceMemory:
    """The memory under a trace. `records` is what the loader wrote to live storages, in its order."""

    def __init__(self, model: torch.nn.Module, scalars: Scalars) -> None:
        self.records: list[Record] = []
        self.storages = live_storages(model)
        self.device = next((s.tensor.device for s in self.storages.values()), torch.device("cpu"))
        self.scalars = scalars
        # Live storages that a record writes to, and the loader's own tensors that a stand-in was written
        # to: reading one of those must not give its bytes of now.
        self._written: set[int] = set()
        self._adopted: dict[int, Buffer] = {}
        self._born: set[int] = set()
        self._live_buffers: dict[tuple[int, torch.dtype], Buffer] = {}

    def standin(self, meta: torch.Tensor, buffer: Buffer) -> LazyTensor:
        raise NotImplementedError

    def source(self, spec: TensorSpec) -> LazyTensor:
        dtype = torch_dtype(spec)
        return self.standin(torch.empty(spec.shape, dtype=dtype, device="meta"), source_buffer(spec, dtype))

    def now(self, standin: LazyTensor) -> Reference:
        """The view that a stand-in is, as it is now."""
        buffer = standin.buffer
        version = len(self.records) if isinstance(buffer.base, Storage) else len(buffer.writes)
        return Reference(buffer, version, geometry_of(standin.meta), standin.meta.dtype)

    def born(self, tensor: torch.Tensor) -> None:
        """The loader made a tensor of its own."""
        self._born.add(storage_key(tensor))

    def is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether a write to it must be recorded instead of made."""
        key = storage_key(tensor)
        return key in self.storages or key in self._adopted

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether its bytes of now are not what the loader should see."""
        key = storage_key(tensor)
        return key in self._written or key in self._adopted

    @property
    def nothing_traced(self) -> bool:
        return not self._written and not self._adopted

    def lifted(self, value: Any, always: bool = False) -> Any:
        """A stand-in for a real tensor whose contents are traced (with `always`, for any); else the value."""
        if not isinstance(value, torch.Tensor) or type(value) is LazyTensor:
            return value
        key = storage_key(value)
        if key in self._adopted:
            return self._on(self._adopted[key], value)
        if key in self.storages:
            if always or key in self._written:
                return self._on(self._live_buffer(key, value.dtype), value)
        elif always:
            return self._constant(value)
        return value

    def _on(self, buffer: Buffer, tensor: torch.Tensor) -> LazyTensor:
        flat = torch.empty(buffer.numel, dtype=buffer.dtype, device="meta")
        if tensor.dtype != buffer.dtype:
            flat = flat.view(tensor.dtype)
        view = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return self.standin(view, buffer)

    def _live_buffer(self, key: int, dtype: torch.dtype) -> Buffer:
        buffer = self._live_buffers.get((key, dtype))
        if buffer is None:
            storage = self.storages[key]
            numel = storage.tensor.untyped_storage().nbytes() // dtype.itemsize
            buffer = Buffer(storage, dtype, Geometry(0, (numel,), (1,)), numel)
            self._live_buffers[(key, dtype)] = buffer
        return buffer

    def _constant(self, tensor: torch.Tensor) -> LazyTensor:
        kept = tensor.detach().clone(memory_format=torch.contiguous_format)
        meta = torch.empty(kept.shape, dtype=kept.dtype, device="meta")
        return self.standin(meta, buffer_like(meta, Constant(kept)))

    def kept(self, value: Any) -> Any:
        """An operand as it is stored in a call."""
        return self.now(self.lifted(value, always=True)) if isinstance(value, torch.Tensor) else value

    def write(self, to: torch.Tensor, content: Any) -> None:
        """`to.copy_(content)` for a tensor, `to.fill_(content)` for a number."""
        if to.numel() == 0:
            return
        if isinstance(content, torch.Tensor):
            read = self.lifted(content, always=True)
            if read.shape != to.shape:
                read.meta.expand(to.shape)  # raises what torch raises when the shapes do not fit
            content = self.now(read).expanded(tuple(to.shape))
        elif (origin := self.scalars.origin(content)) is not None:
            content = origin.expanded(tuple(to.shape))
        if type(to) is not LazyTensor:
            key = storage_key(to)
            if key in self.storages:
                self._land(key, to, content)
                return
            to = self._on(self._adopted.get(key) or self._adopt(key, to), to)
        buffer, place = to.buffer, geometry_of(to.meta)
        if isinstance(buffer.base, Storage):
            self._land(storage_key(buffer.base.tensor), to.meta, content)
        elif to.meta.dtype != buffer.dtype:
            raise Unsupported(f"The loader writes a {buffer.dtype} tensor through a {to.meta.dtype} view.")
        else:
            buffer.writes.append(Write(place, content))

    def _adopt(self, key: int, tensor: torch.Tensor) -> Buffer:
        """A stand-in is written to a tensor of the loader's own: from now on that is traced as well."""
        if key not in self._born:
            raise Unsupported(
                f"The loader writes weights to a tensor {tuple(tensor.shape)} that is neither a parameter, a buffer "
                "or an attribute of a module nor made while loading; the trace cannot tell where it is used."
            )
        numel = tensor.untyped_storage().nbytes() // tensor.element_size()
        everything = tensor.detach().as_strided((numel,), (1,), 0)
        buffer = Buffer(Constant(everything), tensor.dtype, Geometry(0, (numel,), (1,)), numel)
        self._adopted[key] = buffer
        return buffer

    def _land(self, key: int, to: torch.Tensor, content: Reference | Number) -> None:
        """Record a write to a live storage; `to` (or its meta twin) says where."""
        storage, place, dtype = self.storages[key], geometry_of(to), to.dtype
        self._written.add(key)
        if not isinstance(content, Reference):
            self.records.append(Record(storage, dtype, IndexMap.over(place).turned(), content))
            return
        walk = IndexMap.between(content.geometry, place)
        try:
            self.records += list(_moved(storage, dtype, content, walk))
        except (NotMovement, TooFragmented):
            self.records.append(Record(storage, dtype, walk, content))
        except Uninitialised:
            raise Unsupported(f"The loader copies to {storage.name} from a tensor that it did not fill.") from None


def _moved(storage: Storage, dtype: torch.dtype, content: Reference, walk: IndexMap) -> Iterator[Record]:
    """One record for each place that the content comes from; NotMovement if it has to be computed whole."""
    for origin, part, casts in movement(content, walk):
        if not isinstance(origin, Reference):
            for cast in casts:
                origin = torch.tensor(origin, dtype=cast).item()
            yield Record(storage, dtype, part, origin)
            continue
        source, had = origin.buffer.base, origin.buffer.dtype
        repeats = math.prod(loop.times for loop in part.loops if loop.read == 0)
        if not one_cast_does((origin.dtype, *casts, dtype)) or repeats > MAX_REPEATS:
            raise NotMovement
        if not isinstance(source, Source):
            yield Record(storage, dtype, part, origin)
        elif origin.dtype == had:
            yield Record(storage, dtype, part, source)
        elif origin.dtype == dtype and dtype.itemsize == had.itemsize:
            # Both ends are viewed as another dtype of the same size: the bits are kept.
            yield Record(storage, had, part, source)
        else:
            raise NotMovement


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return Geometry(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def buffer_like(out: torch.Tensor, base: Any) -> Buffer:
    """A buffer for a tensor laid out like `out`."""
    layout = geometry_of(out)
    return Buffer(base, out.dtype, layout, max(1, layout.span[1]))
