"""Builds engine ranks, traces their loaders, replays, and compares with stock; prints one line of JSON a case.

Run as a script by test_trace_bit_exact.py: SGLang chooses between GPU and CPU code paths at import, so
each kind needs a process of its own, and each rank a fork of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_reshard.oracle.digests import digests
from sglang_reshard.oracle.forks import in_forks
from sglang_reshard.oracle.rank import build_rank, choose_code_paths
from sglang_reshard.oracle.replay import replay
from sglang_reshard.trace import live_signature, trace
from sglang_reshard.trace.live import live_storages
from tiny_models import TINY_MODELS, manifest, random_weights, write_config

ANSWER = "trace case: "


class Case(NamedTuple):
    """One rank of one engine, and the dtype of the trainer's weights."""

    model: str
    tp_size: int
    rank: int
    ep_size: int = 1
    weights: str = "bfloat16"

    def __str__(self) -> str:
        parts = f"{self.model}-tp{self.tp_size}-rank{self.rank}"
        parts += f"-ep{self.ep_size}" if self.ep_size > 1 else ""
        return parts + (f"-{self.weights}" if self.weights != "bfloat16" else "")


MODELS_WITH_EXPERTS = ("qwen3_moe", "deepseek_v3")
GPU_CASES = [
    *(Case(m, tp, rank) for m in TINY_MODELS for tp in (1, 2, 4) for rank in range(tp)),
    *(Case(m, 4, rank, ep_size=2) for m in MODELS_WITH_EXPERTS for rank in range(4)),
    *(Case(m, 2, rank, weights="float32") for m in ("qwen3", "deepseek_v3") for rank in range(2)),
]
CPU_CASES = [Case(m, 2, rank) for m in TINY_MODELS for rank in range(2)]


def fill_with_garbage(model: torch.nn.Module) -> None:
    """Small bytes: as floats they are tiny numbers, none of them NaN."""
    generator = torch.Generator().manual_seed(7)
    for storage in live_storages(model).values():
        everything = torch.empty(0, dtype=torch.uint8).set_(storage.tensor.untyped_storage())
        everything.copy_(torch.randint(0, 60, everything.shape, generator=generator, dtype=torch.uint8))


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))


def examine(case: Case, folder: str) -> dict[str, object]:
    specs = manifest(case.model, folder)
    if case.weights != "bfloat16":
        specs = [dataclasses.replace(s, dtype=case.weights) for s in specs]
    model = build_rank(folder, tp_size=case.tp_size, tp_rank=case.rank, ep_size=case.ep_size)
    fill_with_garbage(model)
    before, signature = digests(model), live_signature(model)
    program = trace(model, specs)
    written_by_the_trace = differing(before, digests(model))
    weights = random_weights(specs, seed=case.rank)

    def replayed(copies: tuple[object, ...]) -> dict[str, str]:
        fill_with_garbage(model)
        replay(dataclasses.replace(program, copies=copies), weights)
        return digests(model)

    ours = replayed(program.copies)
    middle = len(program.copies) // 2
    incomplete = replayed(program.copies[:middle] + program.copies[middle + 1 :])
    same_addresses = live_signature(model) == signature
    fill_with_garbage(model)
    with torch.no_grad():
        model.load_weights(iter([(n, t.clone()) for n, t in weights.items()]))  # type: ignore[operator]
    stock = digests(model)
    return {
        "copies": len(program.copies),
        "steps": [s.what for s in program.steps],
        "scratch_bytes": program.scratch_bytes,
        "milliseconds": round(program.seconds * 1e3),
        "tensors": len(stock),
        "written_by_the_trace": written_by_the_trace,
        "differing": differing(ours, stock),
        "differing_without_one_copy": differing(incomplete, stock),
        "left_out": program.copies[middle].target,
        "same_addresses": same_addresses,
    }


def main(kind: str, folder: str) -> None:
    choose_code_paths(4, gpu=kind == "gpu")
    torch.set_num_threads(1)
    # Everything slow, before the forks.
    import sglang.srt.model_loader
    import sglang.srt.models.registry
    import sglang.srt.server_args  # noqa: F401

    folders = {name: write_config(name, Path(folder) / name) for name in TINY_MODELS}
    for name, path in folders.items():
        manifest(name, path)
    cases = GPU_CASES if kind == "gpu" else CPU_CASES
    for case, found in in_forks(
        lambda case: examine(case, folders[case.model]), cases, processes=2, deadline_seconds=500
    ):
        print(ANSWER + json.dumps([case, found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
