#!/usr/bin/env python3
"""A trainer that brings a server to its weights after every step: a server that somebody else has started.

    SGLANG_RESHARD_URL=http://127.0.0.1:30000 SGLANG_RESHARD_API_KEY=... \
        .venv/bin/torchrun --nproc-per-node 2 examples/http/train.py MODEL

MODEL is a folder with a transformers configuration, the one that the server has. FSDP2 spreads the model over all
ranks; it starts from random weights and learns one sequence by heart.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_reshard import VerlEngine

STEPS = 3
SEQUENCE = [5, 8, 13, 21, 34, 55, 89, 144]


def main(path: str) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = "cuda" if on_gpu else "cpu"

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32).to(device)
    mesh = init_device_mesh(device, (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)

    # URL and key are in the environment. `backend="engine", model_path=path` would start an engine here instead.
    engine = VerlEngine(device_mesh_cpu=init_device_mesh("cpu", (ranks,)), backend="server")
    tokens = torch.tensor([SEQUENCE], device=device)
    for step in range(1, STEPS + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = engine.update_weights_from_tensor(model, weight_version=f"step {step}", verify="full")
        sampling = {"temperature": 0, "max_new_tokens": len(SEQUENCE) - 2, "ignore_eos": True}
        answer = engine.generate(input_ids=SEQUENCE[:2], sampling_params=sampling)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.2f}, digest {report.digest}, {report.seconds['total']:.3f} s")
            print(f"    {answer['meta_info']['weight_version']} says {answer['output_ids']}", flush=True)
    engine.shutdown()  # of the session; the server goes on
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
