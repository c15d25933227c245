"""examples/slime_weight_updater.py in a stand-in of slime's and miles' loops, on four ranks of a Megatron-Core trainer.

slime and miles themselves need GPUs. With their packages in the folder SLIME_SOURCE, an environment variable, tests use
their own converters and names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.scripts import answers
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

JOB = Path(__file__).parent / "slime_updater_job.py"
RANKS, TP = 4, 2
SIZES = {"hidden": 128, "heads": 8, "groups": 4, "head": 32, "mlp": 192, "vocabulary": 509, "positions": 4096}
LIVE = {"kind": "qwen3", "tp": 2, "pp": 2}

# As `support.megatron_models.Case`, which imports Megatron-Core. The other ranks of four are data parallel.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp4": ("slime", {"kind": "qwen3", "tp": 4, "groups": 4}),
    "tp2 bias pp2 tied": ("slime", {"kind": "qwen2", "tp": 2, "pp": 2, "tied": True}),
    "tp2 inside a group": ("slime", {"kind": "qwen2", "tp": 2, "groups": 1}),
    "tp2 pp2 vp2 flat": ("slime", {"kind": "qwen3", "tp": 2, "pp": 2, "vp": 2, "layers": 4, "flat": True}),
    "tp2 ep2 etp2": ("slime", {"kind": "qwen3_moe", "tp": 2, "ep": 2, "etp": 2}),
    "pp2 ep2": ("slime", {"kind": "qwen3_moe", "pp": 2, "ep": 2}),
    "miles, tp2": ("miles", {"kind": "qwen3", "tp": 2}),
    "miles, tp2 pp2 ep2": ("miles", {"kind": "qwen3_moe", "tp": 2, "pp": 2, "ep": 2}),
}


def test_all_ranks_shards_put_together_are_the_checkpoint() -> None:
    assert answers(JOB, CASES) == dict.fromkeys(CASES, [[]] * RANKS)


@pytest.mark.engine
@pytest.mark.sweep
@pytest.mark.usefixtures("forks")
def test_a_server_follows_the_trainer_s_loop(tmp_path: Path) -> None:
    """A server as slime starts it. Its live tensors are compared with a stock load of what transformers has written."""
    job = "trainers.slime_updater_job:updates"
    seen, *others = run_trainers(RANKS, job, tmp_path, case=SIZES | LIVE, tp_size=TP)
    first, second = stock_digests(tmp_path / "1", [tmp_path / "1", tmp_path / "2"], tp_size=TP, dtype="float32")
    # The update that is refused leaves the second version.
    loaded = [first, second, second, first, second]
    assert first != second
    assert [dict(enumerate(live)) for live in seen["digests"]] == loaded
    words = {"1": seen["expected"][0], "2": seen["expected"][1]}
    assert seen["tokens"] == [words[version] for version in ("1", "2", "2", "1", "2")]
    assert words["1"] != words["2"]
    assert seen["versions"] == ["1", "2", "2", "3", "4"], "miles goes on from the server's version"
    assert "norm" in seen["refused"][1]
    assert seen["refused"][0] == "EngineRefused"
    # What the engine ranks received is what they hold of the checkpoint, and no more.
    assert [rank["metrics"] for rank in others] == [seen["metrics"]] * (RANKS - 1)
    assert {str(metrics) for metrics in seen["metrics"]} == {str(seen["metrics"][0])}
