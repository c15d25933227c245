"""A live engine with a draft model: it follows with its target, by the same tensors or its own, or stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from sglang_reshard import WeightSender
from sglang_reshard.cli.layouts import Source
from sglang_reshard.patches.draft_models import OWN
from sglang_reshard.selftest import tiny_model
from sglang_reshard.selftest.digests import digests
from sglang_reshard.selftest.trainer import Trainer
from support.checkpoints import DRAFT, write_checkpoint
from support.live_engines import WITHOUT_PLUGIN, stock_engine
from support.refusals import refusal_of
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

LOADER = "test_draft_models.write_each"
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
    options = {**SPECULATIVE, "load_format": "dummy", "dtype": "float32", "speculative_draft_model_path": str(model)}
    with stock_engine(model, loaders=[LOADER], **options) as engine:
        return updates_of(engine, folder)


def updates_of(engine: Any, folder: Path) -> dict[str, Any]:
    def live(name: str) -> list[dict[str, str]]:
        return live_digests(engine, folder / name)

    trainers = [Trainer(tiny_model.config(1, 1), Source()) for _ in range(2)]
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
    return seen


def without_gpu(_config: Any) -> None:
    """A factory of forward hooks, which SGLang calls before it starts the draft. That frees a GPU's memory."""
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None


def started(checkpoint: Path, tokens: str) -> Any:
    options = {**SPECULATIVE, "speculative_algorithm": "EAGLE", "speculative_token_map": tokens}
    hook = {"target_modules": ["lm_head"], "hook_factory": "test_draft_models:without_gpu"}
    return stock_engine(
        checkpoint,
        loaders=[LOADER],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        forward_hooks=[hook],
        speculative_draft_model_path=str(checkpoint / DRAFT),
        **options,
    )


def hot_updates(job: dict[str, Any]) -> dict[str, Any]:
    """What is live after the start on one checkpoint, a refused update and two updates to the other one."""
    folder = Path(job["folder"])
    target = load_file(folder / "2" / "model.safetensors")
    own = load_file(folder / "2" / DRAFT / "model.safetensors")
    given = [*target.items(), *((OWN + name, tensor) for name, tensor in own.items())]
    with started(folder / "1", job["tokens"]) as engine:
        sender = WeightSender.over(dist.group.WORLD, engine.update_weights_distributed, timeout_s=180)
        seen: dict[str, Any] = {"start": live_digests(engine, folder / "start")}
        seen["refusal"] = refusal_of(lambda: sender.update(given[:-1]))
        seen["refused"] = live_digests(engine, folder / "refused")
        for name, options in {"updated": {}, "staged": {"staged": True}}.items():
            for tensor in target.values():
                tensor.neg_()
            sender.update(given, verify="full", **options)
            seen[name] = live_digests(engine, folder / name)
        sender.close()
    return seen


def hot_start(job: dict[str, Any]) -> list[dict[str, str]]:
    """What is live after a start without the plugin."""
    with started(Path(job["checkpoint"]), job["tokens"]) as engine:
        return live_digests(engine, Path(job["folder"]) / "start")


pytestmark = [pytest.mark.engine]


def unknown(versions: dict[str, list[str]]) -> str:
    (version,) = versions
    assert version.startswith("unknown since an update by SGLang")
    return version


def test_drafts_follow_in_the_same_update_or_stay(tmp_path: Path) -> None:
    (seen,) = run_trainers(1, updates, tmp_path, environment={"TRITON_INTERPRET": "1"})
    checkpoints = [tmp_path / f"checkpoint-{number}" for number in range(2)]
    loads = stock_digests(tmp_path / "model", checkpoints, tp_size=1, dtype="float32")
    first, second = ({n: load[0][n] for n in load[0] if n.endswith(("weight", "bias"))} for load in loads)

    def weights(name: str) -> list[dict[str, str]]:
        return [{n: found[n] for n in first} for found in seen[name]]

    draft_before, target_before = weights("before")
    assert target_before not in (first, second)
    assert weights("target alone") == [draft_before, first]
    assert weights("each its own") == [second, first]
    assert seen["same"][0] == "EngineRefused"
    assert "draft_models.0." in seen["same"][1]
    assert seen["refused"] == seen["each its own"]
    assert weights("both") == [second, second]
    assert weights("draft alone") == [first, second]
    of_draft, again, of_none, of_target = seen["left"]
    assert of_draft == again == {unknown(of_draft): ["draft.*"]}, "the oracle looks through an update of SGLang's own"
    assert of_none == {}
    assert of_target == {unknown(of_target): seen["kept"]} == seen["live"]
    assert unknown(of_draft) != unknown(of_target)
    same, again, after_a_load = seen["digests"]
    assert same == again != after_a_load, "SGLang may have written the target"
    assert not any(name.startswith("draft") for name in seen["kept"])


TOKENS = [1, 5, 9, 30, 44, 60, 100, 101]


@pytest.mark.sweep
def test_the_draft_s_head_is_of_the_target_s_new_one(tmp_path: Path) -> None:
    """SGLang copies the rows of tokens that an EAGLE draft proposes at the start (`speculative_token_map`).

    Without a GPU no draft generates, so weights are compared, with those of an engine that SGLang starts on the same
    checkpoint without the plugin. The newest SGLang starts no draft without a GPU.
    """
    for version in ("1", "2"):
        write_checkpoint(
            "LlamaForCausalLM", tmp_path / version, architecture="LlamaForCausalLMEagle", seed=10 * int(version)
        )
    torch.save(TOKENS, tmp_path / "tokens.pt")
    job = {"tokens": str(tmp_path / "tokens.pt")}
    interpreted = {"TRITON_INTERPRET": "1"}
    (tmp_path / "stock").mkdir()
    (seen,) = run_trainers(1, hot_updates, tmp_path, environment=interpreted, **job)
    (fresh,) = run_trainers(
        1,
        hot_start,
        tmp_path / "stock",
        environment=interpreted | WITHOUT_PLUGIN,
        checkpoint=str(tmp_path / "2"),
        **job,
    )
    assert seen["refusal"][0] == "EngineRefused"
    assert seen["refused"] == seen["start"]
    assert seen["staged"] == fresh
    for before in ("start", "updated"):
        assert seen[before][0]["lm_head.weight"] != fresh[0]["lm_head.weight"]
    assert seen["updated"][0].keys() == fresh[0].keys()
