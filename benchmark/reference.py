"""What transformers says, given the trainer's checkpoint: the tokens the engine has to say too."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def greedy_tokens(
    checkpoint: Path, prompts: list[list[int]], new_tokens: int, dtype: str
) -> tuple[list[list[int]], float]:
    """Tokens after each prompt, and the smallest lead that a chosen token's logit had over the next best.

    The lead tells how safe the comparison is: sixteen ranks add floats in another order than one, and
    where the lead is within that rounding, either token is right.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    lead = float("inf")
    said = []
    for prompt in prompts:  # one at a time, so that no padding is needed
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        said.append(out.sequences[0, len(prompt) :].tolist())
        for logits in out.logits:
            best, second = logits[0].float().topk(2).values.tolist()
            lead = min(lead, best - second)
    return said, lead
