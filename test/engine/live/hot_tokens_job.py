"""What the processes of test_hot_tokens.py do: one updates an engine with an EAGLE draft, another starts one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from draft_job import LOADER, SPECULATIVE, live_digests
from sglang_reshard import WeightSender
from sglang_reshard.patches.draft_models import OWN
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.testing import cpu_host
from support.checkpoints import DRAFT
from support.refusals import refusal_of


def without_gpu(_config: Any) -> None:
    """A factory of forward hooks, which SGLang calls before it starts the draft. That frees a GPU's memory."""
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None


@contextmanager
def started(checkpoint: Path, tokens: str) -> Iterator[Any]:
    cpu_host.activate(1)  # before SGLang's first import
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import end

    with without_torchrun_variables():
        engine = Engine(
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
    try:
        yield engine
    finally:
        end(engine)


def updates(job: dict[str, Any]) -> dict[str, Any]:
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


def start(job: dict[str, Any]) -> list[dict[str, str]]:
    """What is live after a start without the plugin."""
    with started(Path(job["checkpoint"]), job["tokens"]) as engine:
        return live_digests(engine, Path(job["folder"]) / "start")
