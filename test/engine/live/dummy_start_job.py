"""What the trainer rank of test_dummy_start.py does: it updates an engine that was started on dummy weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from oracle.digests import LOADER, read_live_digests
from sglang_reshard import VerlEngine
from sglang_reshard.testing import cpu_host
from support.refusals import refusal_of

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]


def updates(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates of an engine on dummy weights, then an engine that SGLang starts on the second checkpoint."""
    folder = Path(job["folder"])
    cpu_host.activate(1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    engine = started(mesh, folder / "1", "dummy")
    seen: dict[str, Any] = {"tokens": [tokens(engine)], "digests": [], "messages": []}
    seen["without buffers"] = refusal_of(lambda: update(engine, folder / "1", buffers=False))
    for version in ("1", "2"):
        seen["messages"].append(update(engine, folder / version))
        seen["tokens"].append(tokens(engine))
        seen["digests"].append(read_live_digests(engine.engine, folder / f"digests-{version}"))
    engine.shutdown()
    fresh = started(mesh, folder / "2", "auto")
    seen["fresh tokens"] = tokens(fresh)
    seen["fresh digests"] = read_live_digests(fresh.engine, folder / "digests-fresh")
    fresh.shutdown()
    return seen


def started(mesh: DeviceMesh, folder: Path, load_format: str) -> VerlEngine:
    return VerlEngine(
        device_mesh_cpu=mesh,
        timeout_s=120,
        model_path=str(folder),
        load_format=load_format,
        skip_tokenizer_init=True,
        custom_weight_loader=[LOADER],
        log_level="warning",
        **cpu_host.engine_arguments(dtype="bfloat16", tp_size=1),
    )


def update(engine: VerlEngine, folder: Path, buffers: bool = True) -> str:
    weights = load_file(folder / "model.safetensors")
    sent = {name: tensor for name, tensor in weights.items() if buffers or not name.endswith("layer_scalar")}
    report = engine.update_weights_from_tensor(list(sent.items()), weight_version=folder.name, verify="full")
    return report.message


def tokens(engine: VerlEngine) -> list[Any]:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=sampling, return_logprob=True)
    return [[o["output_ids"], [x[0] for x in o["meta_info"]["output_token_logprobs"]]] for o in outputs]
