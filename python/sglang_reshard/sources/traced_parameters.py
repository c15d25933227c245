"""Determines the elements of each checkpoint tensor that a trainer's live parameters hold, by tracing its converters.

A trainer that stores its parameters in its own layout has a function for each that converts it to checkpoint tensors:
it slices, concatenates and reorders. Traced once on a tensor without data, it shows where each element of the local
shard goes. After that nothing is converted, and nothing is gathered: a tensor is a view of the memory of parameters, or
a copy where no view has its elements. Each trainer rank states what it holds: pass its tensors with partial=True.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import ExplicitSharding, ShardMap
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.trace.converter_trace import trace_converter
from sglang_reshard.trace.geometry import Geometry
from sglang_reshard.trace.live_shards import shard_view

logger = get_logger(__name__)
Values: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # returns the memory that has a parameter's elements now
Convert: TypeAlias = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A trainer rank's shard of a parameter, and how it is converted.

    name       the trainer's name of the parameter, for errors
    parameter  the shard, in contiguous memory
    convert    converts a shard to checkpoint tensors by name. Other ranks' elements may have any value
    tied       the trainer keeps the parameter equal to another one that converts to the same tensors, as it does with
               tied embeddings
    part       the tensors that it converts to have elements of other parameters, too, as of the experts of a layer
    whole      the rank has all of the parameter: it may be converted by arithmetic, in every update
    """

    name: str
    parameter: torch.Tensor
    convert: Convert
    tied: bool = False
    part: bool = False
    whole: bool = False


class LocalBoxes(NamedTuple):
    """The boxes that a rank holds of a checkpoint tensor of `shape` (elements), and where each starts in its memory."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]


class Local(NamedTuple):
    """This rank's elements of a checkpoint tensor: the parameters that have them, and a function that returns them."""

    parameters: tuple[torch.Tensor, ...]
    tensor: Callable[[Values], torch.Tensor]


