"""Traces targets together with the draft layer of their checkpoints, and answers with a line of JSON for each rank.

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
    draft.set_embed_and_head(*target.get_embed_and_head())
    return draft


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
    assert len(list(run_in_forks(write, ARCHITECTURES, processes=2, deadline_seconds=DEADLINE_S))) == len(ARCHITECTURES)
    jobs = [(name, rank, "") for name in ARCHITECTURES for rank in range(TP)] + [(ARCHITECTURES[0], 0, "eh_proj")]

    def work(job: tuple[str, int, str]) -> Finding:
        name, rank, without = job
        return examined(str(root / name), rank, without)

    for job, finding in run_in_forks(work, jobs, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([*job, dataclasses.asdict(finding)]))


if __name__ == "__main__":
    main()
