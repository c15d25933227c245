"""Traces a target with a DFLASH draft on SGLang's CPU code paths, and renews what its worker keeps on GPUs.

Run as a script by test_multi_layer_drafts.py: SGLang chooses its code paths at import.

    dflash_drafts.py FOLDER
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from drafts import draft_of, sent_with_draft
from examination import answer_for_ranks, built, specs_of
from sglang_reshard.patches.draft_models import Drafts, TargetAndDrafts
from sglang_reshard.trace.tracer import trace
from support.checkpoints import DRAFT, read_weights, write_checkpoint, write_weights
from support.live_memory import fill_with_garbage
from tools.oracle.digests import digest, digests
from tools.oracle.replay import replay

TP, LAYERS = 2, 2


def write(folder: Path) -> None:
    """A checkpoint of a target, and one of a draft with layers of the same shapes."""
    write_checkpoint("Qwen3ForCausalLM", folder)
    weights, generator = read_weights(folder), torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    width = len(weights["model.norm.weight"])
    own = {
        name.removeprefix("model."): noise(*tensor.shape)
        for name, tensor in weights.items()
        if any(name.startswith(f"model.layers.{layer}.") for layer in range(LAYERS))
    }
    own |= {"fc.weight": noise(width, LAYERS * width), "hidden_norm.weight": noise(width), "norm.weight": noise(width)}
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": LAYERS,
        "layer_types": config["layer_types"][:LAYERS],
        "dflash_config": {"target_layer_ids": list(range(LAYERS)), "mask_token_id": 1},
        "block_size": 4,
    }
    (folder / DRAFT).mkdir()
    (folder / DRAFT / "config.json").write_text(json.dumps(config))
    write_weights(own, folder / DRAFT)


def fused(draft: Any) -> Any:
    """As the draft worker makes it on a GPU."""
    try:
        from sglang.srt.speculative.triton_ops.fused_kv_materialize import FusedKVMaterializeHelper
    except ImportError:
        from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper
    attention = draft.layers[0].self_attn
    return FusedKVMaterializeHelper(
        layers=draft.layers,
        rotary_emb=attention.rotary_emb,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        device=torch.device("cpu"),
    )


def tensors_of(kept: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(kept).items() if isinstance(value, torch.Tensor)}


def found(folder: str, rank: int) -> dict[str, Any]:
    """Digests of the draft and of the worker's tensors, after an update and after a start on the checkpoint."""
    target, own = built(folder, False, {"tp_size": TP, "tp_rank": rank}), str(Path(folder) / DRAFT)
    draft = draft_of(target, own)
    kept = fused(draft)
    places = {name: tensor.data_ptr() for name, tensor in tensors_of(kept).items()}
    weights = sent_with_draft(folder)
    both = TargetAndDrafts(target, Drafts([draft], fused=kept))
    fill_with_garbage(both)
    program = trace(both, specs_of(weights))
    replay(program, weights)
    fresh = draft_of(target, own, load_format="auto")
    return {
        "rank": rank,
        "updated": digests(draft),
        "fresh": digests(fresh),
        "kept": {name: digest(tensor) for name, tensor in tensors_of(kept).items()},
        "kept_fresh": {name: digest(tensor) for name, tensor in tensors_of(fused(fresh)).items()},
        "moved": [name for name, tensor in tensors_of(kept).items() if tensor.data_ptr() != places[name]],
        "unread": sorted(weights.keys() - {copy.source for copy in program.copies}),
    }


if __name__ == "__main__":
    answer_for_ranks(TP, write, found)
