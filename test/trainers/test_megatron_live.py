"""Megatron-Core models, on four ranks over gloo, that update a real SGLang engine, twice each.

What every engine rank holds is compared with a stock load of the checkpoint that transformers wrote, what the engine
says with transformers' greedy tokens. With expert parallelism stock SGLang cannot generate on a CPU
(test_server_args_live.py); digests are compared all the same. `make test` has a Megatron-Core trainer of a real server
in test_http_example.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.trainer_rows import shown
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

pytestmark = [pytest.mark.engine, pytest.mark.sweep, pytest.mark.usefixtures("forks")]
RANKS = 4
CONVERTERS = "parameters, by converters like Megatron-Bridge's"
# What SGLang takes on a CPU; a prime vocabulary, which Megatron pads and SGLang pads otherwise.
SIZES = {"hidden": 128, "heads": 8, "groups": 4, "head": 32, "mlp": 192, "vocabulary": 509, "positions": 4096}


@dataclass(frozen=True)
class Case:
    """A Megatron-Core model (support.megatron_models.Case, without SIZES) and the engine's arguments.

    both_tied  whether tied embeddings are listed on both pipeline stages
    generates  whether stock SGLang can, on a CPU
    """

    model: dict[str, Any]
    engine: dict[str, int]
    both_tied: bool = False
    generates: bool = True

    def __str__(self) -> str:
        model = (k if v is True else f"{k}{v}" for k, v in self.model.items() if k != "kind")
        engine = "-".join(k.removesuffix("_size") + str(v) for k, v in self.engine.items())
        return "-".join([self.model["kind"], *model, *["both"] * self.both_tied, "to", engine])


EXPERTS = {"kind": "qwen3_moe", "tp": 2, "ep": 2, "etp": 2}
TIED = {"kind": "qwen3", "tp": 2, "pp": 2, "tied": True}
CASES = [
    Case(TIED, {"tp_size": 4}, both_tied=True),
    Case({**TIED, "vp": 2, "layers": 4}, {"tp_size": 2}),
    Case(EXPERTS, {"tp_size": 2, "ep_size": 2}, generates=False),
    Case(EXPERTS, {"tp_size": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_engine_follows_megatron_core(case: Case, tmp_path: Path, record_property: Any) -> None:
    engine = {"dtype": "float32", **case.engine}
    seen, *others = run_trainers(
        RANKS,
        "trainers.megatron_live_job:two_updates",
        tmp_path,
        case=SIZES | case.model,
        both_tied=case.both_tied,
        engine=engine,
        generates=case.generates,
    )
    checkpoints = [tmp_path / version for version in ("1", "2")]
    expected = stock_digests(checkpoints[0], checkpoints, **engine)
    assert [dict(enumerate(live)) for live in seen["digests"]] == expected
    assert seen["digests"][0] != seen["digests"][1]
    assert sum(rank["logits"] for rank in [seen, *others]) == 2 * RANKS // case.model.get("pp", 1)
    before, first, second = seen["tokens"]
    if case.generates:
        assert [first, second] == seen["expected"]
        assert len({str(tokens) for tokens in (before, first, second)}) == 3
    # What is received is what each engine rank lacked, and no more.
    prepared, ready = (report["seconds"] for report in seen["reports"])
    assert {"trace", "plan"} <= prepared.keys()
    assert not {"trace", "plan"} & ready.keys()
    for report in seen["reports"]:
        received, least = (
            sum(rank[key] for rank in report["engine_ranks"]) for key in ("received_bytes", "least_bytes")
        )
        assert received == least > 0
    record_property("trainer", shown(f"Megatron-Core, {case}", CONVERTERS, "auto", "run", 1.0))
