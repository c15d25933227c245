"""Models the memory that a loader reads and writes while it is traced: live storages and temporary tensors.

The recorder interprets operators; they operate on this memory. Every write to a live storage becomes a `Record`.
Nothing here writes to the engine's memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.geometry import Geometry, IndexMap, TooFragmented
from sglang_reshard.trace.lazy_tensor import (
    CheckpointTensor,
    LazyStorage,
    LazyTensor,
    LiveStorage,
    NotPlainCopy,
    Number,
    UninitializedRead,
    VersionedView,
    Write,
    names_of,
    origins,
)
from sglang_reshard.trace.live import live_storages, storage_key
from sglang_reshard.trace.program import equals_one_cast, torch_dtype

if TYPE_CHECKING:
    from sglang_reshard.trace.scalars import Scalars

# An expanded dimension of at most this size becomes that many copies; a larger one is computed.
MAX_REPEATS = 64


class Record(NamedTuple):
    """The elements of `content` that `index_map` reads are written to a live storage, as `dtype`.

    content  a checkpoint tensor, a number, or a view to be computed when an update runs
    """

    storage: LiveStorage
    dtype: torch.dtype
    index_map: IndexMap
    content: CheckpointTensor | Number | VersionedView

    @property
    def label(self) -> str:
        """Says where the elements come from, for messages."""
        if isinstance(self.content, CheckpointTensor):
            return self.content.spec.name
        return names_of(self.content) if isinstance(self.content, VersionedView) else f"a fill with {self.content}"

    def written(self, unit: int) -> Geometry:
        """The elements that are written, in units of so many bytes."""
        return self.index_map.written_view.scaled(self.dtype.itemsize // unit)


class TraceMemory:
    """The memory of one trace. `records` has the loader's writes to live storages, in order."""

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

    def lazy(self, meta: torch.Tensor, storage: LazyStorage) -> LazyTensor:
        raise NotImplementedError

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
        storage = self._lazy_live.get((key, dtype))
        if storage is None:
            live = self.storages[key]
            numel = live.tensor.untyped_storage().nbytes() // dtype.itemsize
            storage = LazyStorage(live, dtype, Geometry.contiguous((numel,)), numel)
            self._lazy_live[(key, dtype)] = storage
        return storage

    def as_operand(self, value: Any) -> Any:
        """Returns a view of any tensor as it is now, to be kept in an `OpOutput`; any other value as it is."""
        return self.view_of(self.as_lazy(value, always=True)) if isinstance(value, torch.Tensor) else value

    def write(self, to: torch.Tensor, content: Any) -> None:
        """Records `to.copy_(content)` for a tensor, `to.fill_(content)` for a number."""
        if to.numel() == 0:
            return
        if isinstance(content, torch.Tensor):
            read = self.as_lazy(content, always=True)
            if read.shape != to.shape:
                read.meta.expand(to.shape)  # raises what torch raises when the shapes do not fit
            content = self.view_of(read).expanded(tuple(to.shape))
        elif self.scalars is not None and (origin := self.scalars.origin(content)) is not None:
            content = origin.expanded(tuple(to.shape))
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
        numel = tensor.untyped_storage().nbytes() // tensor.element_size()
        everything = tensor.detach().as_strided((numel,), (1,), 0)
        storage = LazyStorage(everything, tensor.dtype, Geometry.contiguous((numel,)), numel)
        self._adopted[key] = storage
        return storage

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


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return Geometry(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def storage_like(tensor: torch.Tensor, base: Any) -> LazyStorage:
    """Returns a lazy storage for a tensor that is laid out like this one."""
    layout = geometry_of(tensor)
    return LazyStorage(base, tensor.dtype, layout, max(1, layout.span[1]))
