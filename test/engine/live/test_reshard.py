"""Real stock engines, brought to a trainer's weights: what every engine rank then holds, and says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard_job import Job
from support.live_engines import WITHOUT_PLUGIN
from support.refusals import refusal_of
from support.reports import of_others
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

pytestmark = [pytest.mark.engine]
MIB = 1 << 20


def two_updates(job: dict[str, Any]) -> dict[str, Any]:
    """Step, update, step, update; with the digests and tokens after each."""
    run = Job(job)
    seen: dict[str, Any] = {"reports": [], "digests": [], "tokens": [], "expected": []}
    for version in ("1", "2"):
        run.step_and_save(version)
        seen["reports"].append(run.update(version))
        seen["tokens"].append(run.tokens())
        seen["digests"].append(run.live_digests(version))
        seen["expected"].append(run.expected_tokens(version))
    run.engine.shutdown()
    return seen


def start_only(job: dict[str, Any]) -> list[str]:
    """How the start of an engine that cannot be updated fails."""
    return refusal_of(lambda: Job(job))


def run(folder: Path, trainers: int, source_tp: int, target_tp: int, dtype: str, transport: str) -> Any:
    """What each trainer rank has seen, and what a stock load of its checkpoints puts on every engine rank."""
    job = {"source_tp": source_tp, "target_tp": target_tp, "dtype": dtype, "transport": transport}
    ranks = run_trainers(trainers, two_updates, folder, bucket_bytes=MIB, **job)
    checkpoints = [folder / f"checkpoint-{version}" for version in ("1", "2")]
    loads = stock_digests(folder / "model", checkpoints, tp_size=target_tp, dtype=dtype)
    return ranks, [[load[rank] for rank in range(target_tp)] for load in loads]


def test_fsdp2_over_tp_into_a_larger_engine_is_bit_exact(tmp_path: Path) -> None:
    """On four trainer ranks, point to point into a TP=4 engine."""
    (seen, *others), expected = run(tmp_path, 4, 2, 4, "bfloat16", "p2p")
    assert seen["digests"] == expected
    assert expected[0] != expected[1]
    for other in others:
        assert other["reports"] == list(map(of_others, seen["reports"]))
        assert other["tokens"] == seen["tokens"]
    first, second = seen["reports"]
    assert {"trace", "plan", "connect", "move"} <= set(first["seconds"])
    assert not {"trace", "plan", "connect"} & set(second["seconds"])
    assert second["transport"] == "p2p"
    received = sum(rank["received_bytes"] for rank in second["engine_ranks"])
    assert received == sum(rank["sent_bytes"] for rank in second["trainer_ranks"]) > 0
    for rank in first["engine_ranks"] + second["engine_ranks"]:
        assert rank["peak_extra_bytes"] <= 2 * MIB + 8 * MIB
        assert rank["least_bytes"] == rank["received_bytes"]


@pytest.mark.sweep
@pytest.mark.parametrize(("trainers", "source_tp"), [(4, 4), (3, 1)], ids=["tp=4", "fsdp=3"])
def test_a_smaller_engine_is_bit_exact_and_says_what_transformers_says(
    trainers: int, source_tp: int, tmp_path: Path
) -> None:
    """To TP=2, in float32, where tokens are decided by the weights and not by rounding."""
    (seen, *_), expected = run(tmp_path, trainers, source_tp, 2, "float32", "broadcast")
    assert seen["digests"] == expected
    assert seen["tokens"] == seen["expected"]
    assert seen["tokens"][0] != seen["tokens"][1]
    for report in seen["reports"]:
        assert all(r["received_bytes"] >= r["least_bytes"] for r in report["engine_ranks"])


def test_an_engine_without_the_plugin_is_noticed_at_its_start(tmp_path: Path) -> None:
    job = {"source_tp": 2, "target_tp": 1, "dtype": "float32", "bucket_bytes": MIB}
    ranks = run_trainers(2, start_only, tmp_path, environment=WITHOUT_PLUGIN, **job)
    assert ranks[0] == ranks[1]
    kind, message = ranks[0]
    assert kind == "Unsupported"
    assert "SGLANG_PLUGINS" in message
