"""What the processes of test_fresh_engines.py do: one updates an engine, the other starts one on a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models_job import sharded
from oracle.digests import LOADER, read_live_digests
from sglang_reshard import VerlEngine
from sglang_reshard.testing import cpu_host
from support.refusals import refusal_of

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
NEW_TOKENS = 6


def two_updates(job: dict[str, Any]) -> dict[str, Any]:
    """Returns what an engine says that starts on dummy weights, and what it says after each of two updates.

    job  "buffers" is the end of their names, or empty: an update without them comes first
    """
    folder = Path(job["folder"])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    cpu_host.activate(1)
    engine = VerlEngine(device_mesh_cpu=mesh, timeout_s=90, **arguments(folder / "1", load_format="dummy"))
    seen: dict[str, Any] = {"dummy": look(engine.generate, engine.engine, folder / "digests-dummy")}
    state = sharded(folder / "1", mesh)
    parameters = {n: t for n, t in state.items() if not (job["buffers"] and n.endswith(job["buffers"]))}
    if job["buffers"]:
        seen["without buffers"] = refusal_of(lambda: engine.update_weights_from_tensor(parameters.items()))
    for version in ("1", "2"):
        for name, tensor in sharded(folder / version, mesh).items():  # in place, as an optimizer writes
            state[name].to_local().copy_(tensor.to_local())
        options = {"staged": True} if version == "2" and job["staged"] else {}
        engine.update_weights_from_tensor(state.items(), weight_version=version, verify="full", **options)
        seen[version] = look(engine.generate, engine.engine, folder / f"digests-{version}")
    engine.shutdown()
    return seen


def by_stock(job: dict[str, Any]) -> dict[str, Any]:
    """Returns what an engine says that SGLang starts on the checkpoint, without the plugin."""
    cpu_host.activate(1)  # before SGLang's first import
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import end
    from sglang_reshard.patches.launch import without_torchrun_variables

    with without_torchrun_variables():
        engine = Engine(**arguments(Path(job["checkpoint"])))
    assert not hasattr(engine, "update_weights_distributed"), "the plugin was loaded"
    seen = look(engine.generate, engine, Path(job["folder"]) / "digests")
    end(engine)
    return seen


def arguments(checkpoint: Path, **options: Any) -> dict[str, Any]:
    return cpu_host.engine_arguments(
        model_path=str(checkpoint),
        tp_size=1,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        custom_weight_loader=[LOADER],
        log_level="warning",
        **options,
    )


def look(generate: Callable[..., Any], engine: Any, folder: Path) -> dict[str, Any]:
    """Returns tokens, their log-probabilities, and the digest of each live tensor; the latter where the engine is."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    outputs = generate(input_ids=PROMPTS, sampling_params=sampling, return_logprob=True)
    return {
        "tokens": [o["output_ids"] for o in outputs],
        "logprobs": [[p for p, *_ in o["meta_info"]["output_token_logprobs"]] for o in outputs],
        "digests": [] if engine is None else read_live_digests(engine, folder),
    }
