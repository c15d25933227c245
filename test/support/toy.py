"""A toy engine rank: every way in which a tensor-parallel loader slices, without SGLang.

embed    vocabulary-parallel, padded to a multiple of the engine's ranks
qkv      three checkpoint tensors fused; k and v heads are replicated where there are fewer than ranks
up       gate and up fused, column-parallel
down     row-parallel
norm     replicated
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

VOCAB, HEADS, KV_HEADS, HEAD_DIM = 21, 16, 2, 3
HIDDEN = 16
DRIFTING = 1_000_000  # versions from here on differ from each other in one element of a hundred or two


def shapes(hidden: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> shape."""
    return {
        "embed.weight": (VOCAB, hidden),
        "q.weight": (HEADS * HEAD_DIM, hidden),
        "k.weight": (KV_HEADS * HEAD_DIM, hidden),
        "v.weight": (KV_HEADS * HEAD_DIM, hidden),
        "gate.weight": (3 * hidden, hidden),
        "up.weight": (3 * hidden, hidden),
        "down.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
    }


def checkpoint(version: int, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> dict[str, torch.Tensor]:
    """Whole tensors of a version of the weights."""
    if version > DRIFTING:
        return _drifted(checkpoint(DRIFTING, dtype, hidden), version)
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(s, generator=generator).to(dtype) for name, s in shapes(hidden).items()}


def _drifted(weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    for tensor in weights.values():
        where = torch.randperm(tensor.numel(), generator=generator)[: max(1, tensor.numel() // 100)]
        tensor.view(-1)[where] = torch.randn(len(where), generator=generator).to(tensor.dtype)
    return weights


class ToyRank(torch.nn.Module):
    """One engine rank's parameters and its loader; `size` divides HEADS and three times `hidden`."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.vocab_rows = -(-VOCAB // size)
        self.heads = HEADS // size
        self.kv_heads = max(1, KV_HEADS // size)
        self.inner = 3 * hidden // size
        live = {
            "embed": (self.vocab_rows, hidden),
            "qkv": ((self.heads + 2 * self.kv_heads) * HEAD_DIM, hidden),
            "gate_up": (2 * self.inner, hidden),
            "down": (hidden, self.inner),
            "norm": (hidden,),
        }
        for name, shape in live.items():
            garbage = torch.full(shape, float("nan"), dtype=dtype)
            self.register_parameter(name, torch.nn.Parameter(garbage, requires_grad=False))

    def load_weights(self, weights: object) -> None:
        for name, loaded in weights:  # type: ignore[attr-defined]
            if name.startswith(("rotary.", "lm_head.")):  # as real loaders skip what they compute, or tie
                continue
            getattr(self, "_load_" + name.removesuffix(".weight"))(loaded)

    def differing(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Returns the names of the parameters that a stock load of these tensors leaves otherwise."""
        stock = ToyRank(self.rank, self.size, self.norm.dtype, len(self.norm))
        stock.load_weights(weights.items())
        return [name for name, right in stock.named_parameters() if not torch.equal(getattr(self, name), right)]

    def _load_embed(self, loaded: torch.Tensor) -> None:
        first = self.rank * self.vocab_rows
        rows = max(0, min(VOCAB - first, self.vocab_rows))
        if rows:
            self.embed.data[:rows].copy_(loaded.narrow(0, first, rows))
        self.embed.data[rows:].fill_(0)

    def _load_q(self, loaded: torch.Tensor) -> None:
        rows = self.heads * HEAD_DIM
        self.qkv.data.narrow(0, 0, rows).copy_(loaded.narrow(0, self.rank * rows, rows))

    def _load_kv(self, loaded: torch.Tensor, slot: int) -> None:
        rows = self.kv_heads * HEAD_DIM
        replicas = max(1, self.size // KV_HEADS)
        first = self.heads * HEAD_DIM + slot * rows
        self.qkv.data.narrow(0, first, rows).copy_(loaded.narrow(0, self.rank // replicas * rows, rows))

    def _load_k(self, loaded: torch.Tensor) -> None:
        self._load_kv(loaded, 0)

    def _load_v(self, loaded: torch.Tensor) -> None:
        self._load_kv(loaded, 1)

    def _load_inner(self, loaded: torch.Tensor, slot: int) -> None:
        part = loaded.narrow(0, self.rank * self.inner, self.inner)
        self.gate_up.data.narrow(0, slot * self.inner, self.inner).copy_(part)

    def _load_gate(self, loaded: torch.Tensor) -> None:
        self._load_inner(loaded, 0)

    def _load_up(self, loaded: torch.Tensor) -> None:
        self._load_inner(loaded, 1)

    def _load_down(self, loaded: torch.Tensor) -> None:
        self.down.data.copy_(loaded.narrow(1, self.rank * self.inner, self.inner))

    def _load_norm(self, loaded: torch.Tensor) -> None:
        self.norm.data.copy_(loaded)
