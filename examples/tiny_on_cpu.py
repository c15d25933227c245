#!/usr/bin/env python3
"""GRPO with verl on a host without a GPU, trainer and rollout on the same devices: colocated_qwen3_8b.sh in small.

    .venv/bin/python examples/tiny_on_cpu.py FOLDER [OVERRIDE ...]

A Qwen3 of ten million random parameters, two FSDP2 ranks, an SGLang engine of TP=2, two steps: two minutes on two
cores. Model, prompts and verl's metrics (metrics.jsonl) are in FOLDER. Overrides are hydra's, and win.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sglang_reshard.selftest import verl_run
from sglang_reshard.testing.cpu_host import verl_settings

RANKS, TP_SIZE, STEPS = 2, 2, 2


def main(folder: Path, overrides: list[str]) -> None:
    verl_run.save_model(folder / "model", RANKS, TP_SIZE)
    verl_run.save_prompts(folder / "prompts.parquet", rows=8)
    settings = [
        *verl_settings.overrides(),
        *verl_run.tiny_run(folder, RANKS, TP_SIZE, STEPS),
        *verl_run.RESHARD,
        *overrides,
    ]
    environment = {
        **os.environ,
        **verl_settings.environment(TP_SIZE),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        # Nothing is to be fetched, and nothing uploaded.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.execve(sys.executable, [sys.executable, "-m", "verl.trainer.main_ppo", *settings], environment)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
