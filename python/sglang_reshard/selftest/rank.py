"""A trainer rank of one run: `python -m sglang_reshard.selftest.rank JOB`, with the JSON of `Job` and torch's variables.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from sglang_reshard.selftest import models, stock, tiny_model
from sglang_reshard.selftest.digests import LOADER
from sglang_reshard.selftest.events import EventWriter
from sglang_reshard.selftest.job import Job, Run
from sglang_reshard.selftest.steps import Steps
from sglang_reshard.selftest.trainer import Trainer
from sglang_reshard.testing import cpu_host

_PROMPTS, _PROMPT_TOKENS = 4, 9


def main(job: Job) -> None:
    run, model = job.run, Path(job.folder) / "model"
    device = join(run)
    events = EventWriter(Path(job.events) if dist.get_rank() == 0 else None)
    engine = None
    if dist.get_rank() == 0:
        models.save(run.model, model, run.source, run.target)
        with events.phase(f"start an engine: {run.target}, {run.dtype}, on dummy weights", 12 + 5 * run.target.ranks):
            engine = start_engine(run, model)
    dist.barrier()
    try:
        with events.phase(f"make the model, shard it: {run.source}"):
            dtype = torch.float32 if run.model in (models.TINY, models.TINY_MOE) else torch.bfloat16
            trainer = Trainer(models.config(model), run.source, device, dtype)
        Steps(job, trainer, engine, device, prompts(trainer.vocabulary)).take()
    finally:
        if engine is not None:
            from sglang_reshard.patches.engine import end

            end(engine)
    dist.barrier()
    dist.destroy_process_group()


def join(run: Run) -> torch.device:
    """Joins the other trainer ranks. Returns this one's device."""
    if run.device == "cpu":
        stock.prepare()
        dist.init_process_group("cpu:gloo")
        return torch.device("cpu")
    # NCCL needs a GPU for each rank. Where ranks share one, gloo gathers, in host memory: see `trainer.whole`.
    alone = len(run.trainer_gpus) >= run.source.ranks
    dist.init_process_group("cpu:gloo,cuda:nccl" if alone else "cpu:gloo,cuda:gloo")
    device = torch.device("cuda", run.trainer_gpus[dist.get_rank() % len(run.trainer_gpus)])
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # a mesh would choose a GPU by the local rank otherwise
    return device


def start_engine(run: Run, model: Path) -> Any:
    """Starts a real SGLang engine with the memory saver and CUDA graphs on GPUs, in processes of its own."""
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.launch import without_torchrun_variables

    arguments: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "dtype": run.dtype,
        "skip_tokenizer_init": True,
        "context_length": tiny_model.CONTEXT_LENGTH,
        "custom_weight_loader": [LOADER],
        "log_level": "error",
        **run.target.arguments,
    }
    if run.device == "cpu":
        arguments = cpu_host.engine_arguments(**arguments)
    else:
        arguments |= {
            "base_gpu_id": run.engine_gpus[0],
            "enable_memory_saver": True,
            "mem_fraction_static": 0.4 if run.colocated else 0.8,
            "max_total_tokens": 4096,
            "cuda_graph_max_bs": 4,
            "attention_backend": "triton",  # needs the fewest compiled kernels
            "sampling_backend": "pytorch",
        }
    with without_torchrun_variables():
        return Engine(**arguments)


def prompts(vocabulary: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randint(1, vocabulary, (_PROMPTS, _PROMPT_TOKENS), generator=numbers).tolist()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Job))
