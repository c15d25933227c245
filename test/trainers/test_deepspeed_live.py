"""ZeRO-3 trains a transformers model on three ranks and updates a real SGLang engine between its optimizer steps.

What every engine rank holds is compared with a stock load of what DeepSpeed itself gathers, what the engine says with
transformers' greedy tokens.
"""

from pathlib import Path
from typing import Any

import pytest

from support.deepspeed_env import FOLDER
from support.trainer_rows import shown
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

pytestmark = [
    pytest.mark.engine,
    pytest.mark.sweep,
    pytest.mark.skipif(not FOLDER.exists(), reason="DeepSpeed is not installed: make setup-deepspeed"),
]


def test_a_live_engine_follows_zero_3(tmp_path: Path, record_property: Any) -> None:
    engine = {"tp_size": 2, "dtype": "float32"}
    seen, *_ = run_trainers(3, "trainers.deepspeed_live_job:three_versions", tmp_path, engine=engine)
    checkpoints = [tmp_path / version for version in ("1", "2", "3")]
    expected = stock_digests(checkpoints[0], checkpoints, **engine)
    assert [dict(enumerate(version["digests"])) for version in seen] == expected
    assert [version["tokens"] for version in seen] == [version["expected"] for version in seen]
    assert len({str(version["tokens"]) for version in seen}) == 3
    for version in seen:
        ranks = version["report"]["engine_ranks"]
        assert sum(r["received_bytes"] for r in ranks) == sum(r["least_bytes"] for r in ranks) > 0
    record_property("trainer", shown("DeepSpeed ZeRO-3, a live SGLang engine", "the module", "auto", "run", 1.0))
