"""The model that routes move: many small tensors, and layers that an engine repacks, if they are asked for."""

from __future__ import annotations

from typing import Any

import torch

from support.toy import DRIFTING, ToyRank, checkpoint
from support.toy_repacking import Repacking, live_tensors, started
from support.toy_repacking import weights as packed_weights

BLOCKS, HIDDEN = 6, 48
LAYERS, ROWS = 24, 48  # of what is repacked: 18 KB


class Blocks(torch.nn.Module):
    """Several toy engine ranks in one."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype, blocks: int, repacks: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(ToyRank(rank, size, dtype, HIDDEN) for _ in range(blocks))
        self.packed = None
        if repacks:
            self.packed = started(Repacking(LAYERS, ROWS, rank, size), packed_weights(0, LAYERS, ROWS))

    def load_weights(self, weights: Any) -> None:
        packed = []
        for name, tensor in weights:
            block, _, rest = name.partition(".")
            if block == "packed":
                packed.append((rest, tensor))
            else:
                self.blocks[int(block)].load_weights([(rest, tensor)])
        if self.packed is not None:
            self.packed.load_weights(packed)

    def live(self) -> dict[str, torch.Tensor]:
        """All that requests are served from, in bytes."""
        found = dict(self.blocks.named_parameters())
        if self.packed is not None:
            found |= {f"packed.{name}": tensor for name, tensor in live_tensors(self.packed).items()}
        return {name: tensor.detach().contiguous().view(-1).view(torch.uint8) for name, tensor in found.items()}


def weights_of(version: int, dtype: torch.dtype, blocks: int, repacks: bool = False) -> dict[str, torch.Tensor]:
    """Few elements of the blocks differ from version to version, so that deltas pay."""
    found = {}
    for block in range(blocks):
        found |= {f"{block}.{n}": t for n, t in checkpoint(DRIFTING + 1000 * block + version, dtype, HIDDEN).items()}
    if repacks:
        found |= {f"packed.{n}": t for n, t in packed_weights(version, LAYERS, ROWS).items()}
    return found


def fresh(
    rank: int, size: int, dtype: torch.dtype, live: torch.dtype, version: int, blocks: int, repacks: bool
) -> dict[str, torch.Tensor]:
    """What an engine has that was started on a version."""
    model = Blocks(rank, size, live, blocks)
    weights = weights_of(version, dtype, blocks)
    model.load_weights(weights.items())
    if repacks:
        model.packed = started(Repacking(LAYERS, ROWS, rank, size), packed_weights(version, LAYERS, ROWS))
    return model.live()


def packed_bytes(size: int) -> int:
    """Bytes of what a rank of `size` converts, as it arrives."""
    return sum(t.nbytes // (size if t.dim() > 1 else 1) for t in packed_weights(0, LAYERS, ROWS).values())
