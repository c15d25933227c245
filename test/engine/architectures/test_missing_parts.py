"""What a trainer lacks of SGLang's fused parameters stays, if frozen= names it, and the rest is as stock loads it.

The reference is SGLang's own load of the engine's checkpoint with the trainer's tensors in it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from examination import Weights, built, said, specs_of
from rank_jobs import run_jobs
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest.digests import digests
from sglang_reshard.trace.program import MayStay
from sglang_reshard.trace.stock_load import EngineStart
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, tiny_checkpoints, write_checkpoint
from support.checkpoints.tiny_configs import IN_BLOCKS
from support.live_memory import differing
from tools.oracle.replay import replay

SHARED = {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED_PARTS = r"layers\.[23]\.self_attn\.(k_proj|v_proj|k_norm)"


class Case(NamedTuple):
    """A checkpoint, the names that its trainer lacks, and the ranks of the engines: TP and rank."""

    writer: str
    unsent: str
    ranks: tuple[tuple[int, int], ...]
    options: dict[str, Any]
    frozen: tuple[str, ...]


CASES = {
    "shared": Case("Gemma4ForCausalLM", SHARED_PARTS, ((1, 0), (2, 1)), {"instead": SHARED}, ("*.[23].self_attn*",)),
    "shared, of a whole model": Case(
        "Gemma4ForConditionalGeneration",
        SHARED_PARTS,
        ((2, 1),),
        {"instead": {"text_config": SHARED}},
        ("*.[23].self_attn*",),
    ),
    "shared, Gemma-3n": Case(
        "Gemma3nForCausalLM", SHARED_PARTS, ((2, 1),), {"instead": SHARED}, ("*.[23].self_attn*",)
    ),
    "experts": Case("Qwen3MoeForCausalLM", r"layers\.0.*experts\.[15]\.(up|down)", ((2, 1),), {}, ("*.experts.*",)),
    "block-fp8": Case("Qwen3ForCausalLM", r"layers\.0.*k_proj", ((2, 1),), {"fp8": True}, ("*.k_proj.weight*",)),
}


def published(folder: Path, seed: int) -> Weights:
    """The checkpoint, with tensors of shared layers as those that share with them have them."""
    weights, generator = read_weights(folder), torch.Generator().manual_seed(seed)
    for name, tensor in list(weights.items()):
        if found := re.fullmatch(r"(.*layers\.)([01])(\.self_attn\.(?:k_proj|v_proj|k_norm)\.weight)", name):
            other = f"{found[1]}{int(found[2]) + 2}{found[3]}"
            if other not in weights:
                weights[other] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return weights


def write(root: Path) -> None:
    # For two ranks with whole blocks.
    tiny_checkpoints.IN_BLOCKS = dataclasses.replace(IN_BLOCKS, wide=1024, narrow=512)
    for name, case in CASES.items():
        for seed in (1, 2):
            write_checkpoint(case.writer, root / f"{name} {seed}", seed=seed, **case.options)


def updated(root: Path, name: str, tp: int, rank: int) -> dict[str, Any]:
    case, folders = CASES[name], [root / f"{name} {seed}" for seed in (1, 2)]
    try:
        model = built(str(folders[0]), True, {"tp_size": tp, "tp_rank": rank})
        start = published(folders[0], 1)
        load(model, start)
    except (Exception, SystemExit) as error:
        return {"cannot": said(error, str(root))}
    sent = {n: t for n, t in published(folders[1], 2).items() if not re.search(case.unsent, n)}
    traced = functools.partial(trace, model, specs_of(sent), functools.partial(EngineStart, specs_of(start)))
    try:
        traced()
    except ReshardError as error:
        refused = str(error)
    way_out = re.search(r"pass frozen=(\[.*?\]) to", refused)
    assert way_out, refused
    seen: dict[str, Any] = {
        "missing": sorted(start.keys() - sent.keys()),
        "refused": refused,
        "kept": [],
        "unequal": [],
    }
    for frozen in (tuple(ast.literal_eval(way_out[1])), case.frozen):
        load(model, start)
        before = digests(model)
        program = traced(may_stay=MayStay(frozen))
        replay(program, sent)
        ours = digests(model)
        load(model, start | sent)
        seen["unequal"].append(differing(ours, digests(model)))
        seen["moved"] = differing(before, ours)
        seen["kept"].append(program.kept)
    return seen


def load(model: torch.nn.Module, weights: Weights) -> None:
    with torch.no_grad():
        model.load_weights(iter([(n, t.clone()) for n, t in weights.items()]))  # type: ignore[operator]


pytestmark = [pytest.mark.engine]
# With the transformers of the pinned SGLang neither of the two can build its config.
UNSUPPORTED = {"0.5.12": {"shared, Gemma-3n"}, "0.5.23": {"shared, of a whole model"}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    jobs = [(name, tp, rank) for name, case in CASES.items() for tp, rank in case.ranks]
    found = run_jobs(updated, jobs, tmp_path_factory.mktemp("missing parts"), before=write, ranks=4)
    return [(name, seen) for name, *_, seen in found]


def test_each_case_is_one_that_stock_sglang_loads(found: list[tuple[str, dict[str, Any]]]) -> None:
    assert len(found) == sum(len(case.ranks) for case in CASES.values())
    assert {name for name, seen in found if "cannot" in seen} == UNSUPPORTED[metadata.version("sglang")]


def test_the_frozen_of_the_refusal_and_wider_patterns_leave_exactly_what_is_missing(
    found: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, seen in found:
        if "cannot" in seen:
            continue
        assert seen["unequal"] == [[], []], name
        assert len(seen["moved"]) > 10
        assert "is not written completely" in seen["refused"]
        assert any(missing in seen["refused"] for missing in seen["missing"])
        kept, by_wider_patterns = seen["kept"]
        assert kept == by_wider_patterns
        parts = {re.sub(r".*\[|\]$", "", part) for part in kept}
        assert parts <= set(seen["missing"]) or name == "shared, of a whole model"
        assert all("[" in part or "k_norm" in part for part in kept)
