"""From the loader's records to a Program: copies out of the checkpoint, then steps local to the rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Region
from sglang_reshard.trace.buffers import Reference, Source, Storage, describe, source_buffer
from sglang_reshard.trace.casts import check_cast, torch_dtype
from sglang_reshard.trace.expression import Compiler
from sglang_reshard.trace.geometry import MAX_BOXES, Geometry, IndexMap, TooFragmented, onto, row_major
from sglang_reshard.trace.live import flat
from sglang_reshard.trace.memory import Record
from sglang_reshard.trace.program import Copy, Step


class Lowering:
    """Collects copies, targets and steps of one program."""

    def __init__(self, device: torch.device) -> None:
        self.copies: list[Copy] = []
        self.targets: dict[str, torch.Tensor] = {}
        self.steps: list[Step] = []
        self._device = device
        self._scratch: dict[tuple[str, Geometry], torch.Tensor] = {}
        self._compiler = Compiler(self._operand, device)

    def add(self, record: Record) -> None:
        target = self._target(record.storage, record.dtype)
        content = record.content
        if isinstance(content, Source):
            dtype = torch_dtype(content.spec)
            check_cast(content.spec.name, dtype, target, record.dtype)
            self._copy(content, record.walk, target)
            return
        place = record.walk.writes
        to = self.targets[target].as_strided(place.size, place.stride, place.offset)
        if isinstance(content, Reference):
            self.steps.append(Step(target, f"from {describe(content)}", self._computation(record, content, to)))
        else:
            self.steps.append(Step(target, f"fill {content}", _fill(to, content)))

    def _computation(self, record: Record, content: Reference, to: torch.Tensor) -> Callable[[], None]:
        value = self._compiler.compile(Reference(content.buffer, content.version, record.walk.reads, content.dtype))
        return lambda: void(to.copy_(value({})))

    def _copy(self, source: Source, walk: IndexMap, target: str) -> None:
        name = source.spec.name
        try:
            landings = onto(walk, source.spec.shape)
        except TooFragmented:
            raise Unsupported(
                f"{name} {source.spec.shape} lands in {target} in more than {MAX_BOXES} strided boxes. Send it in "
                "a layout closer to the engine's."
            ) from None
        for at in landings:
            self.copies.append(Copy(name, Region(at.start, at.size, at.step), target, at.write, at.stride))

    def _target(self, storage: Storage, dtype: torch.dtype) -> str:
        # One storage can be written as several dtypes; each has a target of its own.
        own = storage.tensor.dtype
        name = storage.name if dtype == own else f"{storage.name} as {str(dtype).removeprefix('torch.')}"
        if name not in self.targets:
            self.targets[name] = flat(storage.tensor, dtype)
        return name

    def _operand(self, source: Source, geometry: Geometry, dtype: torch.dtype, viewed: torch.dtype) -> torch.Tensor:
        """A view of a checkpoint tensor as an operand: copies put its elements into scratch."""
        if viewed != dtype:
            everything = self._landed(source, source_buffer(source.spec, dtype).layout, dtype)
            return flat(everything, viewed).as_strided(geometry.size, geometry.stride, geometry.offset)
        # An expanded dimension is landed once.
        size = tuple(1 if s == 0 else n for n, s in zip(geometry.size, geometry.stride, strict=True))
        return self._landed(source, geometry._replace(size=size), dtype).expand(geometry.size)

    def _landed(self, source: Source, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
        key = (source.spec.name, geometry)
        if key not in self._scratch:
            name = f"scratch/{len(self._scratch)}"
            tensor = torch.empty(geometry.size, dtype=dtype, device=self._device)
            self._scratch[key] = tensor
            self.targets[name] = tensor.view(-1)
            into = Geometry(0, geometry.size, row_major(geometry.size))
            self._copy(source, IndexMap.between(geometry, into), name)
        return self._scratch[key]


def _fill(to: torch.Tensor, value: float) -> Callable[[], None]:
    return lambda: void(to.fill_(value))


def void(_: object) -> None:
    """Steps return nothing."""
