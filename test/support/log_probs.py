"""Log-probabilities of prompts' tokens but the first: those that an engine says, and those of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def served_log_probs(engine: Any, prompts: Sequence[list[int]], adapter: str | None) -> list[list[float]]:
    """Those of a SGLang engine that serves `adapter`; None is the base model."""
    outputs = engine.generate(
        input_ids=list(prompts),
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        lora_path=[adapter] * len(prompts),
    )
    return [[row[0] for row in output["meta_info"]["input_token_logprobs"][1:]] for output in outputs]


def log_probs(logits: torch.Tensor, prompt: Sequence[int]) -> list[float]:
    """Those of a prompt, from a model's logits [tokens, vocabulary]."""
    scores = logits[:-1].float().log_softmax(-1)
    return scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
