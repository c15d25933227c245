"""What the processes of test_fresh_engines.py do: one updates an engine, the other starts one on a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models_job import sharded
from sglang_reshard import VerlEngine
from sglang_reshard.errors import ReshardError
from sglang_reshard.patches.stock_weights import SERVE_DUMMY
from sglang_reshard.testing import cpu_host
from support.tiny_qwen3_vl import PROMPT
from tools.oracle.digests import LOADER, read_live_digests

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
NEW_TOKENS = 6


def updates(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what is seen of an engine after its start on dummy weights, and after each step.

    steps  of the job, each with the "version" of the checkpoint that is sent, a pattern of names that are left out
           ("without"), and "options" of the update. The last element of the result is of the last step
    """
    folder, image = Path(job["folder"]), job["image"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    server = job["server"]
    cpu_host.activate(server.get("tp_size", 1))
    os.environ[SERVE_DUMMY] = "1"  # what it says before the first update is compared, too
    engine = VerlEngine(
        device_mesh_cpu=mesh, timeout_s=180, **arguments(folder / "1", image, load_format="dummy", **server)
    )

    def digests(number: int) -> list[dict[str, str]]:
        return [] if engine.engine is None else read_live_digests(engine.engine, folder / f"digests-{number}")

    seen: list[dict[str, Any]] = [{**said(engine.generate, job), "digests": digests(0)}]
    state = sharded(folder / "1", mesh)
    for number, step in enumerate(job["steps"], 1):
        for name, tensor in sharded(folder / step["version"], mesh).items():  # in place, as an optimizer writes
            state[name].to_local().copy_(tensor.to_local())
        sent = [(n, t) for n, t in state.items() if not fnmatchcase(n, step["without"])]
        try:
            report = engine.update_weights_from_tensor(sent, verify="full", **step["options"])
        except ReshardError as error:
            seen.append({"refusal": str(error), "digests": digests(number)})
        else:
            seen.append({"kept": report.kept, **said(engine.generate, job), "digests": digests(number)})
    engine.shutdown()
    return seen


def by_stock(job: dict[str, Any]) -> dict[str, Any]:
    """Returns what is seen of an engine that SGLang starts on the checkpoint, without the plugin."""
    server = job["server"]
    cpu_host.activate(server.get("tp_size", 1))  # before SGLang's first import
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import end
    from sglang_reshard.patches.launch import without_torchrun_variables

    with without_torchrun_variables():
        engine = Engine(**arguments(Path(job["checkpoint"]), job["image"], **server))
    assert not hasattr(engine, "update_weights_distributed"), "the plugin was loaded"
    seen = said(engine.generate, job)
    seen["digests"] = read_live_digests(engine, Path(job["folder"]) / "digests")
    end(engine)
    return seen


def arguments(checkpoint: Path, image: str, **options: Any) -> dict[str, Any]:
    of_images = {"mm_attention_backend": "sdpa"} if image else {"skip_tokenizer_init": True}
    of_all = {"tp_size": 1, "dtype": "bfloat16", "log_level": "warning", "custom_weight_loader": [LOADER]}
    return cpu_host.engine_arguments(model_path=str(checkpoint), **{**of_all, **of_images, **options})


def said(generate: Callable[..., Any], job: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokens that an engine generates, and their log-probabilities; nothing of one that cannot on a CPU."""
    if not job["generates"]:
        return {"tokens": [], "logprobs": []}
    image = job["image"]
    asked: dict[str, Any] = {"prompt": [PROMPT], "image_data": [image]} if image else {"input_ids": PROMPTS}
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    outputs = generate(sampling_params=sampling, return_logprob=True, **asked)
    logprobs = [[p for p, *_ in o["meta_info"]["output_token_logprobs"]] for o in outputs]
    return {"tokens": [o["output_ids"] for o in outputs], "logprobs": logprobs}
