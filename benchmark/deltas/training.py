"""Trains a small Qwen3 on a CPU, so that what changes from step to step is what training changes.

Sequences are of a Markov chain, which there is something to learn of. AdamW with float32 master weights; what engines
have is their bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 4096
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024}
LARGE = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048, "vocab_size": 16384}
_LEARN = 1e-3  # before anything is measured: weights that have been trained, not random ones


class Trainer:
    """A model and its optimizer. `steps_before` are made at a high learning rate first."""

    def __init__(self, sizes: dict[str, int], steps_before: int, batch: int = 4, length: int = 128) -> None:
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM(config(sizes))
        self._batches = _batches(int(self.model.config.vocab_size), batch, length)
        self.begin(_LEARN)
        for _ in range(steps_before):
            self.step()

    def begin(self, learning_rate: float) -> None:
        """Starts a new optimizer."""
        self._optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self) -> float:
        """Returns the loss."""
        tokens = next(self._batches)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def kept(self) -> list[torch.Tensor]:
        """Returns the bits that an engine in bfloat16 has of each parameter."""
        return [p.detach().to(torch.bfloat16).view(torch.int16) for p in self.model.parameters()]


def config(sizes: dict[str, int]) -> Qwen3Config:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    fields: dict[str, Any] = {"vocab_size": VOCABULARY, **heads, **sizes}
    return Qwen3Config(**fields)


def changed_share(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Returns the share of elements that differ."""
    changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return changed / sum(a.numel() for a in before)


def _batches(vocabulary: int, batch: int, length: int) -> Iterator[torch.Tensor]:
    """Yields tokens [batch, length]: each token has four successors, of which one is taken."""
    generator = torch.Generator().manual_seed(1)
    successors = torch.randint(0, vocabulary, (vocabulary, 4), generator=generator)
    while True:
        tokens = [torch.randint(0, vocabulary, (batch,), generator=generator)]
        for _ in range(length - 1):
            tokens.append(successors[tokens[-1], torch.randint(0, 4, (batch,), generator=generator)])
        yield torch.stack(tokens, 1)
