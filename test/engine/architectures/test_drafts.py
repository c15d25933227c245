"""Targets and their drafts, traced together: bit for bit what stock loading of both, or a start on them, leaves.

Drafts of one layer of the target's checkpoint, drafts with checkpoints of their own, drafts of several layers, and
DFLASH drafts, whose worker keeps copies of weights on GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drafts import draft_of, sent_with_draft
from examination import built, examine, specs_of
from rank_jobs import run_jobs
from sglang_reshard.patches.draft_models import Drafts, TargetAndDrafts
from sglang_reshard.selftest.digests import digest, digests
from sglang_reshard.trace.tracer import trace
from support.checkpoints import DRAFT, PUBLISHED, read_weights, write_checkpoint, write_weights
from support.live_memory import fill_with_garbage
from support.sglangs import ENDS, chosen
from tools.oracle.replay import replay

pytestmark = [pytest.mark.engine]
# Two are a layer of the target's checkpoint, the others have one of their own.
DRAFTS = (
    "DeepseekV3ForCausalLMNextN",
    "Glm4MoeForCausalLMNextN",
    "LlamaForCausalLMEagle",
    "LlamaForCausalLMEagle3",
)
# A target that keeps the whole vocabulary on each rank, of which the draft gets a part.
OF_GEMMA = "LlamaForCausalLMEagle3 of Gemma3ForCausalLM"
LAYERED = "MiMoV2FlashForCausalLM"
TP, LAYERS, DFLASH_LAYERS = 2, 3, 2


def noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


# -- drafts of one layer


def examined(root: Path, name: str, rank: int, without: str) -> dict[str, Any]:
    """without  tensors with this in their name are in the checkpoint, and no update sends them"""
    architecture, _, target = name.partition(" of ")
    writer = PUBLISHED[architecture].writer
    assert writer is not None
    folder = root / f"{name}-{rank}-{without}"
    write_checkpoint(writer, folder, architecture=architecture)
    if target:
        of_llama = (folder / DRAFT).rename(root / f"{folder.name}-{DRAFT}")
        shutil.rmtree(folder)
        write_checkpoint(target, folder)
        of_llama.rename(folder / DRAFT)
    return dataclasses.asdict(examine(str(folder), gpu=False, draft=True, unsent=without, tp_size=TP, tp_rank=rank))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    jobs = [(name, rank, "") for name in (*DRAFTS, OF_GEMMA) for rank in range(TP)] + [(DRAFTS[0], 0, "eh_proj")]
    return run_jobs(examined, jobs, tmp_path_factory.mktemp("draft layers"), gpu=False)


def test_target_and_draft_are_what_stock_loading_leaves(found: list[list[Any]]) -> None:
    outcomes = {(name, rank): finding for name, rank, without, finding in found if not without}
    assert len(outcomes) == 10
    assert {key: of["outcome"] for key, of in outcomes.items()} == dict.fromkeys(outcomes, "passed"), outcomes
    eagles = {key: of for key, of in outcomes.items() if "Eagle" in key[0]}
    assert len(eagles) == 6
    assert all(of["copies"] > (30 if key in eagles else 100) for key, of in outcomes.items())


def test_a_draft_that_some_tensors_are_missing_for_is_refused(found: list[list[Any]]) -> None:
    (refused,) = [finding for *_, without, finding in found if without == "eh_proj"]
    assert refused["outcome"] == "refused"
    assert "draft_models.0.model.eh_proj.weight" in refused["why"]


# -- drafts of several layers


def write_layered(root: Path) -> None:
    """A checkpoint of the target whose further layers are those of the draft, under the published names."""
    writer = PUBLISHED[LAYERED].writer
    assert writer is not None
    write_checkpoint(writer, root / "model", architecture=LAYERED)
    weights, generator = read_weights(root / "model"), torch.Generator().manual_seed(1)
    width = len(weights["model.norm.weight"])
    for layer in range(LAYERS):
        own = f"model.mtp.layers.{layer}."
        for name, tensor in list(weights.items()):
            if name.startswith("model.layers.0."):
                weights[own + name.removeprefix("model.layers.0.")] = noise(generator, *tensor.shape)
        heads = weights["model.layers.1.self_attn.attention_sink_bias"].shape
        weights[f"{own}self_attn.attention_sink_bias"] = noise(generator, *heads)
        weights[f"{own}eh_proj.weight"] = noise(generator, width, 2 * width)
        for norm in ("enorm", "hnorm", "final_layernorm"):
            weights[f"{own}{norm}.weight"] = noise(generator, width)
    write_weights(weights, root / "model")


def layered(root: Path, rank: int) -> dict[str, Any]:
    """Digests of each draft's live tensors after an update and after a start on the checkpoint."""
    folder = str(root / "model")
    target = built(folder, False, {"tp_size": TP, "tp_rank": rank})
    drafts = [draft_of(target, folder, layer) for layer in range(LAYERS)]
    both, weights = TargetAndDrafts(target, Drafts(drafts, layers=range(LAYERS))), read_weights(folder)
    fill_with_garbage(both)
    program = trace(both, specs_of(weights))
    replay(program, weights)
    return {
        "updated": [digests(draft) for draft in drafts],
        "fresh": [digests(draft_of(target, folder, layer, "auto")) for layer in range(LAYERS)],
        "unread": sorted(weights.keys() - {copy.source for copy in program.copies}),
    }


