"""Traces a target with a draft of several layers on SGLang's CPU code paths: a line of JSON for each rank.

Run as a script by test_multi_layer_drafts.py: SGLang chooses its code paths at import.

    multi_layer_drafts.py FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafts import draft_of
from examination import answer_for_ranks, built, said, specs_of
from sglang_reshard.errors import ReshardError
from sglang_reshard.patches.draft_models import Drafts, TargetAndDrafts
from sglang_reshard.trace.tracer import trace
from support.checkpoints import PUBLISHED, read_weights, write_checkpoint, write_weights
from support.live_memory import fill_with_garbage
from tools.oracle.digests import digests
from tools.oracle.replay import replay

TARGET = "MiMoV2FlashForCausalLM"
TP, LAYERS = 2, 3


def write(folder: Path) -> None:
    """A checkpoint of the target whose further layers are those of the draft, under the published names."""
    writer = PUBLISHED[TARGET].writer
    assert writer is not None
    write_checkpoint(writer, folder, architecture=TARGET)
    weights = read_weights(folder)
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    width = len(weights["model.norm.weight"])
    for layer in range(LAYERS):
        own = f"model.mtp.layers.{layer}."
        for name, tensor in list(weights.items()):
            if name.startswith("model.layers.0."):
                weights[own + name.removeprefix("model.layers.0.")] = noise(*tensor.shape)
        heads = weights["model.layers.1.self_attn.attention_sink_bias"].shape
        weights[f"{own}self_attn.attention_sink_bias"] = noise(*heads)
        weights[f"{own}eh_proj.weight"] = noise(width, 2 * width)
        for norm in ("enorm", "hnorm", "final_layernorm"):
            weights[f"{own}{norm}.weight"] = noise(width)
    write_weights(weights, folder)


def found(folder: str, rank: int) -> dict[str, Any]:
    """Digests of each draft's live tensors after an update and after a start on the checkpoint; why it is refused."""
    target = built(folder, False, {"tp_size": TP, "tp_rank": rank})
    drafts = [draft_of(target, folder, layer) for layer in range(LAYERS)]
    both = TargetAndDrafts(target, Drafts(drafts, layers=range(LAYERS)))
    weights = read_weights(Path(folder))
    fill_with_garbage(both)
    try:
        program = trace(both, specs_of(weights))
    except ReshardError as error:
        return {"refusal": said(error, folder), "rank": rank}
    replay(program, weights)
    updated = [digests(draft) for draft in drafts]
    fresh = [digests(draft_of(target, folder, layer, "auto")) for layer in range(LAYERS)]
    unread = sorted(weights.keys() - {copy.source for copy in program.copies})
    return {"refusal": "", "rank": rank, "updated": updated, "fresh": fresh, "unread": unread}


if __name__ == "__main__":
    answer_for_ranks(TP, write, found)
