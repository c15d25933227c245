"""This rank's elements of a checkpoint tensor: views of parameters' memory, or a copy where no view has them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.trace.geometry import Geometry

logger = get_logger(__name__)
Values: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # returns the memory that has a parameter's elements now
Convert: TypeAlias = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


class LocalBoxes(NamedTuple):
    """The boxes that a rank holds of a checkpoint tensor of `shape` (elements), and where each starts in its memory."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]


class LocalView(NamedTuple):
    """A parameter, or a view of its memory."""

    parameter: torch.Tensor
    view: Geometry | None

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return (self.parameter,)

    def tensor(self, values: Values) -> torch.Tensor:
        """Returns the elements, out of the parameter's memory or of a copy of it."""
        data = values(self.parameter)
        if self.view is None:
            return data
        return data.as_strided(self.view.size, self.view.stride, int(data.storage_offset()) + self.view.offset)


class JoinedParts:
    """Parts of one checkpoint tensor, one after the other in the first dimension."""

    def __init__(self, parts: Sequence[LocalView | Computed]) -> None:
        self._parts = tuple(parts)
        self._copy: torch.Tensor | None = None

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return tuple(parameter for part in self._parts for parameter in part.parameters)

    def tensor(self, values: Values) -> torch.Tensor:
        """Returns a view of the parts, if they are at equal distances in one storage, and else a copy of them.

        The copy is in the same memory each time.
        """
        parts = [part.tensor(values) for part in self._parts]
        found = _one_view(parts)
        if found is not None:
            self._copy = None
            return found
        first, rows = parts[0], sum(part.shape[0] for part in parts)
        if self._copy is None or self._copy.device != first.device:
            self._copy = first.new_empty((rows, *first.shape[1:]))
            logger.debug("%d parts of a checkpoint tensor are copied in each update: they are not in one buffer", rows)
        with torch.no_grad():
            return torch.cat(parts, out=self._copy)


class Computed:
    """The result of a converter that computes: a copy, in the same memory each time."""

    def __init__(self, parameter: torch.Tensor, convert: Convert, name: str) -> None:
        self.parameters = (parameter,)
        self._convert, self._name = convert, name
        self._copy: torch.Tensor | None = None

    def tensor(self, values: Values) -> torch.Tensor:
        with torch.no_grad():
            found = self._convert(values(self.parameters[0]))[self._name]
            if self._copy is None or self._copy.device != found.device:
                self._copy = torch.empty_like(found, memory_format=torch.contiguous_format)
            return self._copy.copy_(found)


def computed(parameter: torch.Tensor, convert: Convert, values: Values) -> Iterator[tuple[str, LocalBoxes, Computed]]:
    """Yields what a converter computes of a parameter that this rank has whole.

    Raises Unsupported if elements are missing: placeholders of other ranks' are NaN.
    """
    data = values(parameter)
    with torch.no_grad():
        results = convert(data)
    for name, result in results.items():
        if result.isnan().any() and not data.isnan().any():
            raise Unsupported(f"the converter does arithmetic on {name}, with elements of other trainer ranks")
        shape = tuple(result.shape)
        yield name, LocalBoxes(shape, ((Box.whole(shape), (0,) * len(shape)),)), Computed(parameter, convert, name)


def join(parts: Sequence[tuple[LocalBoxes, LocalView | Computed]], values: Values) -> tuple[LocalBoxes, JoinedParts]:
    """Returns the boxes of all parts, and how they are read. They are joined in the order of their addresses.

    Raises Unsupported if their shapes do not fit, or if a copy of them does not have the checkpoint tensor's order.
    """
    found = [(local.tensor(values), part, local) for part, local in parts]
    found.sort(key=lambda one: one[0].data_ptr())
    (first, (shape, _), _), boxes, begin = found[0], [], 0
    if len({(tensor.shape[1:], tensor.dtype, part.shape) for tensor, part, _ in found}) > 1:
        raise Unsupported(f"parts of one checkpoint tensor of {first.dtype} {shape} have other shapes or dtypes")
    for tensor, part, _ in found:
        boxes += [(box, (begin + start[0], *start[1:])) for box, start in part.boxes]
        begin += tensor.shape[0]
    return LocalBoxes(shape, tuple(boxes)), JoinedParts([local for *_, local in found])


def _one_view(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns one view of tensors that are alike and lie at equal distances in one storage; None for others."""
    first = parts[0]
    if len(parts) == 1:
        return first
    steps = {(b.data_ptr() - a.data_ptr()) for a, b in itertools.pairwise(parts)}
    alike = {(part.shape, part.stride(), part.untyped_storage().data_ptr()) for part in parts}
    step = min(steps)
    if len(steps) > 1 or len(alike) > 1 or first.shape[0] != 1 or step <= 0 or step % first.element_size():
        return None
    size, stride = (len(parts), *first.shape[1:]), (step // first.element_size(), *first.stride()[1:])
    return first.as_strided(size, stride, int(first.storage_offset()))
