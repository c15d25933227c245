"""Real stock engines of other models and other kinds of parallelism than test_reshard.py has, each updated twice.

What every engine rank holds is compared with a stock load of the same checkpoint, and what the engine says with
what it says after a stock load. Two kinds of engine cannot generate on a CPU, with stock SGLang alone too: with
expert parallelism its CPU kernel for experts takes those of other ranks for an index out of range, and with
dp-attention its CPU attention lacks what a batch without requests asks of it. Their digests are compared all the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import write_checkpoint
from support.trainers import run_trainers
from tools.oracle.stock import stock_digests

pytestmark = [pytest.mark.engine]


@dataclass(frozen=True)
class Case:
    """A model, the trainer's ranks (tensor parallel), and the engine's arguments.

    generates     whether stock SGLang can, on a CPU
    transformers  whether transformers' model computes what SGLang's does
    instead       other values for keys of the tiny config
    """

    model: str
    trainers: int
    engine: dict[str, Any]
    generates: bool = False
    transformers: bool = False
    instead: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.model, f"from{self.trainers}", *(f"{k}={v}" for k, v in self.engine.items())])


# SGLang's CPU attention takes a prefill's latent cache for heads, and runs only where both are equally wide. What it
# says then is not what the model should say, and depends on the weights all the same.
LATENT_AS_WIDE_AS_HEADS = {"kv_lora_rank": 32, "qk_nope_head_dim": 32}
DP_ATTENTION = {"enable_dp_attention": True, "dp_size": 2}
CASES = [
    Case("Qwen3MoeForCausalLM", 2, {"tp_size": 2, "ep_size": 2, **DP_ATTENTION}),
    Case("DeepseekV3ForCausalLM", 3, {"tp_size": 2}, generates=True, instead=LATENT_AS_WIDE_AS_HEADS),
    Case("Qwen3ForCausalLM", 2, {"tp_size": 1, "dp_size": 2}, generates=True, transformers=True),
    Case("Qwen3ForCausalLM", 2, {"tp_size": 1, "pp_size": 2}, generates=True, transformers=True),
]
if os.environ.get("SGLANG_RESHARD_SWEEP"):
    CASES += [
        Case("Qwen3MoeForCausalLM", 2, {"tp_size": 2, "ep_size": 2}),
        Case("Qwen3ForCausalLM", 2, {"tp_size": 2, **DP_ATTENTION}),
        Case("Qwen3MoeForCausalLM", 3, {"tp_size": 2}, generates=True, transformers=True),
        Case("Qwen3MoeForCausalLM", 2, {"tp_size": 4, "ep_size": 2}),
        Case("Qwen3MoeForCausalLM", 2, {"tp_size": 2, "dp_size": 2}, generates=True, transformers=True),
        Case("Qwen3MoeForCausalLM", 2, {"tp_size": 2, "pp_size": 2}, generates=True, transformers=True),
        Case("DeepseekV3ForCausalLM", 5, {"tp_size": 4, "ep_size": 2, **DP_ATTENTION}),
    ]


def assert_exact(live: list[dict[str, str]], expected: dict[int, dict[str, str]]) -> None:
    assert len(live) == len(expected)
    for rank, digests in enumerate(live):
        assert {n: d for n, d in digests.items() if n in expected[rank]} == expected[rank]
        # Latent attention gives kv_b_proj a second name when it first runs; a stock load alone does not.
        second_names = {n for n in digests if n not in expected[rank]}
        assert all(n.replace("attn_mha.", "") in expected[rank] for n in second_names), second_names
        assert all(digests[n] == expected[rank][n.replace("attn_mha.", "")] for n in second_names)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_updates_are_bit_exact_and_say_what_a_stock_load_says(case: Case, tmp_path: Path) -> None:
    checkpoints = [
        write_checkpoint(case.model, tmp_path / version, instead=case.instead, seed=int(version))
        for version in ("1", "2")
    ]
    engine = {"dtype": "float32", **case.engine}
    seen = run_trainers(
        case.trainers,
        "models_job:two_updates",
        tmp_path,
        engine=engine,
        generates=case.generates,
        transformers=case.transformers,
    )[0]
    ranks = range(engine["tp_size"] * engine.get("pp_size", 1))
    expected = stock_digests(checkpoints[0], [*checkpoints, checkpoints[0]], **engine, ranks=ranks)
    for live, stock in zip(seen["digests"], expected, strict=True):
        copies = len(live) // len(stock)  # of data parallel engines
        for copy in range(copies):
            assert_exact(live[copy::copies], stock)
    assert seen["digests"][0] != seen["digests"][1]
    assert "trace" in seen["reports"][0]["seconds"]
    assert "trace" not in seen["reports"][1]["seconds"]
    before, first, second, by_stock = seen["tokens"]
    assert first == by_stock
    if case.generates:
        assert first not in (before, second)
        assert second != before
    if case.transformers:
        assert [first, second] == seen["reference"]
