"""Determines the elements of each checkpoint tensor that a trainer's live parameters hold, by tracing its converters.

A trainer that stores its parameters in its own layout has a function for each that converts it to checkpoint tensors:
it slices, concatenates and reorders. Traced once on a tensor without data, it shows where each element of the local
shard goes. After that nothing is converted, and nothing is gathered. Each trainer rank states what
it holds itself: pass its tensors with partial=True.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, ShardMap
from sglang_reshard.trace.converter_trace import trace_converter
from sglang_reshard.trace.live_shards import shard_view
from sglang_reshard.verl.local_views import Computed, JoinedParts, LocalBoxes, LocalView, Values, computed, join


class Conversion(NamedTuple):
    """A trainer rank's shard of a parameter, and how it is converted.

    name       the trainer's name of the parameter, for errors
    convert    converts a shard to checkpoint tensors by name. Other ranks' elements may have any value
    tied       the trainer keeps the parameter equal to another one that converts to the same tensors, as it does with
               tied embeddings
    part       the tensors that it converts to have elements of other parameters, too, as of the experts of a layer
    whole      the rank has all of the parameter: it may be converted by arithmetic, in every update
    """

    name: str
    parameter: torch.Tensor
    convert: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    tied: bool = False
    part: bool = False
    whole: bool = False


def _in_place(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data


class TracedParameters:
    """One trainer rank's parameters.

    Parameters that are parts of one checkpoint tensor are joined along its first dimension: to a view of their memory,
    if they lie at equal distances in one storage, as in Megatron's flat buffers. Else every update copies them.
    A converter that computes, as of a norm's weight, is run in every update, if the rank has the whole parameter.

    values  returns the memory that has a parameter's elements now; parts are joined in its order

    Raises Unsupported, naming the parameter, if it cannot be determined where elements go: the conversion computes with
    them, or several parameters hold one checkpoint tensor and are neither tied nor parts.
    """

    def __init__(self, conversions: Iterable[Conversion], trainer_ranks: int, values: Values = _in_place) -> None:
        found: dict[str, tuple[LocalBoxes, LocalView | JoinedParts | Computed]] = {}
        parts: dict[str, list[tuple[LocalBoxes, LocalView | Computed]]] = {}
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
            found |= {name: join(of_tensor, values) for name, of_tensor in parts.items()}
        except Exception as error:
            reason = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            raise Unsupported(f"{parameter} cannot be resharded in place: {reason}") from error
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


def _trace(conversion: Conversion, values: Values) -> Iterator[tuple[str, LocalBoxes, LocalView | Computed]]:
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
        yield from computed(conversion.parameter, conversion.convert, values)
        return
    for name, result in traced.items():
        if result.boxes:
            view, starts = shard_view(result.boxes, shape)
            boxes = (Box(b.start, tuple(a + n for a, n in zip(b.start, b.size, strict=True))) for b in result.boxes)
            held = LocalBoxes(result.shape, tuple(zip(boxes, starts, strict=True)))
            yield name, held, LocalView(conversion.parameter, view)


def _sharding(trainer_ranks: int, held: LocalBoxes) -> ExplicitSharding:
    """States the boxes for all ranks, so that replicas state the same: it counts for the ranks that list the tensor."""
    return ExplicitSharding(
        held.shape, ShardMap.of((box, start, rank) for box, start in held.boxes for rank in range(trainer_ranks))
    )