@pytest.mark.parametrize("sglang", ENDS)
def test_each_layer_s_model_is_what_a_start_leaves(sglang: str, tmp_path: Path) -> None:
    """SGLang's loaders of files pick the tensors of one layer, and hand them on as the first layer's."""
    with chosen(sglang):
        ranks = run_jobs(layered, [(rank,) for rank in range(TP)], tmp_path, before=write_layered, gpu=False)
    for _, seen in ranks:
        assert seen["updated"] == seen["fresh"]
        assert len({json.dumps(layer) for layer in seen["updated"]}) == LAYERS
        assert seen["unread"] == []


# -- DFLASH drafts


def write_dflash(root: Path) -> None:
    """A checkpoint of a target, and one of a draft with layers of the same shapes."""
    folder = root / "model"
    write_checkpoint("Qwen3ForCausalLM", folder)
    weights, generator = read_weights(folder), torch.Generator().manual_seed(1)
    width = len(weights["model.norm.weight"])
    own = {
        name.removeprefix("model."): noise(generator, *tensor.shape)
        for name, tensor in weights.items()
        if any(name.startswith(f"model.layers.{layer}.") for layer in range(DFLASH_LAYERS))
    }
    own["fc.weight"] = noise(generator, width, DFLASH_LAYERS * width)
    own |= {name: noise(generator, width) for name in ("hidden_norm.weight", "norm.weight")}
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": DFLASH_LAYERS,
        "layer_types": config["layer_types"][:DFLASH_LAYERS],
        "dflash_config": {"target_layer_ids": list(range(DFLASH_LAYERS)), "mask_token_id": 1},
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


def dflash(root: Path, rank: int) -> dict[str, Any]:
    """Digests of the draft and of the worker's tensors, after an update and after a start on the checkpoint."""
    folder = str(root / "model")
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
        "updated": digests(draft),
        "fresh": digests(fresh),
        "kept": {name: digest(tensor) for name, tensor in tensors_of(kept).items()},
        "kept_fresh": {name: digest(tensor) for name, tensor in tensors_of(fused(fresh)).items()},
        "moved": [name for name, tensor in tensors_of(kept).items() if tensor.data_ptr() != places[name]],
        "unread": sorted(weights.keys() - {copy.source for copy in program.copies}),
    }


@pytest.mark.parametrize("sglang", ENDS)
def test_a_dflash_draft_and_what_its_worker_keeps_are_what_a_start_leaves(sglang: str, tmp_path: Path) -> None:
    """On GPUs the worker copies the weights of keys and values of all layers to one tensor, outside of the model."""
    with chosen(sglang):
        ranks = run_jobs(dflash, [(rank,) for rank in range(TP)], tmp_path, before=write_dflash, gpu=False)
    for _, seen in ranks:
        assert seen["updated"] == seen["fresh"]
        assert seen["kept"] == seen["kept_fresh"]
        assert seen["kept"]
        assert (seen["unread"], seen["moved"]) == ([], [])
