#!/usr/bin/env python3
"""A DeepSpeed ZeRO-3 trainer and engines that it reaches by URL, as OpenRLHF has them.

    make setup-deepspeed
    export SGLANG_RESHARD_API_KEY=...
    PYTHONPATH=.venv/deepspeed .venv/bin/torchrun --nproc-per-node 2 examples/http/train_zero3.py MODEL URL [URL ...]

OpenRLHF gathers each parameter (`deepspeed.zero.GatheredParameters`), and broadcasts it to a group of all engine
ranks. Here every rank's partitions are read in place, and nothing is gathered.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from engines import connect, say

STEPS = 3
SEQUENCE = [5, 8, 13, 21, 34, 55, 89, 144]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "overlap_comm": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "torch_adam": True}},
}


def main(path: str, urls: list[str]) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    trainer, *_ = deepspeed.initialize(model=model, config=CONFIG)
    sender, engines, _session = connect(urls)
    tokens = torch.tensor([SEQUENCE], device=trainer.device)
    for step in range(1, STEPS + 1):
        trainer.backward(trainer(input_ids=tokens, labels=tokens).loss)
        trainer.step()
        sender.update(trainer.module, weight_version=f"zero3 {step}", verify="full")
        say(engines, f"zero3 {step}", SEQUENCE[:2], len(SEQUENCE) - 2)
    sender.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
