"""Traces targets together with drafts, and answers with a line of JSON for each rank.

A draft is a layer of the target's checkpoint, or EAGLE's, with a checkpoint of its own.

Run as a script by test_draft_layers.py: SGLang chooses its code paths at import.

    draft_layers.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from examination import Finding, _examined, built, said
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from support.checkpoints import read_weights, write_checkpoint
from support.scripts import answer

# Their draft layer follows the last one, under its number, and has these tensors beside a layer's.
ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
EAGLE, EAGLE3 = EAGLES = ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3")
EAGLE_TARGET = "LlamaForCausalLM"
HOT_TOKENS = 64  # of EAGLE-3's head
TP, DEADLINE_S = 2, 400


def with_draft_layer(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The checkpoint with a copy of the last layer, of other values, and what joins it to the target."""
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    embedding, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    layer = {own + name.removeprefix(last): t * 2 for name, t in weights.items() if name.startswith(last)}
    joining = {
        "embed_tokens.weight": embedding,
        "shared_head.head.weight": weights["lm_head.weight"],
        "shared_head.norm.weight": norm * 3,
        "enorm.weight": norm * 5,
        "hnorm.weight": norm * 7,
        "eh_proj.weight": torch.cat([embedding[: len(norm)], embedding[: len(norm)] * 3], dim=1),
    }
    return weights | layer | {own + name: t.clone() for name, t in joining.items()}


def draft_of(target: Any, folder: str) -> torch.nn.Module:
    """As SGLang's draft worker builds it, in a process that holds `target`."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.server_args import get_global_server_args

    config = ModelConfig.from_server_args(get_global_server_args(), model_path=folder, is_draft_model=True)
    load = LoadConfig(load_format="dummy")
    draft: Any = get_model(model_config=config, load_config=load, device_config=DeviceConfig("cpu", 0))
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # for a GPU, of which the next line frees memory
    embedding, head = target.get_embed_and_head()
    if isinstance(getattr(draft, "hot_token_id", 0), int) or draft.load_lm_head_from_target:
        draft.set_embed_and_head(embedding, head)
    else:
        draft.set_embed(embedding)
    return draft


def eagle_checkpoint(name: str, config: dict[str, Any], layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A draft's tensors, without its embedding, which SGLang replaces by the target's. layer: one of the target's"""
    generator = torch.Generator().manual_seed(5)
    hidden = config["hidden_size"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    found = {name: random(*tensor.shape) for name, tensor in layer.items()}
    if name == EAGLE:
        found.pop("input_layernorm.weight")  # its only layer has none
        own = {"fc.weight": random(hidden, 2 * hidden), "fc.bias": random(hidden)}
        return {f"layers.0.{name}": t for name, t in found.items()} | own
    for projection in ("q", "k", "v"):  # of embedding and hidden state
        rows, columns = found[f"self_attn.{projection}_proj.weight"].shape
        found[f"self_attn.{projection}_proj.weight"] = random(rows, 2 * columns)
    found["hidden_norm.weight"] = random(hidden)
    differences = torch.arange(HOT_TOKENS) * 2  # of numbers of the target's tokens to those of the draft's
    own = {"fc.weight": random(hidden, 3 * hidden), "norm.weight": random(hidden), "d2t": differences}
    own["lm_head.weight"] = random(HOT_TOKENS, hidden)
    return {f"midlayer.{name}": t for name, t in found.items()} | own


def examined_eagle(root: Path, name: str, rank: int) -> Finding:
    from sglang_reshard.patches.draft_models import OWN, TargetAndDrafts

    folder, draft_folder = root / EAGLE_TARGET, root / name
    try:
        target = built(str(folder), False, {"tp_size": TP, "tp_rank": rank})
        config = json.loads((folder / "config.json").read_text())
        weights = read_weights(folder)
        model = TargetAndDrafts(target, [draft_of(target, str(draft_folder))])
        first = "model.layers.0."
        layer = {n.removeprefix(first): t for n, t in weights.items() if n.startswith(first)}
        own = eagle_checkpoint(name, config, layer)
        sent = weights | {OWN + n: t for n, t in own.items()}
        model.load_weights(sent.items())  # as the engine has started
    except (Exception, SystemExit) as error:
        return Finding("cannot", said(error, str(root)))
    try:
        return _examined(model, sent, config, str(folder))
    except Exception as error:
        return Finding("failed", said(error, str(root)))


def examined(folder: str, rank: int, without: str = "") -> Finding:
    """without  what the names of tensors that are not sent contain"""
    from sglang_reshard.patches.draft_models import TargetAndDrafts

    try:
        target = built(folder, False, {"tp_size": TP, "tp_rank": rank})
        config = json.loads((Path(folder) / "config.json").read_text())
        weights = with_draft_layer(read_weights(folder), config["num_hidden_layers"])
        model = TargetAndDrafts(target, [draft_of(target, folder)])
    except (Exception, SystemExit) as error:
        return Finding("cannot", said(error, folder))
    sent = {name: t for name, t in weights.items() if not without or without not in name}
    try:
        return _examined(model, sent, config, folder)
    except Exception as error:
        return Finding("failed", said(error, folder))


def main() -> None:
    root = Path(sys.argv[1])
    choose_code_paths(TP, gpu=False)
    import_before_forks()

    def write(name: str) -> None:
        write_checkpoint(name, root / name)
        path = root / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))

    # In forks, like the rest: torch's threads, once started here, would be missing there.
    targets = (*ARCHITECTURES, EAGLE_TARGET)
    assert len(list(run_in_forks(write, targets, processes=2, deadline_seconds=DEADLINE_S))) == len(targets)
    target = json.loads((root / EAGLE_TARGET / "config.json").read_text())
    for name in EAGLES:
        (root / name).mkdir()
        own = {"architectures": [name], "num_hidden_layers": 1}
        if name == EAGLE3:
            own["draft_vocab_size"] = HOT_TOKENS
        (root / name / "config.json").write_text(json.dumps(target | own))
    jobs = [(name, rank, "") for name in (*ARCHITECTURES, *EAGLES) for rank in range(TP)]
    jobs.append((ARCHITECTURES[0], 0, "eh_proj"))

    def work(job: tuple[str, int, str]) -> Finding:
        name, rank, without = job
        if name in EAGLES:
            return examined_eagle(root, name, rank)
        return examined(str(root / name), rank, without)

    for job, finding in run_in_forks(work, jobs, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([*job, dataclasses.asdict(finding)]))


if __name__ == "__main__":
    main()
