"""Engines that a test's trainer ranks start: the tokens that they say, and the digests of their live tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from sglang_reshard import VerlEngine
from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.selftest.digests import LOADER, read_live_digests
from sglang_reshard.testing import cpu_host

PROMPTS = [[5, 6, 7, 8], [100, 200], [300, 17, 44, 9, 2]]
NEW_TOKENS = 8
WITHOUT_PLUGIN = {"SGLANG_PLUGINS": "somebody-elses"}  # environment of an engine that does not load the package
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 2, "lora_backend": "torch_native"}


def live_engine(mesh: DeviceMesh, model: Path, *, loaders: Sequence[str] = (LOADER,), **options: Any) -> VerlEngine:
    """Starts an engine of SGLang's for all ranks of the mesh. `options` are VerlEngine's and SGLang's."""
    _activate(options)
    tp = options.pop("tp_size", 1)
    given = {"timeout_s": 180, "custom_weight_loader": list(loaders), "log_level": "warning", **options}
    return VerlEngine(mesh, tp_size=tp, model_path=str(model), **cpu_host.engine_arguments(**given))


def _activate(options: Mapping[str, Any]) -> None:
    """Must be called before SGLang's first import. `options` are SGLang's."""
    replicas = 1 if "enable_dp_attention" in options else options.get("dp_size", 1)
    cpu_host.activate(options.get("tp_size", 1), replicas * options.get("pp_size", 1))


def greedy(engine: Any, prompts: Sequence[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS, **more: Any) -> Any:
    """Returns the tokens that an engine, or a server, says."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, **more)
    return [output["output_ids"] for output in outputs]


def live_digests(engine: VerlEngine, folder: Path, loader: str = LOADER) -> Any:
    """Returns what each engine rank writes by its loader, its digests for example; nothing on ranks but the first."""
    return [] if engine.engine is None else read_live_digests(engine.engine, folder, loader)


@contextmanager
def stock_engine(model: Path, *, loaders: Sequence[str] = (LOADER,), **options: Any) -> Iterator[Any]:
    """Starts an engine as SGLang itself does, with the package's plugin, or without it as the environment says."""
    _activate(options)
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import end

    given = {"custom_weight_loader": list(loaders), "log_level": "warning", **options}
    with without_torchrun_variables():
        engine = Engine(model_path=str(model), **cpu_host.engine_arguments(**given))
    try:
        yield engine
    finally:
        end(engine)
