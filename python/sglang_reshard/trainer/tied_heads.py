"""Compares a head that a trainer lists apart from its embedding with it, as an engine that ties them reads only one.

FSDP1's sharded state dict, for example, has `lm_head.weight` and `model.embed_tokens.weight` of a tied model in
separate memory. Each trainer rank compares its own shards bit by bit, in every update: up to the first difference, so
that it costs an untied model nothing, and a tied one a read of both.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_reshard.layout.regions import Box, split
from sglang_reshard.layout.source_layout import SourceTensor
from sglang_reshard.sources import TrainerState, tied_names

_CHUNK = 1 << 24  # elements that are compared at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: NaNs are equal in bits


class _View(NamedTuple):
    """A part of the memory of the input of this number; offset in elements."""

    number: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        flat = torch.empty(0, dtype=self.dtype, device=inputs[self.number].device)
        return flat.set_(inputs[self.number].untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor with the shape of an embedding, `of`, and this rank's shards of both; `refusal`: why there are none."""

    name: str
    of: str
    views: tuple[tuple[_View, _View], ...] = ()
    refusal: str = ""


Head = tuple[SourceTensor, SourceTensor, int, int]  # a tensor, the embedding whose shape it has, and their numbers


@dataclass(frozen=True, slots=True)
class TiedHeads:
    """The heads that one trainer rank compares with their embeddings. Refers to no memory.

    inputs  numbers of the inputs (`TrainerState.inputs`) that `compare` reads
    """

    pairs: tuple[_Pair, ...]
    inputs: tuple[int, ...]

    @classmethod
    def of(cls, state: TrainerState, trainer_rank: int, found: Sequence[Head]) -> TiedHeads:
        """Returns those of the state's heads that are not their embedding's memory. `found`: see `publisher.heads`."""
        tied = tied_names(state.layout, state.shards)
        pairs = tuple(_pair(state, trainer_rank, head) for head in found if head[0].name not in tied)
        used = sorted({view.number for pair in pairs for both in pair.views for view in both})
        return cls(pairs, tuple(used))

    def compare(self, inputs: Mapping[int, torch.Tensor]) -> dict[str, str]:
        """Returns name -> why it is not its embedding; empty if this rank's shards are bit for bit the same.

        inputs  number -> local tensor as it is now, of those in `self.inputs`
        """
        with torch.no_grad():
            return {
                pair.name: pair.refusal or ("" if _equal(pair, inputs) else f"differs from {pair.of}")
                for pair in self.pairs
            }


def judged(of_ranks: Sequence[Mapping[str, str]]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns what all trainer ranks together found.

    Returns fnmatch patterns of the names that are their embeddings bit for bit, and name -> why another one is not.
    """
    apart: dict[str, str] = {}
    for rank, found in enumerate(of_ranks):
        for name, why in found.items():
            if why:
                apart.setdefault(name, f"trainer rank {rank}: {name} {why}")
    names = dict.fromkeys(name for found in of_ranks for name in found)
    return tuple(glob.escape(name) for name in names if name not in apart), apart


def _pair(state: TrainerState, rank: int, head: Head) -> _Pair:
    tensor, of, number, of_number = head
    shards = state.shards[number], state.shards[of_number]
    maps = state.layout.shard_map(tensor), state.layout.shard_map(of)
    one, other = ({(shard.box, shard.ranks) for shard in held.shards} for held in maps)
    what = ""
    if tensor.dtype != of.dtype:
        what = f"is {tensor.dtype}, but {of.name} is {of.dtype}"
    elif one != other:
        what = f"is sharded differently from {of.name}"
    elif shards[0].device != shards[1].device:
        what = f"is on {shards[0].device}, but {of.name} is on {shards[1].device}"
    if what:
        return _Pair(tensor.name, of.name, refusal=f"{what}, so the two cannot be compared")
    ours, theirs = (
        {box: region.view(local) for box, region in held.held_by(rank)}
        for held, local in zip(maps, shards, strict=True)
    )
    views = tuple((_located(state, view), _located(state, theirs[box])) for box, view in ours.items())
    return _Pair(tensor.name, of.name, views)


def _located(state: TrainerState, view: torch.Tensor) -> _View:
    storage = view.untyped_storage()._cdata
    number = next(
        n for n, given in enumerate(state.inputs) if given is not None and given.untyped_storage()._cdata == storage
    )
    return _View(number, view.dtype, tuple(view.shape), view.stride(), int(view.storage_offset()))


def _equal(pair: _Pair, inputs: Mapping[int, torch.Tensor]) -> bool:
    return all(
        torch.equal(a, b)
        for one, other in pair.views
        for a, b in _chunks(_bits(one.of(inputs)), _bits(other.of(inputs)))
    )


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_INTEGERS[values.element_size()])


def _chunks(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the same elements of two tensors of one shape: first a row, to see a difference early."""
    yield one[:1], other[:1]
    for box in split(Box.whole(tuple(one.shape)), _CHUNK):
        yield one[box.slices()], other[box.slices()]
