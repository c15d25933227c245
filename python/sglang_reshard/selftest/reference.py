"""What transformers says, given the trainer's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

Said = list[list[tuple[int, float]]]  # for each prompt, the chosen tokens and their log-probabilities


class Distance(NamedTuple):
    """largest: difference of a log-probability. agreed: number of tokens that transformers would choose, too."""

    largest: float
    agreed: int


def distance(checkpoint: Path, prompts: list[list[int]], said: Said, device: torch.device) -> Distance:
    """Compares an engine's tokens with those of transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device).eval()
    differences, agreed = [float("inf")][:0], 0
    for prompt, of in zip(prompts, said, strict=True):
        tokens = torch.tensor([prompt + [token for token, _ in of]], device=device)
        with torch.no_grad():
            rows = model(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        agreed += sum(int(row.argmax()) == token for row, (token, _) in zip(rows, of, strict=True))
        differences += [abs(float(row[token]) - p) for row, (token, p) in zip(rows, of, strict=True)]
    return Distance(max(differences, default=float("inf")), agreed)
