"""Tensors without memory, where their elements come from, and the mode under which the engine's loader runs over them.

A loader gets a `LazyTensor` in place of each checkpoint tensor; its `__torch_dispatch__` passes every operator called
on one, in any thread, to the recorder. `LiveWriteMode` adds the operators that involve live tensors only: fills of
parameters, and reads of values that the loader has just written.

A `LazyStorage` has a base (a checkpoint tensor, a live storage, a constant, an operator's output, or nothing) and the
writes made to it since. Views share a storage, as torch's do. A `VersionedView` is a view at one moment, so that
a later write does not change what has been recorded. `origins` follows a view back to bases through all copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.torch_private import TorchDispatchMode
from sglang_reshard.trace.geometry import BoxMapping, Geometry, IndexMap, grid_shape, intersection, to_boxes


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointTensor:
    spec: TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class LiveStorage:
    """Memory of the engine's model, named after a tensor on it, which keeps it alive."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class OpOutput:
    """The result of an operator that an update will call, or output `index` of it. Operands are VersionedViews."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None


@dataclass(slots=True, eq=False)
class LazyStorage:
    """`numel` elements. A tensor in `base` is a constant; None is uninitialized memory.

    layout  of the tensor that the storage was made for
    """

    base: CheckpointTensor | LiveStorage | OpOutput | torch.Tensor | None
    dtype: torch.dtype
    layout: Geometry
    numel: int
    writes: list[Write] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class VersionedView:
    """A view of a storage after its first `version` writes; of a live storage, after `version` records of the trace."""

    storage: LazyStorage
    version: int
    geometry: Geometry
    dtype: torch.dtype

    @property
    def writes(self) -> list[Write]:
        return [] if isinstance(self.storage.base, LiveStorage) else self.storage.writes[: self.version]


Number = float | int | bool


class Write(NamedTuple):
    """`content`, of equal size if it is a view, was written to `geometry` of a storage."""

    geometry: Geometry
    content: VersionedView | Number


class Origin(NamedTuple):
    """Elements that come from one place, and where in the view that was asked about they are written.

    content  a number, or a view of a storage without writes
    casts    the dtypes that the elements were cast to on the way
    """

    content: VersionedView | Number
    index_map: IndexMap
    casts: tuple[torch.dtype, ...]


class NotPlainCopy(Exception):
    """Raised for elements that have to be computed."""


class UninitializedRead(Exception):
    """Raised for elements that nothing has written."""


def origins(view: VersionedView, index_map: IndexMap, casts: tuple[torch.dtype, ...] = ()) -> Iterator[Origin]:
    """Yields where the elements that `index_map` reads from the storage of `view` come from.

    Raises NotPlainCopy and UninitializedRead.
    """
    storage, writes = view.storage, view.writes
    if not writes:
        if storage.base is None:
            raise UninitializedRead
        yield Origin(view, index_map, casts)
        return
    if view.dtype != storage.dtype:
        raise NotPlainCopy
    strides = [loop.read for loop in index_map.loops] + [s for w in writes for s in w.geometry.stride]
    grid = grid_shape(storage.numel, strides)
    left = to_boxes(index_map, grid, unit_steps=True)
    for write in reversed(writes):
        if not left:
            return
        if write.geometry.numel == 0:
            continue
        # Maps the written storage, as the source, to the content.
        of_content = (0, write.geometry.size, (0,) * len(write.geometry.size))
        content = write.content.geometry if isinstance(write.content, VersionedView) else Geometry(*of_content)
        for written in to_boxes(IndexMap.between(write.geometry, content), grid, unit_steps=True):
            still: list[BoxMapping] = []
            for box in left:
                common = intersection(box, written)
                if common is None:
                    still.append(box)
                    continue
                yield from _through(write, box.narrow(*common), written.narrow(*common), storage.dtype, casts)
                still += box.subtract(*common)
            left = still
    if left and storage.base is None:
        raise UninitializedRead
    unwritten = VersionedView(storage, 0, view.geometry, view.dtype)
    for box in left:
        yield Origin(unwritten, box.index_map(grid), casts)


def _through(
    write: Write, wanted: BoxMapping, written: BoxMapping, dtype: torch.dtype, casts: tuple[torch.dtype, ...]
) -> Iterator[Origin]:
    """Yields the origins of a box of a storage, wanted by a view and filled by a write."""
    size = wanted.size
    joined = IndexMap.between(
        Geometry(written.write, size, written.stride), Geometry(wanted.write, size, wanted.stride)
    )
    if isinstance(write.content, VersionedView):
        yield from origins(write.content, joined, casts if write.content.dtype == dtype else (dtype, *casts))
    else:
        yield Origin(write.content, joined, (dtype, *casts))


def leaves(view: VersionedView, seen: set[tuple[int, int]] | None = None) -> Iterator[VersionedView]:
    """Yields the views of checkpoint tensors and live storages that a value depends on."""
    seen = set() if seen is None else seen
    base = view.storage.base
    if isinstance(base, (CheckpointTensor, LiveStorage)) and not view.writes:
        yield view
        return
    key = (id(view.storage), view.version)
    if key in seen:
        return
    seen.add(key)
    if isinstance(base, (CheckpointTensor, LiveStorage)):
        yield unwritten_view(view.storage)
    elif isinstance(base, OpOutput):
        for operand in operands(base):
            yield from leaves(operand, seen)
    for write in view.writes:
        if isinstance(write.content, VersionedView):
            yield from leaves(write.content, seen)


def checkpoint_tensors(content: object) -> list[CheckpointTensor]:
    """Returns the checkpoint tensors that the content of a record depends on."""
    bases = [leaf.storage.base for leaf in leaves(content)] if isinstance(content, VersionedView) else [content]
    return [base for base in bases if isinstance(base, CheckpointTensor)]


def unwritten_view(storage: LazyStorage) -> VersionedView:
    """Returns the storage's tensor before its first write."""
    return VersionedView(storage, 0, storage.layout, storage.dtype)


def operands(value: Any) -> Iterator[VersionedView]:
    """Yields the views among the arguments of an operator."""
    if isinstance(value, VersionedView):
        yield value
    elif isinstance(value, OpOutput):
        yield from operands((*value.args, *value.kwargs.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from operands(item)


def names_of(view: VersionedView) -> str:
    """Returns the names of the tensors that a value depends on, for messages."""
    bases = (leaf.storage.base for leaf in leaves(view))
    names = [b.spec.name if isinstance(b, CheckpointTensor) else b.name for b in bases]  # type: ignore[union-attr]
    return ", ".join(dict.fromkeys(names)) or "constants"


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


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return Geometry(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def storage_like(tensor: torch.Tensor, base: Any) -> LazyStorage:
    """Returns a lazy storage for a tensor that is laid out like this one."""
    layout = geometry_of(tensor)
    return LazyStorage(base, tensor.dtype, layout, max(1, layout.span[1]))


class LazyTensor(torch.Tensor):
    """A view of a `LazyStorage`. `meta` is the same view of a meta tensor, so that torch computes the geometry.

    recorder  the `Recorder` of the trace
    """

    meta: torch.Tensor
    lazy_storage: LazyStorage
    recorder: Any

    @staticmethod
    def __new__(cls, meta: torch.Tensor, storage: LazyStorage, recorder: Any) -> LazyTensor:
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
        taken: float = self.recorder.item(self)
        return taken

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

    def __init__(self, recorder: Any) -> None:
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
