"""Asks an engine, in this process or by URL."""

from __future__ import annotations

from typing import Any

import torch

from sglang_reshard.selftest.reference import Said

NEW_TOKENS = 12
_PROMPTS, _PROMPT_TOKENS = 4, 9


def prompts(vocabulary: int) -> list[list[int]]:
    """Returns random prompts, the same ones every time."""
    numbers = torch.Generator().manual_seed(1)
    found: list[list[int]] = torch.randint(1, vocabulary, (_PROMPTS, _PROMPT_TOKENS), generator=numbers).tolist()
    return found


def said(engine: Any, asked: list[list[int]]) -> Said:
    """Returns for each prompt the tokens that the engine chooses greedily, with their log-probabilities."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    engine.flush_cache()
    outputs = engine.generate(input_ids=asked, sampling_params=sampling, return_logprob=True)
    return [[(t, p) for p, t, *_ in output["meta_info"]["output_token_logprobs"]] for output in outputs]