def _in_place(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data


class TracedParameters:
    """One trainer rank's parameters as checkpoint tensors, for `WeightSender.update` with `partial=True`.

    Parameters that are parts of one checkpoint tensor are joined along its first dimension: to a view of their memory,
    if they lie at equal distances in one storage, as in Megatron's flat buffers. Else every update copies them.
    A converter that computes, as of a norm's weight, is run in every update, if the rank has the whole parameter.

    trainer_rank   this rank's number among the sender's trainer ranks, for errors
    trainer_ranks  number of the sender's trainer ranks
    values         returns the memory that has a parameter's elements now; parts are joined in its order

    Raises Unsupported, naming the trainer rank and the parameter, if it cannot be determined where elements go: the
    conversion computes with them, or several parameters hold one checkpoint tensor and are neither tied nor parts.
    """

    def __init__(
        self, conversions: Iterable[Conversion], *, trainer_rank: int, trainer_ranks: int, values: Values = _in_place
    ) -> None:
        found: dict[str, tuple[LocalBoxes, Local]] = {}
        parts: dict[str, list[tuple[LocalBoxes, Local]]] = {}
        tied: set[str] = set()
        parameter = "the first parameter"
        try:
            for conversion in conversions:
                parameter = conversion.name
                for name, boxes, local in _trace(conversion, values):
                    if conversion.part:
                        parts.setdefault(name, []).append((boxes, local))
                    elif name not in found:
                        found[name] = boxes, local
                        tied |= {name} if conversion.tied else set()
                    elif not conversion.tied or name not in tied:
                        raise Unsupported(
                            f"another parameter, to which it is not tied, is converted to {name}, too. Only tensors "
                            "whose parts are shards of one parameter are supported"
                        )
            parameter = "the joined parts"
            found |= {name: _joined(of_tensor, values) for name, of_tensor in parts.items()}
        except Exception as error:
            reason = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            raise Unsupported(
                f"trainer rank {trainer_rank}: {parameter} cannot be resharded in place: {reason}"
            ) from error
        # The same objects in every update, so that the change detector finds no change.
        sharding = functools.cache(functools.partial(_sharding, trainer_ranks))
        self._tensors = [(name, local, sharding(boxes)) for name, (boxes, local) in found.items()]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """This rank's parameters with elements of the checkpoint."""
        found = (parameter for _, local, _ in self._tensors for parameter in local.parameters)
        return list({id(parameter): parameter for parameter in found}.values())

    def tensors(self, values: Values = _in_place) -> list[tuple[str, torch.Tensor, ExplicitSharding]]:
        """Returns (name in the checkpoint, the parameter's own memory, sharding) of the tensors that this rank has.

        values  returns the memory that has a parameter's elements now; only this is requested again
        """
        return [(name, local.tensor(values), sharding) for name, local, sharding in self._tensors]


def _trace(conversion: Conversion, values: Values) -> Iterator[tuple[str, LocalBoxes, Local]]:
    """Yields the checkpoint tensors that have elements in this rank's shard of one parameter."""
    data = conversion.parameter.data
    if type(data) is not torch.Tensor or not data.is_contiguous():
        raise Unsupported(
            f"it is a {type(data).__name__} with strides {data.stride()}; only contiguous tensors are supported"
        )
    shape = tuple(data.shape)
    try:
        traced = trace_converter(conversion.convert, shape, data.dtype)
    except Unsupported:
        if not conversion.whole:
            raise
        yield from _computed(conversion.parameter, conversion.convert, values)
        return
    for name, result in traced.items():
        if result.boxes:
            view, starts = shard_view(result.boxes, shape)
            boxes = (Box(b.start, tuple(a + n for a, n in zip(b.start, b.size, strict=True))) for b in result.boxes)
            held = LocalBoxes(result.shape, tuple(zip(boxes, starts, strict=True)))
            yield name, held, _view(conversion.parameter, view)


def _sharding(trainer_ranks: int, held: LocalBoxes) -> ExplicitSharding:
    """States the boxes for all ranks, so that replicas state the same: it counts for the ranks that list the tensor."""
    return ExplicitSharding(
        held.shape, ShardMap.of((box, start, rank) for box, start in held.boxes for rank in range(trainer_ranks))
    )


def _view(parameter: torch.Tensor, view: Geometry | None) -> Local:
    """Returns a parameter, or a view of its memory."""

    def tensor(values: Values) -> torch.Tensor:
        data = values(parameter)
        if view is None:
            return data
        return data.as_strided(view.size, view.stride, int(data.storage_offset()) + view.offset)

    return Local((parameter,), tensor)


def _computed(parameter: torch.Tensor, convert: Convert, values: Values) -> Iterator[tuple[str, LocalBoxes, Local]]:
    """Yields what a converter computes of a parameter that this rank has whole: copies, in the same memory each time.

    Raises Unsupported if elements are missing: placeholders of other ranks' are NaN.
    """
    data = values(parameter)
    with torch.no_grad():
        results = convert(data)
    for name, result in results.items():
        if result.isnan().any() and not data.isnan().any():
            raise Unsupported(f"the converter does arithmetic on {name}, with elements of other trainer ranks")
        shape = tuple(result.shape)
        boxes = LocalBoxes(shape, ((Box.whole(shape), (0,) * len(shape)),))
        yield name, boxes, Local((parameter,), functools.partial(_recomputed, parameter, convert, name, []))


def _recomputed(
    parameter: torch.Tensor, convert: Convert, name: str, copies: list[torch.Tensor], values: Values
) -> torch.Tensor:
    with torch.no_grad():
        found = convert(values(parameter))[name]
        if not copies or copies[0].device != found.device:
            copies[:] = [torch.empty_like(found, memory_format=torch.contiguous_format)]
        return copies[0].copy_(found)


def _joined(parts: Sequence[tuple[LocalBoxes, Local]], values: Values) -> tuple[LocalBoxes, Local]:
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
    locals_ = [local for *_, local in found]
    parameters = tuple(parameter for local in locals_ for parameter in local.parameters)
    return LocalBoxes(shape, tuple(boxes)), Local(parameters, functools.partial(_concatenated, locals_, []))


def _concatenated(parts: Sequence[Local], copies: list[torch.Tensor], values: Values) -> torch.Tensor:
    """Returns a view of the parts, if they are at equal distances in one storage, and else a copy of them.

    The copy is in the same memory each time.
    """
    tensors = [part.tensor(values) for part in parts]
    if (view := _one_view(tensors)) is not None:
        copies.clear()
        return view
    first, rows = tensors[0], sum(tensor.shape[0] for tensor in tensors)
    if not copies or copies[0].device != first.device:
        copies[:] = [first.new_empty((rows, *first.shape[1:]))]
        logger.debug("%d parts of a checkpoint tensor are copied in each update: they are not in one buffer", rows)
    with torch.no_grad():
        return torch.cat(tensors, out=copies[0])


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
