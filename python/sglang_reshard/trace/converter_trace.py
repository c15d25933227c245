"""Traces a weight converter, a function that slices, permutes, joins or picks elements, over tensors without memory.

    traced = trace_converter(lambda x: {"gate": x[:4], "up": x[4:]}, (8, 3), torch.bfloat16)
    traced["up"].boxes  # (BoxMapping(start=(0, 0), size=(4, 3), step=(1, 1), write=12, stride=(3, 1)),)

The argument is on the meta device, so that tensors that the function makes like it have no memory either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.geometry import MAX_BOXES, BoxMapping, IndexMap, TooFragmented, to_boxes
from sglang_reshard.trace.lazy_tensor import (
    CheckpointTensor,
    LazyTensor,
    NotPlainCopy,
    OpOutput,
    UninitializedRead,
    VersionedView,
    geometry_of,
    origins,
)
from sglang_reshard.trace.recorder import Recorder, aten

# An index is followed as runs of equidistant positions; one of more runs is computed.
MAX_RUNS = 4096


class TracedResult(NamedTuple):
    """One result of a traced function.

    shape  of the result, in elements
    boxes  of the result, with elements of the argument, whose row-major positions there `write` and `stride` give;
           other elements of the result come from elsewhere
    """

    shape: tuple[int, ...]
    boxes: tuple[BoxMapping, ...]


def trace_converter(
    function: Callable[[torch.Tensor], Mapping[str, torch.Tensor]], shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, TracedResult]:
    """Returns, by name, what `function` makes of a tensor of `shape` (elements) and `dtype`.

    Raises Unsupported, naming the result, if the function computes with elements or casts them, or scatters them
    over more than `MAX_BOXES` boxes. Exceptions of the function itself are passed on.
    """
    spec = TensorSpec("the argument", shape, str(dtype).removeprefix("torch."))
    results = trace_conversion(lambda state: function(state[spec.name]), [spec])
    return {name: TracedResult(size, boxes.get(spec.name, ())) for name, (size, boxes) in results.items()}


def trace_conversion(
    function: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]], specs: Iterable[TensorSpec]
) -> dict[str, tuple[tuple[int, ...], dict[str, tuple[BoxMapping, ...]]]]:
    """Returns, by name, what `function` makes of a state dict of tensors that `specs` describe.

    Of each result: its shape (elements), and by the name of a tensor of the state dict, the boxes of the result with
    elements of it, as in `TracedResult`.

    Raises as `trace_converter` does.
    """
    recorder = _FunctionRecorder()
    state: dict[str, torch.Tensor] = {spec.name: recorder.checkpoint_tensor(spec) for spec in specs}
    with torch.no_grad():
        results = function(state)
    if recorder.failure is not None:
        raise recorder.failure
    return {name: (tuple(result.shape), _boxes(recorder, name, result)) for name, result in results.items()}


def _boxes(recorder: Recorder, name: str, result: torch.Tensor) -> dict[str, tuple[BoxMapping, ...]]:
    if type(result) is not LazyTensor or not result.numel():
        return {}
    boxes: dict[str, tuple[BoxMapping, ...]] = {}
    try:
        for content, index_map, casts in origins(
            recorder.view_of(result), IndexMap.flattening(geometry_of(result.meta))
        ):
            if not isinstance(content, VersionedView):
                continue
            base = content.storage.base
            if isinstance(base, OpOutput):
                raise NotPlainCopy
            if isinstance(base, CheckpointTensor):
                if casts or content.dtype != content.storage.dtype:
                    raise Unsupported(
                        f"the converter reinterprets or casts {name}, whose elements are {content.storage.dtype}; only "
                        "slicing, transposing and renaming are supported"
                    )
                found = to_boxes(index_map.inverted(), tuple(result.shape), unit_steps=True)
                boxes[base.spec.name] = (*boxes.get(base.spec.name, ()), *found)
    except (NotPlainCopy, UninitializedRead):
        raise Unsupported(
            f"the converter does arithmetic on {name}; only slicing, transposing and renaming are supported"
        ) from None
    except TooFragmented:
        raise Unsupported(
            f"the converter scatters {name} over more than {MAX_BOXES} boxes, which is not supported"
        ) from None
    return boxes


class _FunctionRecorder(Recorder):
    """Also follows elements picked by an index, which the trace of a loader leaves to be computed."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Module())
        self.device = torch.device("meta")

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dim, index = _index_of(func, args)
        is_known = type(index) is torch.Tensor and index.dim() == 1 and index.device.type != "meta"
        if type(args[0]) is LazyTensor and is_known:
            length = args[0].meta.size(dim)
            given = (index.nonzero().flatten() if index.dtype == torch.bool else index).tolist()
            positions = [p + length if p < 0 else p for p in given]
            runs = list(_runs(positions))
            if len(runs) <= MAX_RUNS and all(0 <= p < length for p in positions):
                return self._picked(args[0], dim, len(positions), runs)
        return super()._dispatch(func, args, kwargs)

    def _picked(self, tensor: LazyTensor, dim: int, count: int, runs: Sequence[tuple[int, range]]) -> LazyTensor:
        shape = list(tensor.meta.shape)
        shape[dim] = count
        out = tensor.meta.new_empty(shape)
        writes: list[tuple[torch.Tensor | None, Any]] = []
        for at, run in runs:
            taken = aten.slice.Tensor(tensor.meta, dim, run.start, run.stop, run.step)
            writes.append((out.narrow(dim, at, len(run)), self.lazy(taken, tensor.lazy_storage)))
        return self._copied(out, writes)


def _index_of(func: Any, args: tuple[Any, ...]) -> tuple[int, Any]:
    """Returns the one dimension that an operator picks elements in, and the index; (0, None) for other operators."""
    if func is aten.index_select.default:
        return args[1], args[2]
    if func is aten.index.Tensor:
        given = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        if len(given) == 1:
            return given[0]
    return 0, None


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Yields equidistant positions, in ascending order, and where in the index they begin."""
    at = 0
    while at < len(positions):
        step = positions[at + 1] - positions[at] if at + 1 < len(positions) else 1
        end = at + 1
        while step > 0 and end < len(positions) and positions[end] - positions[end - 1] == step:
            end += 1
        if end - at == 2 and step != 1:  # the second position may begin a longer run
            end -= 1
        yield at, range(positions[at], positions[end - 1] + 1, step if end - at > 1 else 1)
        at = end
