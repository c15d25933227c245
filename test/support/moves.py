"""Functions that only move the elements of a tensor, and torch's own truth of where they go."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st

ELSEWHERE = -1  # in place of elements that are not the tensor's

Function = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    """Each element is its own number: what a function makes of it says where all elements went."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def elsewhere(like: torch.Tensor) -> torch.Tensor:
    """What other ranks' elements are to a probe."""
    return torch.full(like.shape, ELSEWHERE, dtype=like.dtype, device=like.device)


def halves_joined(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """As the gates and up projections of three shards are joined."""
    gates, ups = zip(*(shard.chunk(2) for shard in (elsewhere(x), x, elsewhere(x))), strict=True)
    return {"gate": torch.cat(gates), "up": torch.cat(ups)}


def heads_picked(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """As heads are sorted that come in groups of two queries, a key and a value; x is the second of two shards."""
    heads = torch.cat([elsewhere(x), x]).view(8, 3, 5)
    queries, values = torch.tensor([0, 1, 4, 5]), torch.tensor([3, 7])
    return {"q": heads[queries].reshape(-1, 5), "k": heads[2::4].reshape(-1, 5), "v": heads[values].reshape(-1, 5)}


_MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda x: x.transpose(0, -1).contiguous(),
    "flat": lambda x: x.reshape(-1),
    "rows": lambda x: x.reshape(-1, x.shape[-1]),
    "fold": lambda x: x.reshape(2, -1) if x.numel() % 2 == 0 else x,
    "join": lambda x: torch.cat([elsewhere(x), x]),
    "join last": lambda x: torch.cat([x, elsewhere(x)], dim=-1),
    "halve": lambda x: x.chunk(2)[-1],
    "every other": lambda x: x[::2],
    "pick": lambda x: x[torch.arange(x.shape[0] - 1, -1, -2)],
    "twice": lambda x: x[torch.arange(x.shape[0]).repeat(2)],
}


def chained(moves: list[str]) -> Function:
    def function(x: torch.Tensor) -> dict[str, torch.Tensor]:
        for move in moves:
            x = _MOVES[move](x)
        return {"x": x}

    return function


shapes = st.sampled_from([(4, 3), (6,), (2, 3, 2), (1, 5), (8, 2)])
chains = st.lists(st.sampled_from(sorted(_MOVES)), min_size=1, max_size=5)
