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
from sglang_reshard.trace.checkpoint_order_view import shard_view
from sglang_reshard.trace.converter_trace import TracedResult, trace_converter
from sglang_reshard.trace.geometry import Geometry
from sglang_reshard.verl.shard_exchange import AllGather, LocalBoxes, RankShards, merge_shards


class Conversion(NamedTuple):
    """A row of a list of parameters that has the same length on every trainer rank.

    name       the trainer's name of the parameter, for errors
    parameter  this rank's shard; None if it has none
    convert    converts a shard to checkpoint tensors by name. Other ranks' elements may have any value
    tied       the trainer keeps the parameter equal to another one that converts to the same tensors, as it does with
               tied embeddings that the first and the last pipeline stage both have
    """

    name: str
    parameter: torch.Tensor | None
    convert: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    tied: bool = False


class _LocalView(NamedTuple):
    """This rank's elements of a checkpoint tensor: a parameter, or a view of its memory."""

    parameter: torch.Tensor
    view: Geometry | None

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        """Returns them out of `data`: the parameter's own, or a copy that has the same elements."""
        if self.view is None:
            return data
        return data.as_strided(self.view.size, self.view.stride, int(data.storage_offset()) + self.view.offset)


class TracedParameters:
    """One trainer rank's parameters. Construction is collective: it calls `all_gather` once.

    Raises Unsupported on all ranks, naming parameter and rank, if one of them cannot determine where elements go: the
    conversion computes with them, or several parameters are parts of one checkpoint tensor and are not tied. Raises
    Mismatch if ranks disagree.
    """

    def __init__(self, conversions: Iterable[Conversion], all_gather: AllGather) -> None:
        self._local: dict[str, _LocalView] = {}
        self._tensors = merge_shards(all_gather(self._trace_all(conversions), RankShards))
        device = next((local.parameter.device for local in self._local.values()), torch.device("cpu"))
        # The same objects in every update, so that the change detector finds no change.
        self._empty = {
            dtype: torch.empty(0, dtype=getattr(torch, dtype), device=device)
            for dtype in {tensor.dtype for tensor in self._tensors.values()}
        }

    @property
    def parameters(self) -> list[torch.Tensor]:
        """This rank's parameters with elements of the checkpoint."""
        return list({id(local.parameter): local.parameter for local in self._local.values()}.values())

    def tensors(
        self, values: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter.data
    ) -> list[tuple[str, torch.Tensor, ExplicitSharding]]:
        """Returns (name in the checkpoint, the parameter's own memory, sharding) of every tensor, for `describe`.

        values  returns the memory that has a parameter's elements now; only this is requested again
        """
        return [
            (name, self._tensor(name, values) if name in self._local else self._empty[tensor.dtype], tensor.sharding)
            for name, tensor in self._tensors.items()
        ]

    def _tensor(self, name: str, values: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        local = self._local[name]
        return local.tensor(values(local.parameter))

    def _trace_all(self, conversions: Iterable[Conversion]) -> RankShards:
        numbers: dict[LocalBoxes, int] = {}
        rows, tied = [], []
        parameter = "the first parameter"
        try:
            for row, conversion in enumerate(conversions):
                parameter = conversion.name
                if conversion.tied:
                    tied.append(row)
                traced = self._trace(conversion)
                rows.append(tuple((name, numbers.setdefault(local, len(numbers))) for name, local in traced.items()))
        except Exception as error:  # of any kind: the other ranks wait for this one's message
            reason = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            return RankShards(error=f"{parameter} cannot be resharded in place: {reason}")
        return RankShards(tuple(rows), tuple(numbers), tuple(tied))

    def _trace(self, conversion: Conversion) -> dict[str, LocalBoxes]:
        """Returns the parts of each checkpoint tensor in this rank's shard of one parameter."""
        if conversion.parameter is None:
            return {}
        data = conversion.parameter.data
        if type(data) is not torch.Tensor or not data.is_contiguous():
            raise Unsupported(
                f"it is a {type(data).__name__} with strides {data.stride()}; only contiguous tensors are supported"
            )
        shape = tuple(data.shape)
        traced = {}
        for name, result in trace_converter(conversion.convert, shape, data.dtype).items():
            traced[name], view = _local_boxes(result, shape, data.dtype)
            if traced[name].boxes:
                self._local.setdefault(name, _LocalView(conversion.parameter, view))  # the first, as in merge_shards
        return traced


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
