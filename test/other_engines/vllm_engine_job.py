"""Two trainer ranks update a `vllm.LLM` that rank 0 has started. Runs with vLLM's Python, see `support.vllm_env`.

Writes what each step has left behind: digests on every worker of vLLM's, tokens, and errors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import WeightSender
from sglang_reshard.errors import ReshardError
from sglang_reshard.extras.vllm.engine import send_to

PROMPT = [(7 * n) % 500 for n in range(96)]  # several blocks of vLLM's prefix cache


def started(model: str, extension: str, tp_size: int) -> Any:
    import vllm

    return vllm.LLM(
        model,
        worker_extension_cls=extension,
        tensor_parallel_size=tp_size,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=2,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=True,
    )


def tokens(llm: Any) -> list[int]:
    import vllm

    sampling = vllm.SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def looked_at(llm: Any) -> dict[str, Any]:
    return {"digests": llm.collective_rpc("reshard_digests"), "tokens": tokens(llm)}


def shards(folder: str, mesh: Any) -> dict[str, Any]:
    return {
        name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in load_file(f"{folder}/model.safetensors").items()
    }


def main() -> None:
    rank, ranks, folder, arguments = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    extension, first = arguments["extension"], arguments["checkpoints"][0]
    llm = started(arguments["start"], extension, arguments["tp_size"]) if rank == 0 else None
    sender = WeightSender.over(dist.group.WORLD, send_to(llm) if llm is not None else None)
    told: dict[str, Any] = {"updates": [], "reloads": [], "error": ""}

    try:
        for checkpoint in arguments["checkpoints"]:
            report = sender.update(shards(checkpoint, mesh), verify="full")
            if llm is not None:
                told["updates"].append(looked_at(llm) | {"transport": report.transport, "kept": report.kept})
        incomplete = shards(first, mesh)
        del incomplete["model.norm.weight"]
        sender.update(incomplete)
    except ReshardError as error:
        told["error"] = f"{type(error).__name__}: {error}"
    if llm is not None and arguments["reload"]:
        told["after_refusal"] = looked_at(llm)
        for checkpoint in arguments["checkpoints"]:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})  # vLLM's own
            llm.reset_prefix_cache()
            told["reloads"].append(looked_at(llm))
    dist.barrier()
    sender.close()
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    del llm
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
