"""Are the weights finite? Asked of a trainer rank's shards, before they are handed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from sglang_reshard.layout import Box, split
from sglang_reshard.sources.placements import Layout, SourceTensor

CHUNK = 1 << 18  # elements looked at together where a copy of them is needed: 1 MiB of float32


def first_not_finite(layout: Layout, shards: Sequence[torch.Tensor], trainer_rank: int) -> str | None:
    """What to say of the first tensor with a NaN or an infinity among this rank's shards; None if there is none.

    Names the tensor, how many of its elements here are not finite, and the global index of the first.
    Reads every element once and waits for the device once; makes no temporary of more than CHUNK
    elements (4 bytes each, 8 for float64). Integers and booleans are finite by nature.
    """
    extremes: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for i, shard in enumerate(shards):
        if shard.is_floating_point():
            for chunk in _chunks(shard):
                both = torch.stack(torch.aminmax(chunk))  # a NaN is both, an infinity one of them
                extremes.setdefault(shard.device, []).append((i, both.to(torch.float64)))
    bad = []
    for of_device in extremes.values():
        finite = torch.stack([both for _, both in of_device]).isfinite().all(dim=1).tolist()
        bad += [i for (i, _), good in zip(of_device, finite, strict=True) if not good]
    if not bad:
        return None
    first = min(bad)
    return _told(layout, layout.tensors[first], shards[first], trainer_rank)


class _Chunk(NamedTuple):
    box: Box  # of the local tensor
    values: torch.Tensor


def _boxes(shard: torch.Tensor) -> Iterator[_Chunk]:
    """The shard in row-major order, at most CHUNK elements at a time."""
    if shard.numel():
        for box in split(Box.whole(tuple(shard.shape)), CHUNK):
            yield _Chunk(box, shard[box.slices()])


def _chunks(shard: torch.Tensor) -> Iterator[torch.Tensor]:
    """What `aminmax` can read without a large copy: a contiguous tensor as it is, others bit by bit."""
    if shard.element_size() > 1 and shard.is_contiguous():
        if shard.numel():
            yield shard
        return
    for _, values in _boxes(shard):
        # Reductions do not know 8-bit floats, and copy what is not contiguous.
        yield values.float() if values.element_size() == 1 else values.contiguous()


def _told(layout: Layout, tensor: SourceTensor, shard: torch.Tensor, trainer_rank: int) -> str:
    nans = infinities = 0
    first: tuple[int, ...] | None = None
    for box, values in _boxes(shard):
        values = values.float() if values.element_size() == 1 else values
        nan, infinite = values.isnan(), values.isinf()
        nans += int(nan.sum())
        infinities += int(infinite.sum())
        if first is None and (nans or infinities):
            position = int((nan | infinite).flatten().to(torch.uint8).argmax())
            first = _global_index(layout, tensor, _unravel(position, box), trainer_rank)
    kinds = [f"{n} {kind}" for n, kind in ((nans, "NaN"), (infinities, "infinite")) if n]
    return (
        f"trainer rank {trainer_rank}: {nans + infinities} of the {shard.numel()} elements that it holds of "
        f"{tensor.name} are not finite ({', '.join(kinds)}), the first at global index {first}"
    )


def _unravel(position: int, box: Box) -> tuple[int, ...]:
    """The index of the box's element number `position` in row-major order."""
    index = []
    for start, length in zip(reversed(box.start), reversed(box.shape), strict=True):
        position, remainder = divmod(position, length)
        index.append(start + remainder)
    return tuple(reversed(index))


def _global_index(
    layout: Layout, tensor: SourceTensor, local: tuple[int, ...], trainer_rank: int
) -> tuple[int, ...] | None:
    """Where a local element is in the whole tensor."""
    for piece in layout.holdings(tensor).pieces:
        offset = [i - a for i, a in zip(local, piece.at, strict=True)]
        if trainer_rank in piece.ranks and all(0 <= o < n for o, n in zip(offset, piece.box.shape, strict=True)):
            return tuple(s + o for s, o in zip(piece.box.start, offset, strict=True))
    return None
