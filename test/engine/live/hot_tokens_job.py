"""What the processes of test_hot_tokens.py do: one updates an engine with an EAGLE draft, another starts one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from draft_job import LOADER, SPECULATIVE
from sglang_reshard import WeightSender
from sglang_reshard.patches.draft_models import OWN
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.testing import cpu_host
from support.checkpoints import DRAFT
from support.refusals import refusal_of


def without_gpu(_config: Any) -> None:
    """A factory of forward hooks, which SGLang calls before it starts the draft. That frees a GPU's memory."""
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None


class Engine:
    def __init__(self, checkpoint: Path, tokens: str, folder: Path) -> None:
        cpu_host.activate(1)  # before SGLang's first import
        from sglang.srt.entrypoints.engine import Engine

        self._folder = folder
        with without_torchrun_variables():
            self.engine = Engine(
                model_path=str(checkpoint),
                dtype="bfloat16",
                skip_tokenizer_init=True,
                custom_weight_loader=[LOADER],
                forward_hooks=[{"target_modules": ["lm_head"], "hook_factory": "hot_tokens_job:without_gpu"}],
                **cpu_host.engine_arguments(
                    **SPECULATIVE | {"speculative_algorithm": "EAGLE"},
                    speculative_draft_model_path=str(checkpoint / DRAFT),
                    speculative_token_map=tokens,
                ),
            )

    def live(self, name: str) -> list[dict[str, str]]:
        """The digests of the draft's tensors, and of the target's."""
        folder = self._folder / name
        folder.mkdir()
        message = torch.tensor(list(str(folder.resolve()).encode()), dtype=torch.uint8)
        ok, why = self.engine.update_weights_from_tensor([("folder", message)], load_format=LOADER, flush_cache=False)
        assert ok, why
        return [json.loads((folder / f"{n}.json").read_text()) for n in range(2)]

    def end(self) -> None:
        from sglang_reshard.patches.engine import end

        end(self.engine)


def updates(job: dict[str, Any]) -> dict[str, Any]:
    """What is live after the start on one checkpoint, a refused update and two updates to the other one."""
    folder = Path(job["folder"])
    engine = Engine(folder / "1", job["tokens"], folder)
    sender = WeightSender.over(dist.group.WORLD, engine.engine.update_weights_distributed, timeout_s=180)
    target = load_file(folder / "2" / "model.safetensors")
    own = load_file(folder / "2" / DRAFT / "model.safetensors")
    given = [*target.items(), *((OWN + name, tensor) for name, tensor in own.items())]
    seen: dict[str, Any] = {"start": engine.live("start")}
    seen["refusal"] = refusal_of(lambda: sender.update(given[:-1]))
    seen["refused"] = engine.live("refused")
    for name, options in {"updated": {}, "staged": {"staged": True}}.items():
        for tensor in target.values():
            tensor.neg_()
        sender.update(given, verify="full", **options)
        seen[name] = engine.live(name)
    sender.close()
    engine.end()
    return seen


def start(job: dict[str, Any]) -> list[dict[str, str]]:
    """What is live after a start without the plugin."""
    engine = Engine(Path(job["checkpoint"]), job["tokens"], Path(job["folder"]))
    seen = engine.live("start")
    engine.end()
    return seen
