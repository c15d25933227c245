"""Live parameters as they are, and which elements of which checkpoint tensors they hold.

A trainer that keeps its parameters in a form of its own has a function for each that converts it to checkpoint
tensors: it cuts, joins and reorders. Run once on a tensor without bytes, it tells where each element of the local
shard goes. Nothing is converted ever after, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding
from sglang_reshard.trace.function_trace import TracedResult, trace_function
from sglang_reshard.trace.geometry import Geometry
from sglang_reshard.trace.strided_view import strided_view
from sglang_reshard.verl.contributions import Contribution, Share, put_together
from sglang_reshard.verl.exchange import Exchange


class Conversion(NamedTuple):
    """A row of a directory of parameters that is as long on every trainer rank.

    name       the trainer's, for errors
    parameter  this rank's shard; None if it has none in this row
    convert    makes checkpoint tensors of a shard, by name. Other ranks' elements may be anything
    """

    name: str
    parameter: torch.Tensor | None
    convert: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


class _Local(NamedTuple):
    """Where a checkpoint tensor's elements are on this rank: a parameter, or a view of its memory."""

    parameter: torch.Tensor
    view: Geometry | None

    def tensor(self) -> torch.Tensor:
        data = self.parameter.data
        if self.view is None:
            return data
        return data.as_strided(self.view.size, self.view.stride, int(data.storage_offset()) + self.view.offset)


class HeldParameters:
    """One trainer rank's. Collective: `exchange` is called once, here.

    Raises Unsupported on all ranks, naming parameter and rank, when one of them cannot tell where elements go: its
    conversion computes with them, or several parameters are parts of one checkpoint tensor. Raises Mismatch when
    ranks disagree.
    """

    def __init__(self, conversions: Iterable[Conversion], exchange: Exchange) -> None:
        self._local: dict[str, _Local] = {}
        self._tensors = put_together(exchange(self._contribution(conversions), Contribution))
        device = next((local.parameter.device for local in self._local.values()), torch.device("cpu"))
        # The same in every update, as all else is: then nothing is news.
        self._nothing = {
            dtype: torch.empty(0, dtype=getattr(torch, dtype), device=device)
            for dtype in {tensor.dtype for tensor in self._tensors.values()}
        }

    def tensors(self) -> list[tuple[str, torch.Tensor, ExplicitSharding]]:
        """(name in the checkpoint, the parameter's own memory, who holds what) of every tensor, as `describe` takes.

        Only `parameter.data` is looked up anew.
        """
        return [
            (name, self._local[name].tensor() if name in self._local else self._nothing[tensor.dtype], tensor.held)
            for name, tensor in self._tensors.items()
        ]

    def _contribution(self, conversions: Iterable[Conversion]) -> Contribution:
        shares: dict[Share, int] = {}
        rows = []
        at = "the first parameter"
        try:
            for conversion in conversions:
                at = conversion.name
                found = self._found(conversion)
                rows.append(tuple((name, shares.setdefault(share, len(shares))) for name, share in found.items()))
        except Exception as error:  # whatever it is: the other ranks wait to hear of it
            why = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            return Contribution(refusal=f"{at} cannot be resharded where it is: {why}")
        return Contribution(tuple(rows), tuple(shares))

    def _found(self, conversion: Conversion) -> dict[str, Share]:
        """What this rank holds of which checkpoint tensors by one parameter."""
        if conversion.parameter is None:
            return {}
        data = conversion.parameter.data
        if type(data) is not torch.Tensor or not data.is_contiguous():
            raise Unsupported(f"it is a {type(data).__name__} with strides {data.stride()}, not a contiguous tensor")
        shape = tuple(data.shape)
        found = {}
        for name, result in trace_function(conversion.convert, shape, data.dtype).items():
            found[name], view = _share(result, shape, data.dtype)
            if found[name].boxes:
                self._local[name] = _Local(conversion.parameter, view)
        return found


def _share(result: TracedResult, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Share, Geometry | None]:
    """What a rank holds by one result of a conversion, and the view of its shard that has it."""
    name = str(dtype).removeprefix("torch.")
    if not result.boxes:
        return Share(result.shape, name, ()), None
    view, places = strided_view(result.boxes, shape)
    boxes = (Box(b.start, tuple(a + n for a, n in zip(b.start, b.size, strict=True))) for b in result.boxes)
    return Share(result.shape, name, tuple(zip(boxes, places, strict=True))), view
