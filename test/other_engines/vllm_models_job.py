"""One rank of a tensor parallel group of vLLM's: builds each model, replays its traced loader, and runs the loader.

Runs with vLLM's Python, see `support.vllm_env.run_job`. Writes for each model: what the trace found, and the names of
tensors that differ.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_reshard.extras.vllm.in_place import refusal
from sglang_reshard.extras.vllm.target import VLLMModel
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.selftest.digests import digest
from sglang_reshard.trace.program import MayStay
from tools.oracle.replay import replay


def built(path: str, rank: int, ranks: int, rendezvous: str) -> torch.nn.Module:
    """Returns vLLM's model of a checkpoint, not loaded, as this rank's worker would build it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        model=path, skip_tokenizer_init=True, dtype="bfloat16", tensor_parallel_size=ranks, max_model_len=128
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(
                world_size=ranks, rank=rank, distributed_init_method=rendezvous, local_rank=rank, backend="gloo"
            )
        if parallel_state.model_parallel_is_initialized():  # a model with experts has one group more
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(ranks)
        return initialize_model(config)


def compared(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    specs = [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()]
    program = VLLMModel(model).program(specs, MayStay())
    digests = []
    for load in (lambda: replay(program, weights), lambda: model.load_weights(weights.items())):  # type: ignore[operator]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            load()
        digests.append({name: digest(tensor) for name, tensor in model.state_dict().items()})
    ours, stock = digests
    return {
        "copies": len(program.copies),
        "kept": program.kept,
        "tensors": len(stock),
        "zero": [name for name, tensor in model.named_parameters() if not tensor.any()],
        "differ": [name for name in stock if ours[name] != stock[name]],
        "refusal": refusal(model),
    }


def main() -> None:
    rank, ranks, folder, arguments = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    os.environ["VLLM_DIST_IDENT"] = "sglang-reshard-test"  # vLLM's executor sets it for its workers
    found = {}
    for name, path in arguments["models"].items():
        model = built(path, rank, ranks, f"file://{folder}/rendezvous")
        found[name] = compared(model, load_file(f"{path}/model.safetensors"))
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
