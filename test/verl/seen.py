"""What must be true of every update of a verl job."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from sglang_reshard.selftest import tiny_model, verl_run
from support.live_memory import differing
from support.verl_host import run_job, verl_folder
from tools.oracle import stock_digests

RESHARD = list(verl_run.RESHARD)
OURS = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard"
FSDP1 = [*RESHARD, "actor_rollout_ref.actor.strategy=fsdp"]  # verl's default
MODEL = "actor_rollout_ref.model"
LORA = [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8"]
MERGED = [*LORA, f"{MODEL}.lora.merge=True"]
SERVED = [*LORA, "+actor_rollout_ref.rollout.engine_kwargs.sglang.lora_backend=torch_native"]
GLOO_RANK0 = [
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo_rank0",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=benchmark.verl.rank0_broadcast",
]
Digests = list[dict[str, str]]


def cold_loads(folder: Path, updates: int, tp_size: int, dtype: str) -> list[Digests]:
    """What a stock load of the trainer's checkpoint after each update puts on every engine rank."""
    checkpoints = [folder / f"checkpoint-{version}" for version in range(1, updates + 1)]
    loads = stock_digests(
        folder / "model", checkpoints, tp_size=tp_size, dtype=dtype, context_length=tiny_model.CONTEXT_LENGTH
    )
    return [[load[rank] for rank in range(tp_size)] for load in loads]


def assert_arrived(updates: list[dict[str, Any]], cold: list[Digests]) -> None:
    """Every engine rank holds what a cold load gives it, and every parameter has changed by each update."""
    for update, expected in zip(updates, cold, strict=True):
        for replica, ranks in enumerate(update["digests"]):
            for rank, (live, loaded) in enumerate(zip(ranks, expected, strict=True)):
                assert differing(live, loaded) == [], f"replica {replica}, engine rank {rank}"
    for earlier, later in itertools.pairwise(cold):
        for one, other in zip(earlier, later, strict=True):
            same = {name for name in one if one[name] == other[name]}
            assert all("rotary" in name for name in same), same


def assert_says_the_same(updates: list[dict[str, Any]]) -> None:
    """Every replica's greedy tokens are those of transformers with the trainer's checkpoint, in float32."""
    for update in updates:
        assert update["tokens"] == [update["expected_tokens"]] * len(update["tokens"])
    spoken = [update["expected_tokens"] for update in updates]
    assert all(a != b for a, b in itertools.pairwise(spoken))


def run(job: str, updates: int, **order: Any) -> dict[str, Any]:
    """What the job saw, after every digest and token in it was found right."""
    order = {"colocated": False, "dtype": "float32", "overrides": RESHARD, **order}
    with verl_folder() as folder:
        seen = run_job(f"jobs:{job}", folder, **order)
        assert_arrived(seen["updates"], cold_loads(folder, updates, order["tp_size"], order["dtype"]))
    assert_says_the_same(seen["updates"])
    return seen


def assert_nothing_gathered(updates: list[dict[str, Any]], tp_size: int) -> None:
    """No trainer rank asked for a whole tensor, and the first one sent each engine its own shards and no more.

    The tiny model's matrices are split among the engine's ranks; its vectors, the norms, each of them holds whole.
    """
    for update in updates:
        assert set(update["gathers"]) == {0}
        replicas = len(update["digests"])
        most = replicas * (update["rank0_matrix_bytes"] + tp_size * update["rank0_vector_bytes"])
        assert 0 < update["metrics"]["reshard/sent_bytes_rank0"] <= most
