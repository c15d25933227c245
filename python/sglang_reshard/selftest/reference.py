"""Compares an engine with transformers, given the trainer's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

Said = list[list[tuple[int, float]]]  # for each prompt, the chosen tokens and their log-probabilities

# What float32 on several ranks may differ from one rank's by, and what bfloat16 may from float32; and the least share
# of tokens that both choose.
_MOST_APART = {"float32": (1e-3, 1.0), "bfloat16": (0.5, 0.75)}


class Distance(NamedTuple):
    """Of an engine from transformers.

    largest  difference of a log-probability
    same     number of tokens that transformers would choose, too
    tokens   number of all
    """

    largest: float
    same: int
    tokens: int

    def wrong(self, dtype: str) -> str:
        """Returns what is wrong, for an engine of this dtype; "" if nothing is."""
        most, share = _MOST_APART[dtype]
        if not self.tokens:
            return "the engine said nothing"
        if not self.largest < most:
            return f"a log-probability differs by {self.largest:.3g}, more than {most}"
        if self.same < share * self.tokens:
            return f"transformers chooses {self.same} of {self.tokens} tokens, less than {share:.0%}"
        return ""


def distance(checkpoint: Path, prompts: list[list[int]], said: Said, device: torch.device) -> Distance:
    """Compares an engine's tokens with those of transformers in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.to(device).eval()
    largest, same = 0.0, 0
    for prompt, of in zip(prompts, said, strict=bool(said)):
        tokens = torch.tensor([prompt + [token for token, _ in of]], device=device)
        with torch.no_grad():
            rows = model(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        same += sum(int(row.argmax()) == token for row, (token, _) in zip(rows, of, strict=True))
        largest = max(largest, *(abs(float(row[token]) - p) for row, (token, p) in zip(rows, of, strict=True)))
    return Distance(largest, same, sum(map(len, said)))
