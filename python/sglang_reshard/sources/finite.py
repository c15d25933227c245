"""Are the weights finite? Asked of a trainer rank's shards, before they are handed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from sglang_reshard.layout.regions import Box, Region, split
from sglang_reshard.layout.shard_map import Shard
from sglang_reshard.layout.source_layout import SourceLayout

CHUNK = 1 << 18  # elements looked at together where a copy of them is needed: 1 MiB of float32


def first_not_finite(layout: SourceLayout, shards: Sequence[torch.Tensor], trainer_rank: int) -> str | None:
    """What to say of the first tensor with a NaN or an infinity among this rank's shards; None if there is none.

    Names the tensor, how many of its elements here are not finite, and the global index of the first.
    Reads every element that the rank holds once, and nothing that a shard has around them, and waits for the
    device once; makes no temporary of more than CHUNK elements (4 bytes each, 8 for float64). Integers and
    booleans are finite by nature.
    """
    own = _Own(layout, trainer_rank)
    extremes: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for i, shard in enumerate(shards):
        if shard.is_floating_point():
            for piece in own.pieces(i):
                for chunk in _chunks(_values(piece, shard)):
                    both = torch.stack(torch.aminmax(chunk))  # a NaN is both, an infinity one of them
                    extremes.setdefault(shard.device, []).append((i, both.to(torch.float64)))
    bad = []
    for of_device in extremes.values():
        finite = torch.stack([both for _, both in of_device]).isfinite().all(dim=1).tolist()
        bad += [i for (i, _), good in zip(of_device, finite, strict=True) if not good]
    if not bad:
        return None
    first = min(bad)
    return _told(layout.tensors[first].name, own.pieces(first), shards[first], trainer_rank)


class _Own:
    """A trainer rank's pieces of tensors. Those of tensors that are alike are looked up once."""

    def __init__(self, layout: SourceLayout, trainer_rank: int) -> None:
        self._layout, self._rank = layout, trainer_rank
        self._known: dict[tuple[object, ...], tuple[Shard, ...]] = {}

    def pieces(self, number: int) -> tuple[Shard, ...]:
        tensor = self._layout.tensors[number]
        key = tensor.shape, tensor.mesh, tensor.placements
        if key not in self._known:
            self._known[key] = self._layout.holdings(tensor).of_rank(self._rank)
        return self._known[key]


def _values(piece: Shard, shard: torch.Tensor) -> torch.Tensor:
    """What a shard has of a piece, which is nearly always all that it has."""
    whole = piece.box.shape == tuple(shard.shape)
    return shard if whole else shard[piece.in_shard(Region.of(piece.box)).slices()]


class _Chunk(NamedTuple):
    box: Box  # of what was cut
    values: torch.Tensor


def _boxes(values: torch.Tensor) -> Iterator[_Chunk]:
    """All values in row-major order, at most CHUNK elements at a time."""
    if values.numel():
        for box in split(Box.whole(tuple(values.shape)), CHUNK):
            yield _Chunk(box, values[box.slices()])


def _chunks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """What `aminmax` can read without a large copy: a contiguous tensor as it is, others bit by bit."""
    if values.element_size() > 1 and values.is_contiguous():
        if values.numel():
            yield values
        return
    for _, part in _boxes(values):
        # Reductions do not know 8-bit floats, and copy what is not contiguous.
        yield part.float() if part.element_size() == 1 else part.contiguous()


def _told(name: str, pieces: Sequence[Shard], shard: torch.Tensor, trainer_rank: int) -> str:
    elements = nans = infinities = 0
    firsts: list[tuple[int, ...]] = []
    for piece in pieces:
        found = False
        for box, chunk in _boxes(_values(piece, shard)):
            values = chunk.float() if chunk.element_size() == 1 else chunk
            nan, infinite = values.isnan(), values.isinf()
            here = int(nan.sum()), int(infinite.sum())
            if any(here) and not found:
                position = int((nan | infinite).flatten().to(torch.uint8).argmax())
                inside = _unravel(position, box)
                firsts.append(tuple(a + i for a, i in zip(piece.box.start, inside, strict=True)))
                found = True
            elements, nans, infinities = elements + box.numel, nans + here[0], infinities + here[1]
    kinds = [f"{n} {kind}" for n, kind in ((nans, "NaN"), (infinities, "infinite")) if n]
    return (
        f"trainer rank {trainer_rank}: {nans + infinities} of the {elements} elements that it holds of "
        f"{name} are not finite ({', '.join(kinds)}), the first at global index {min(firsts)}"
    )


def _unravel(position: int, box: Box) -> tuple[int, ...]:
    """The index of the box's element number `position` in row-major order."""
    index = []
    for start, length in zip(reversed(box.start), reversed(box.shape), strict=True):
        position, remainder = divmod(position, length)
        index.append(start + remainder)
    return tuple(reversed(index))
