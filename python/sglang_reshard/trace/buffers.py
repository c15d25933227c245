"""What the stand-ins stand for: buffers without bytes, and where their elements come from.

A buffer has a base (a checkpoint tensor, a live storage, a computed value, nothing) and the writes
made to it since. Views share a buffer. A `Reference` is a view as it was at one moment, so that a
later write cannot change what an earlier one recorded. `movement` traces a reference back to the
bases through all the copying in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.geometry import BoxMapping, Geometry, IndexMap, common_box, grid, onto, row_major


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A checkpoint tensor."""

    spec: TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A live storage: its name, one tensor on it that keeps it alive, and its size in elements."""

    name: str
    tensor: torch.Tensor
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A tensor whose values the trace knows."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The result (one of its outputs, if `index` is given) of a call, with References for tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None


Base = Source | Storage | Constant | Computed | None


@dataclass(slots=True, eq=False)
class Buffer:
    """A storage without bytes. `layout` is how its tensor lies in it, to materialise it."""

    base: Base
    dtype: torch.dtype
    layout: Geometry
    numel: int
    writes: list[Write] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A view of a buffer after its first `version` writes (of a live storage: after that many records)."""

    buffer: Buffer
    version: int
    geometry: Geometry
    dtype: torch.dtype

    @property
    def own_writes(self) -> list[Write]:
        return [] if isinstance(self.buffer.base, Storage) else self.buffer.writes[: self.version]

    def expanded(self, size: tuple[int, ...]) -> Reference:
        """Broadcast to a size, as `copy_` does."""
        offset, have, stride = self.geometry
        if have == size:
            return self
        lacking = len(size) - len(have)
        strides = [0] * lacking + [0 if n == 1 else s for n, s in zip(have, stride, strict=True)]
        return Reference(self.buffer, self.version, Geometry(offset, size, tuple(strides)), self.dtype)


Number = float | int | bool


class Write(NamedTuple):
    """`content` was written to `geometry` of a buffer; a Reference has the same size."""

    geometry: Geometry
    content: Reference | Number


class Piece(NamedTuple):
    """Elements that come from one place. The walk writes the view that was asked about.

    origin  a Reference without writes of its own, or a number
    casts   the dtypes that the elements went through on the way, the origin's own not included
    """

    origin: Reference | Number
    walk: IndexMap
    casts: tuple[torch.dtype, ...]


class NotMovement(Exception):
    """Not plain copying: it has to be computed."""


class Uninitialised(Exception):
    """Elements are read that nothing has written."""


def movement(reference: Reference, walk: IndexMap) -> Iterator[Piece]:
    """Where the elements that `walk` reads, in the buffer of `reference`, come from."""
    return _movement(reference, walk, ())


def _movement(reference: Reference, walk: IndexMap, casts: tuple[torch.dtype, ...]) -> Iterator[Piece]:
    buffer = reference.buffer
    writes = reference.own_writes
    if not writes:
        if buffer.base is None:
            raise Uninitialised
        yield Piece(reference, walk, casts)
        return
    if reference.dtype != buffer.dtype:
        raise NotMovement
    shape = grid(
        buffer.numel,
        [loop.read for loop in walk.loops] + [s for w in writes for s in w.geometry.stride],
    )
    left = onto(walk, shape, unit_steps=True)
    for write in reversed(writes):
        if not left:
            return
        if write.geometry.numel == 0:
            continue
        for written in onto(_write_walk(write), shape, unit_steps=True):
            still: list[BoxMapping] = []
            for box in left:
                common = common_box(box, written)
                if common is None:
                    still.append(box)
                    continue
                yield from _through(write, box.cut(*common), written.cut(*common), buffer.dtype, casts)
                still += box.without(*common)
            left = still
    if left and buffer.base is None:
        raise Uninitialised
    below = Reference(buffer, 0, reference.geometry, reference.dtype)
    for box in left:
        yield Piece(below, box.walk(shape), casts)


def _write_walk(write: Write) -> IndexMap:
    """From the buffer written to (as what is read here) to the content (as what is written)."""
    if isinstance(write.content, Reference):
        return IndexMap.between(write.geometry, write.content.geometry)
    return IndexMap.between(write.geometry, Geometry(0, write.geometry.size, (0,) * len(write.geometry.size)))


def _through(
    write: Write, wanted: BoxMapping, written: BoxMapping, dtype: torch.dtype, casts: tuple[torch.dtype, ...]
) -> Iterator[Piece]:
    """One box of a buffer, wanted by a view and filled by a write: join the two walks."""
    size = wanted.size
    walk = IndexMap.between(Geometry(written.write, size, written.stride), Geometry(wanted.write, size, wanted.stride))
    if isinstance(write.content, Reference):
        came = casts if write.content.dtype == dtype else (dtype, *casts)
        yield from _movement(write.content, walk, came)
    else:
        yield Piece(write.content, walk, (dtype, *casts))


def leaves(reference: Reference, seen: set[tuple[int, int]] | None = None) -> Iterator[Reference]:
    """The references to checkpoint tensors and live storages that a value is made of."""
    seen = set() if seen is None else seen
    base = reference.buffer.base
    if isinstance(base, (Source, Storage)) and not reference.own_writes:
        yield reference
        return
    key = (id(reference.buffer), reference.version)
    if key in seen:
        return
    seen.add(key)
    if isinstance(base, (Source, Storage)):
        yield whole(reference.buffer)
    elif isinstance(base, Computed):
        for operand in references_in((base.args, base.kwargs)):
            yield from leaves(operand, seen)
    for write in reference.own_writes:
        if isinstance(write.content, Reference):
            yield from leaves(write.content, seen)


def whole(buffer: Buffer) -> Reference:
    """The buffer's tensor before anything was written to it."""
    return Reference(buffer, 0, buffer.layout, buffer.dtype)


def references_in(value: Any) -> Iterator[Reference]:
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from references_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from references_in(item)


def source_buffer(spec: TensorSpec, dtype: torch.dtype) -> Buffer:
    layout = Geometry(0, spec.shape, row_major(spec.shape))
    return Buffer(Source(spec), dtype, layout, spec.numel)


def describe(reference: Reference) -> str:
    """The names that a value is made of, for messages."""
    names = []
    for leaf in leaves(reference):
        base = leaf.buffer.base
        names.append(base.spec.name if isinstance(base, Source) else base.name if isinstance(base, Storage) else "?")
    return ", ".join(dict.fromkeys(names)) or "constants"
