"""Determines the elements of each checkpoint tensor that a trainer's live parameters hold, by tracing its converters.

A trainer that stores its parameters in its own layout has a function for each that converts it to checkpoint tensors:
it slices, concatenates and reorders. Traced once on a tensor without data, it shows where each element of the local
shard goes. After that nothing is converted, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding
from sglang_reshard.trace.converter_trace import TracedResult, trace_converter
from sglang_reshard.trace.geometry import Geometry
from sglang_reshard.trace.live_shards import shard_view
from sglang_reshard.verl.local_views import Computed, JoinedParts, LocalView, Values, computed, join
from sglang_reshard.verl.shard_exchange import AllGather, LocalBoxes, RankShards, merge_shards


class Conversion(NamedTuple):
    """A row of a list of parameters that has the same length on every trainer rank.

    name       the trainer's name of the parameter, for errors
    parameter  this rank's shard; None if it has none
    convert    converts a shard to checkpoint tensors by name. Other ranks' elements may have any value
    tied       the trainer keeps the parameter equal to another one that converts to the same tensors, as it does with
               tied embeddings that the first and the last pipeline stage both have
    part       the tensors that it converts to have elements of other parameters, too, as of the experts of a layer
    whole      the rank has all of the parameter: it may be converted by arithmetic, in every update
    """

    name: str
    parameter: torch.Tensor | None
    convert: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    tied: bool = False
    part: bool = False
    whole: bool = False


def _in_place(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data


class TracedParameters:
    """One trainer rank's parameters. Construction is collective: it calls `all_gather` once.

    Parameters that are parts of one checkpoint tensor are joined along its first dimension: to a view of their memory,
    if they lie at equal distances in one storage, as in Megatron's flat buffers. Else every update copies them.
    A converter that computes, as of a norm's weight, is run in every update, if the rank has the whole parameter.

    values  returns the memory that has a parameter's elements now; parts are joined in its order

    Raises Unsupported on all ranks, naming parameter and rank, if one of them cannot determine where elements go: the
    conversion computes with them, or several parameters hold one checkpoint tensor and are neither tied nor parts.
    Raises Mismatch if ranks disagree.
    """

    def __init__(
        self,
        conversions: Iterable[Conversion],
        all_gather: AllGather,
        values: Values = _in_place,
    ) -> None:
        self._local: dict[str, LocalView | JoinedParts | Computed] = {}
        self._tensors = merge_shards(all_gather(self._trace_all(conversions, values), RankShards))
        device = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        # The same objects in every update, so that the change detector finds no change.
        self._empty = {
            dtype: torch.empty(0, dtype=getattr(torch, dtype), device=device)
            for dtype in {tensor.dtype for tensor in self._tensors.values()}
        }

    @property
    def parameters(self) -> list[torch.Tensor]:
        """This rank's parameters with elements of the checkpoint."""
        found = (parameter for local in self._local.values() for parameter in local.parameters)
        return list({id(parameter): parameter for parameter in found}.values())

    def tensors(self, values: Values = _in_place) -> list[tuple[str, torch.Tensor, ExplicitSharding]]:
        """Returns (name in the checkpoint, the parameter's own memory, sharding) of every tensor, for `describe`.

        values  returns the memory that has a parameter's elements now; only this is requested again
        """
        return [
            (
                name,
                self._local[name].tensor(values) if name in self._local else self._empty[tensor.dtype],
                tensor.sharding,
            )
            for name, tensor in self._tensors.items()
        ]

    def _trace_all(self, conversions: Iterable[Conversion], values: Values) -> RankShards:
        numbers: dict[LocalBoxes, int] = {}
        rows: list[tuple[tuple[str, int], ...]] = []
        tied: list[int] = []
        parts: dict[str, list[tuple[LocalBoxes, LocalView | Computed]]] = {}
        parameter = "the first parameter"
        try:
            for row, conversion in enumerate(conversions):
                parameter = conversion.name
                if conversion.tied:
                    tied.append(row)
                traced = _trace(conversion, values)
                here = [(name, *found) for name, found in traced.items() if found[0].boxes]
                if conversion.part:
                    rows.append(())
                    for name, boxes, local in here:
                        parts.setdefault(name, []).append((boxes, local))
                else:
                    rows.append(_row(traced, numbers))
                    for name, _, local in here:
                        self._local.setdefault(name, local)  # the first, as in merge_shards
            parameter = "the joined parts"
            joined = {name: join(of_tensor, values) for name, of_tensor in parts.items()}
        except Exception as error:  # of any kind: the other ranks wait for this one's message
            reason = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            return RankShards(error=f"{parameter} cannot be resharded in place: {reason}")
        self._local |= {name: local for name, (_, local) in joined.items()}
        parts_row = _row(joined, numbers)
        return RankShards(tuple(rows), tuple(numbers), tuple(tied), parts_row)


def _trace(conversion: Conversion, values: Values) -> dict[str, tuple[LocalBoxes, LocalView | Computed]]:
    """Returns the parts of each checkpoint tensor in this rank's shard of one parameter."""
    if conversion.parameter is None:
        return {}
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
        return computed(conversion.parameter, conversion.convert, values)
    found: dict[str, tuple[LocalBoxes, LocalView | Computed]] = {}
    for name, result in traced.items():
        boxes, view = _local_boxes(result, shape, data.dtype)
        found[name] = boxes, LocalView(conversion.parameter, view)
    return found


def _row(
    tensors: Mapping[str, tuple[LocalBoxes, object]], numbers: dict[LocalBoxes, int]
) -> tuple[tuple[str, int], ...]:
    """Returns a row of `RankShards`. `numbers` gets those boxes that it does not have yet."""
    return tuple((name, numbers.setdefault(boxes, len(numbers))) for name, (boxes, _) in tensors.items())


def _local_boxes(
    result: TracedResult, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[LocalBoxes, Geometry | None]:
    """Returns the boxes of one result of a conversion that a rank holds, and the view of its shard that has them."""
    name = str(dtype).removeprefix("torch.")
    if not result.boxes:
        return LocalBoxes(result.shape, name, ()), None
    view, starts = shard_view(result.boxes, shape)
    boxes = (Box(b.start, tuple(a + n for a, n in zip(b.start, b.size, strict=True))) for b in result.boxes)
    return LocalBoxes(result.shape, name, tuple(zip(boxes, starts, strict=True))), view
