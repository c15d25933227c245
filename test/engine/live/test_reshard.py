"""Real stock engines, brought to a trainer's weights: what every engine rank then holds, and says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.reports import of_others
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

pytestmark = [pytest.mark.engine]
MIB = 1 << 20


def expected_digests(folder: Path, versions: list[str], tp_size: int, dtype: str) -> dict[str, list[dict[str, str]]]:
    """What a stock load of the trainer's checkpoints puts on every engine rank, by version."""
    checkpoints = [folder / f"checkpoint-{v}" for v in versions]
    loads = stock_digests(folder / "model", checkpoints, tp_size=tp_size, dtype=dtype)
    return {v: [load[rank] for rank in range(tp_size)] for v, load in zip(versions, loads, strict=True)}


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """FSDP2 over TP=2 on four trainer ranks, point to point into a TP=4 engine in bfloat16."""
    folder = tmp_path_factory.mktemp("life")
    ranks = run_trainers(
        4,
        "reshard_job:life_of_an_engine",
        folder,
        source_tp=2,
        target_tp=4,
        dtype="bfloat16",
        bucket_bytes=MIB,
        transport="p2p",
    )
    return {"ranks": ranks, "expected": expected_digests(folder, ["1", "2"], 4, "bfloat16"), **ranks[0]}


def test_fsdp2_over_tp_into_a_larger_engine_is_bit_exact(life: dict[str, Any]) -> None:
    assert life["digests"]["1"] == life["expected"]["1"]
    assert life["digests"]["2"] == life["expected"]["2"]
    assert life["digests"]["1"] != life["digests"]["2"]


def test_every_trainer_rank_is_told_the_same(life: dict[str, Any]) -> None:
    for key in ("first", "second", "third"):
        assert [rank[key] for rank in life["ranks"][1:]] == [of_others(life[key])] * 3
    for key in ("refusals", "tokens"):
        assert all(rank[key] == life[key] for rank in life["ranks"])


def test_a_second_update_prepares_nothing(life: dict[str, Any]) -> None:
    assert {"trace", "plan", "connect", "move"} <= set(life["first"]["seconds"])
    assert not {"trace", "plan", "connect"} & set(life["second"]["seconds"])


def test_trainer_ranks_sent_what_engine_ranks_received(life: dict[str, Any]) -> None:
    assert life["second"]["transport"] == "p2p"
    sent, received = (
        sum(rank[key] for rank in life["second"][side])
        for side, key in (("trainer_ranks", "sent_bytes"), ("engine_ranks", "received_bytes"))
    )
    assert sent == received > 0


def test_memory_stays_within_two_buckets(life: dict[str, Any]) -> None:
    for update in ("first", "second", "third"):
        for rank in life[update]["engine_ranks"]:
            assert rank["peak_extra_bytes"] <= 2 * MIB + 8 * MIB
            assert rank["least_bytes"] == rank["received_bytes"]


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("same version", ["EngineRefused", "already version '1'"]),
        ("missing", ["EngineRefused", "layers.1.mlp.down_proj.weight"]),
        ("partly on one rank", ["Mismatch", "trainer rank 1"]),
        ("offloaded", ["EngineRefused", "resume_memory_occupation"]),
    ],
)
def test_a_mistake_is_refused_by_name(life: dict[str, Any], mistake: str, says: list[str]) -> None:
    assert all(word in " ".join(life["refusals"][mistake]) for word in says), life["refusals"][mistake]


def test_after_mistakes_the_old_weights_serve(life: dict[str, Any]) -> None:
    assert life["digests"]["1 after mistakes"] == life["digests"]["1"]
    assert life["tokens"]["1 after mistakes"] == life["tokens"]["1"]


def test_stock_updates_work_between_ours(life: dict[str, Any]) -> None:
    assert life["digests"]["1 by stock"] == life["expected"]["1"]
    assert life["digests"]["2 again"] == life["expected"]["2"]
    assert life["version"] == "3"


@pytest.mark.parametrize(
    ("trainers", "source_tp"),
    [pytest.param(4, 4, id="tp=4"), pytest.param(3, 1, id="fsdp=3")],
)
@pytest.mark.sweep
def test_a_smaller_engine_is_bit_exact_and_says_what_transformers_says(
    trainers: int, source_tp: int, tmp_path: Path
) -> None:
    """To TP=2, in float32, where tokens are decided by the weights and not by rounding."""
    ranks = run_trainers(
        trainers,
        "reshard_job:two_updates",
        tmp_path,
        source_tp=source_tp,
        target_tp=2,
        dtype="float32",
        bucket_bytes=MIB,
        transport="broadcast",
    )
    seen = ranks[0]
    expected = expected_digests(tmp_path, ["1", "2"], 2, "float32")
    assert seen["digests"] == [expected["1"], expected["2"]]
    assert seen["tokens"] == seen["expected"]
    assert seen["tokens"][0] != seen["tokens"][1]
    for report in seen["reports"]:
        assert all(r["received_bytes"] >= r["least_bytes"] for r in report["engine_ranks"])


def test_an_engine_without_the_plugin_is_noticed_at_its_start(tmp_path: Path) -> None:
    ranks = run_trainers(
        2,
        "reshard_job:start_only",
        tmp_path,
        environment={"SGLANG_PLUGINS": "somebody-elses"},
        source_tp=2,
        target_tp=1,
        dtype="float32",
        bucket_bytes=MIB,
        transport="auto",
    )
    assert ranks[0] == ranks[1]
    kind, message = ranks[0]
    assert kind == "Unsupported"
    assert "SGLANG_PLUGINS" in message
