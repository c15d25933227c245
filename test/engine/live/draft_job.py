"""What the trainer of test_draft_models.py does: updates a target with its draft model, or without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmark.demo import tiny_model
from benchmark.demo.trainer import Trainer
from sglang_reshard import WeightSender
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.testing import cpu_host
from support.refusals import refusal_of
from tools.oracle.digests import digests

LOADER = "draft_job.write_each"
SPECULATIVE = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
    "attention_backend": "triton",  # the only one for drafts that can start without a GPU, interpreted
}


def write_each(model: torch.nn.Module, named_tensors: Any) -> None:
    """A custom weight loader, which SGLang calls with the draft model, then with the target."""
    ((_, folder),) = list(named_tensors)
    path = Path(bytes(folder.tolist()).decode())
    (path / f"{len(list(path.iterdir()))}.json").write_text(json.dumps(digests(model)))


def live_digests(engine: Any, folder: Path) -> list[dict[str, str]]:
    """The digests of the draft's tensors, and of the target's. They are written to `folder`, which is made."""
    folder.mkdir()
    message = torch.tensor(list(str(folder.resolve()).encode()), dtype=torch.uint8)
    ok, why = engine.update_weights_from_tensor([("folder", message)], load_format=LOADER, flush_cache=False)
    assert ok, why
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(2)]


def updates(job: dict[str, Any]) -> dict[str, Any]:
    """The live digests, [draft, target], after each of four updates; the trainer's are saved as checkpoints."""
    folder = Path(job["folder"])
    model = folder / "model"
    tiny_model.save(model, 1, 1)
    cpu_host.activate(1)  # before SGLang's first import
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import end

    with without_torchrun_variables():
        engine = Engine(
            model_path=str(model),
            load_format="dummy",
            dtype="float32",
            custom_weight_loader=[LOADER],
            **cpu_host.engine_arguments(**SPECULATIVE, speculative_draft_model_path=str(model)),
        )

    def live(name: str) -> list[dict[str, str]]:
        return live_digests(engine, folder / name)

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    trainers = [Trainer(tiny_model.config(1, 1), mesh) for _ in range(2)]
    with torch.no_grad():
        for parameter in trainers[1].model.parameters():
            parameter.mul_(1.5)
    for number, trainer in enumerate(trainers):
        trainer.save_checkpoint(folder / f"checkpoint-{number}")
    sender = WeightSender.over(dist.group.WORLD, engine.update_weights_distributed, timeout_s=180)
    first, second = (list(trainer.model.named_parameters()) for trainer in trainers)
    only_the_draft = [(f"draft.{name}", tensor) for name, tensor in second]
    seen: dict[str, Any] = {"before": live("before")}
    left = [sender.update(first, draft=False, weight_version=version).kept_versions for version in ("1", "2")]
    seen["target alone"] = live("target alone")
    left.append(sender.update([*first, *only_the_draft], weight_version="3").kept_versions)
    seen["each its own"] = live("each its own")
    seen["same"] = refusal_of(lambda: sender.update([*first, *only_the_draft[:-1]]))
    seen["refused"] = live("refused")
    sender.update(second, verify="full", staged=True)
    seen["both"] = live("both")
    own = [(f"draft.{name}", tensor) for name, tensor in first]
    report, again = (sender.update(own, frozen=["*"], weight_version=v, verify="full") for v in ("4", "5"))
    seen["live"] = engine.weights_info().kept_versions  # the next line changes weights by SGLang's own method
    seen["draft alone"] = live("draft alone")
    after_a_load = sender.update(own, frozen=["*"], weight_version="6", verify="full")
    seen["digests"] = [report.digest, again.digest, after_a_load.digest]
    seen["left"] = [*left, report.kept_versions]
    seen["kept"] = report.kept
    sender.close()
    end(engine)
    return seen
