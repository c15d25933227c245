"""Where a function that only moves elements puts those of one tensor: found by running it on a tensor without bytes.

    found = rearranged(lambda x: {"gate": x[:4], "up": x[4:]}, (8, 3), torch.bfloat16)
    found["up"].boxes    # (Landing(start=(0, 0), size=(4, 3), step=(1, 1), write=12, stride=(3, 1)),)

The argument is on the meta device, so that what the function makes beside it has no bytes either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.buffers import Computed, NotMovement, Reference, Source, Uninitialised, movement
from sglang_reshard.trace.geometry import MAX_BOXES, BoxMapping, IndexMap, TooFragmented, onto
from sglang_reshard.trace.lazy_tensor import LazyTensor
from sglang_reshard.trace.memory import geometry_of
from sglang_reshard.trace.operators import aten
from sglang_reshard.trace.recorder import Recorder

# What is picked by an index is followed run by run; an index of more runs is computed.
MAX_RUNS = 4096


class Rearranged(NamedTuple):
    """One result of the function.

    shape  of the result, in elements
    boxes  boxes of the result whose elements are the argument's, counted row-major there by `write` and `stride`;
           elements of the result outside of them come from elsewhere
    """

    shape: tuple[int, ...]
    boxes: tuple[BoxMapping, ...]


class Run(NamedTuple):
    """`times` positions from `first`, `step` apart, that an index names from its own position `at` on."""

    at: int
    first: int
    times: int
    step: int


def rearranged(
    function: Callable[[torch.Tensor], Mapping[str, torch.Tensor]], shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Rearranged]:
    """What `function` makes of a tensor of `shape` (elements) and `dtype`, by name.

    Raises Unsupported, naming the result, when the function computes with elements or casts them, or scatters
    them more finely than boxes can say. Its own errors come through.
    """
    follower = _Follower()
    argument = follower.source(TensorSpec("the argument", shape, str(dtype).removeprefix("torch.")))
    with torch.no_grad():
        results = function(argument)
    if follower.failure is not None:
        raise follower.failure
    return {name: Rearranged(tuple(result.shape), _boxes(follower, name, result)) for name, result in results.items()}


def _boxes(follower: _Follower, name: str, result: torch.Tensor) -> tuple[BoxMapping, ...]:
    if type(result) is not LazyTensor or not result.numel():
        return ()
    boxes: list[BoxMapping] = []
    try:
        for origin, walk, casts in movement(follower.now(result), IndexMap.over(geometry_of(result.meta))):
            if not isinstance(origin, Reference):
                continue
            if isinstance(origin.buffer.base, Computed):
                raise NotMovement
            if isinstance(origin.buffer.base, Source):
                if casts or origin.dtype != origin.buffer.dtype:
                    raise Unsupported(f"{name} is not of the dtype {origin.buffer.dtype} that its elements have")
                boxes += onto(walk.turned(), tuple(result.shape), unit_steps=True)
    except (NotMovement, Uninitialised):
        raise Unsupported(f"{name} is computed, not only moved") from None
    except TooFragmented:
        raise Unsupported(f"{name} is scattered over more than {MAX_BOXES} boxes") from None
    return tuple(boxes)


class _Follower(Recorder):
    """Follows elements through picking by an index, too, which a loader's trace leaves to be computed."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Module(), {})
        self.device = torch.device("meta")

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dim, index = _picking(func, args)
        if type(args[0]) is LazyTensor and _is_known_vector(index):
            length = args[0].meta.size(dim)
            given = (index.nonzero().flatten() if index.dtype == torch.bool else index).tolist()
            positions = [p + length if p < 0 else p for p in given]
            runs = list(_runs(positions))
            if len(runs) <= MAX_RUNS and all(0 <= p < length for p in positions):
                return self._picked(args[0], dim, len(positions), runs)
        return super()._dispatch(func, args, kwargs)

    def _picked(self, tensor: LazyTensor, dim: int, count: int, runs: Sequence[Run]) -> LazyTensor:
        shape = list(tensor.meta.shape)
        shape[dim] = count
        out = tensor.meta.new_empty(shape)
        writes: list[tuple[torch.Tensor | None, Any]] = []
        for at, first, times, step in runs:
            taken = aten.slice.Tensor(tensor.meta, dim, first, first + (times - 1) * step + 1, step)
            writes.append((out.narrow(dim, at, times), self.standin(taken, tensor.buffer)))
        return self._moved(out, writes)


def _picking(func: Any, args: tuple[Any, ...]) -> tuple[int, Any]:
    """The dimension in which an operator picks, and the one index that says what."""
    if func is aten.index_select.default:
        return args[1], args[2]
    if func is aten.index.Tensor:
        given = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        if len(given) == 1:
            return given[0]
    return 0, None


def _is_known_vector(index: Any) -> bool:
    return type(index) is torch.Tensor and index.dim() == 1 and index.device.type != "meta"


def _runs(positions: Sequence[int]) -> Iterator[Run]:
    at = 0
    while at < len(positions):
        step = positions[at + 1] - positions[at] if at + 1 < len(positions) else 1
        end = at + 1
        while step > 0 and end < len(positions) and positions[end] - positions[end - 1] == step:
            end += 1
        if end - at == 2 and step != 1:  # the second may begin a longer run
            end -= 1
        yield Run(at, positions[at], end - at, step if end - at > 1 else 1)
        at = end
