"""Runs verl's `main_ppo`, three steps each, with this package's backend and with verl's own: `selftest --verl`.

The rollout has the trainer's weights while both agree on the probabilities of the tokens that the rollout has chosen.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest import children, verl_run
from sglang_reshard.selftest.events import Row
from sglang_reshard.selftest.host import Host
from sglang_reshard.testing.cpu_host import verl_settings

STEPS = 3
_MODEL = "actor_rollout_ref.model"
_LORA = (f"{_MODEL}.lora_rank=4", f"{_MODEL}.lora_alpha=8")
KINDS = {
    "all weights": (),
    "LoRA, merged": (*_LORA, f"{_MODEL}.lora.merge=True"),
    "LoRA, served as an adapter": _LORA,
}
BACKENDS = {"sglang-reshard": verl_run.RESHARD, "verl's own": ()}
_LEAST_CORRELATION = 0.99
_MOST_GROWTH = 1.02  # of the peak memory from the second step on
# Larger than usual, so that a step that never reached the rollout shows; four answers teach more often than two.
_VISIBLE = ("actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.rollout.n=4")


def take(
    host: Host, folder: Path, log: Path, deadline: float, seen: Callable[[Row], None], tell: Callable[[str], None]
) -> None:
    """Runs each kind of sync by each backend. Passes on a row for each, and tells what runs."""
    ranks = len(host.gpus) or 2
    tp_size = 2 if ranks % 2 == 0 else 1
    verl_run.save_model(folder / "model", ranks, tp_size)
    verl_run.save_prompts(folder / "prompts.parquet", rows=8)
    for kind, options in KINDS.items():
        rows = []
        for backend, of_backend in BACKENDS.items():
            run, file = f"verl, {kind}", folder / f"{kind}-{backend}.jsonl".replace(" ", "-")
            command = [sys.executable, "-m", "verl.trainer.main_ppo", *_settings(host, folder, ranks, tp_size),
                       *_VISIBLE, *options, *of_backend]  # fmt: skip
            if options == _LORA and not host.gpus:
                command.append("+actor_rollout_ref.rollout.engine_kwargs.sglang.lora_backend=torch_native")
            row = Row(run, f"{STEPS} steps, {backend}", why="left out: the time was up")
            if time.monotonic() < deadline:
                tell(f"{run}, {row.step}: verl starts")
                try:
                    poll = _told_steps(file, f"{run}, {backend}", tell)
                    children.run(command, _environment(host, folder, tp_size, file), log, deadline, poll)
                    row = judged(run, row.step, _steps(file))
                except ReshardError as error:
                    row = Row(run, row.step, False, why=str(error).splitlines()[0])
            rows.append(row)
        ours, of_verl = rows
        seen(msgspec.structs.replace(ours, stock=of_verl.seconds))
        seen(msgspec.structs.replace(of_verl, right=None))  # its faults are none of this package


def _steps(file: Path) -> list[dict[str, float]]:
    """Returns the metrics that verl has written after each step."""
    return [json.loads(line)["data"] for line in file.read_text().splitlines()] if file.exists() else []


def _told_steps(file: Path, run: str, tell: Callable[[str], None]) -> Callable[[], None]:
    """Returns what reports the steps that have ended since it was called last."""
    told = 0

    def poll() -> None:
        nonlocal told
        ended = file.read_bytes().count(b"\n") if file.exists() else 0
        for step in range(told + 1, ended + 1):
            tell(f"{run}: step {step} of {STEPS} has ended")
        told = ended

    return poll


def judged(run: str, step: str, steps: Sequence[dict[str, float]]) -> Row:
    """Judges the metrics of a run by the agreement in all steps and the growth of the peak memory.

    The row's seconds are those of a sync.
    """
    agreed = [metrics.get("training/rollout_actor_probs_pearson_corr", 0.0) for metrics in steps]
    memory = [metrics.get("perf/max_memory_allocated_gb", 0.0) for metrics in steps]
    wrong = [f"{len(steps)} of {STEPS} steps ended"] * (len(steps) != STEPS)
    wrong += [f"in step {n} the rollout's probabilities have a correlation of {value:.3f} with the trainer's"
              for n, value in enumerate(agreed, 1) if not value > _LEAST_CORRELATION]  # fmt: skip
    grows = len(memory) > 1 and memory[-1] > _MOST_GROWTH * memory[1]
    wrong += [f"the peak memory grows: {memory} GB"] * grows
    syncs = [metrics["timing_s/update_weights"] for metrics in steps if "timing_s/update_weights" in metrics]
    more: dict[str, float | int | str] = {
        "least_correlation": min(agreed, default=0.0),
        "peak_memory_gb": max(memory, default=0.0),
    }
    return Row(run, step, not wrong, seconds=statistics.median(syncs or [0.0]), why="; ".join(wrong), more=more)


def _settings(host: Host, folder: Path, ranks: int, tp_size: int) -> list[str]:
    offloaded = ["actor_rollout_ref.actor.fsdp_config.param_offload=True",
                 "actor_rollout_ref.rollout.free_cache_engine=True",
                 f"{_MODEL}.use_remove_padding=False",  # needs flash attention
                 f"+{_MODEL}.override_config.attn_implementation=sdpa"]  # fmt: skip
    of_host = offloaded if host.gpus else verl_settings.overrides()
    return [*of_host, *verl_run.tiny_run(folder, ranks, tp_size, STEPS)]


def _environment(host: Host, folder: Path, tp_size: int, metrics: Path) -> dict[str, str]:
    return {
        **os.environ,
        **({} if host.gpus else verl_settings.environment(tp_size)),
        "RAY_TMPDIR": str(folder),
        "RAY_ADDRESS": "local",  # a new cluster, even where another one runs
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
