"""Ranks started on dummy weights are, once updated, what stock SGLang makes of the checkpoint: buffers, unread layers.

The reference is a start on the checkpoint by SGLang alone. One on dummy weights would be wrong in the same places.
"""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examination import built, said, specs_of
from rank_jobs import run_jobs
from sglang_reshard.errors import ReshardError
from sglang_reshard.patches.sglang_versions import OLDEST
from sglang_reshard.selftest.digests import digests
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, write_checkpoint
from support.checkpoints.tiny_checkpoints import write_weights
from support.live_memory import differing
from support.sglang_state import published_arguments
from tools.oracle.replay import replay

TP, SEEDS = 2, (1, 2)
SHARES_INDEXERS, SCALARS, NORMALIZER, BIASES = (
    "GlmMoeDsaForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma2ForCausalLM",
    "WhisperForConditionalGeneration",
)
UNREAD_INDEXER = ".layers.2.self_attn.indexer."  # no checkpoint has it
ARCHITECTURES: dict[str, dict[str, Any]] = {
    SHARES_INDEXERS: {"index_topk_freq": 2, "num_hidden_layers": 4},
    SCALARS: {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    NORMALIZER: {},
    BIASES: {
        f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in (("attention_heads", 8), ("layers", 2))
    },
}


def folder_of(root: Path, name: str, seed: int) -> Path:
    return root / f"{name}-{seed}"


def write(root: Path, name: str) -> None:
    for seed in SEEDS:
        folder = folder_of(root, name, seed)
        write_checkpoint(name, folder, seed=seed, instead=ARCHITECTURES[name])
        if name == SHARES_INDEXERS:  # as published, which transformers' tiny one is not
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"index_topk_freq": 2}))
            kept = {n: t for n, t in read_weights(folder).items() if UNREAD_INDEXER not in n}
            write_weights(kept, folder)


def started(folder: Path, rank: int) -> dict[str, str]:
    """Returns the digests of a rank that stock SGLang has started on a checkpoint."""
    return digests(built(str(folder), True, {"tp_size": TP, "tp_rank": rank, "weights": str(folder)}))


def updated(root: Path, name: str, rank: int) -> dict[str, Any]:
    """Starts on dummy weights, with the hook that an engine has, and updates to both checkpoints."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_reshard.patches import engine_start

    randomize = "sglang.srt.model_loader.loader.initialize_dummy_weights"
    HookRegistry.register(randomize, engine_start.randomize, HookType.AROUND)
    HookRegistry.apply_hooks()
    folders = [folder_of(root, name, seed) for seed in SEEDS]
    model = built(str(folders[0]), True, {"tp_size": TP, "tp_rank": rank})
    arguments = published_arguments()
    config, load = ModelConfig.from_server_args(arguments), LoadConfig(load_format="dummy")
    runner: Any = SimpleNamespace(model=model, server_args=arguments, load_config=load, model_config=config)
    start = functools.cache(functools.partial(engine_start.engine_start, runner, []))
    sent = read_weights(folders[0])
    parameters = {n: t for n, t in sent.items() if not n.endswith("layer_scalar")}
    refused = [refusal(model, parameters, start), refusal(model, sent, None)]
    left_alone: tuple[str, ...] = ()
    for folder in folders:
        weights = read_weights(folder)
        program = trace(model, specs_of(weights), start)
        replay(program, weights)
        left_alone = program.left_alone
    unread = [name for name, _ in model.named_parameters() if UNREAD_INDEXER in name]
    return {"refused": refused, "left_alone": left_alone, "unread": unread, "digests": digests(model)}


def refusal(model: torch.nn.Module, weights: dict[str, torch.Tensor], start: Any) -> str:
    """Returns why these weights are refused; empty if they are not."""
    try:
        trace(model, specs_of(weights), start)
    except ReshardError as error:
        return str(error)
    return ""


def work(root: Path, name: str, rank: int, updates: bool) -> dict[str, Any]:
    try:
        if updates:
            return updated(root, name, rank)
        return {"digests": started(folder_of(root, name, SEEDS[-1]), rank)}
    except (Exception, SystemExit) as error:
        return {"cannot" if updates else "stock_cannot": said(error, str(root))}


pytestmark = [pytest.mark.engine]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("started on dummy")
    run_jobs(write, [(name,) for name in ARCHITECTURES], folder)
    jobs = [(name, rank, updates) for name in ARCHITECTURES for rank in range(TP) for updates in (False, True)]
    seen = {tuple(job): of for *job, of in run_jobs(work, jobs, folder)}
    found = {}
    for case in ((name, rank) for name, rank, updates in jobs if updates):
        fresh, ours = (seen[(*case, updates)] for updates in (False, True))
        stocks = fresh.pop("digests", {})
        differ = differing(ours.pop("digests", {}), stocks)
        found[case] = {**fresh, **ours, "differing": differ, "of": len(stocks)}
    return found


def of(found: dict[tuple[str, int], dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Returns what was seen of an architecture on each engine rank. Skips the test if stock SGLang cannot start it."""
    seen = [found[name, rank] for rank in range(TP)]
    if any("stock_cannot" in one for one in seen) and metadata.version("sglang") != str(OLDEST):
        pytest.skip(seen[0]["stock_cannot"])
    return seen


def test_every_defined_tensor_is_that_of_a_rank_started_on_the_checkpoint(
    found: dict[tuple[str, int], dict[str, Any]],
) -> None:
    started = {case: seen for case, seen in found.items() if "stock_cannot" not in seen}
    assert [seen for seen in started.values() if "cannot" in seen] == []
    assert len(found) == TP * len(ARCHITECTURES)
    assert len(started) == len(found) or metadata.version("sglang") != str(OLDEST)
    for (name, _), seen in started.items():
        assert seen["of"] > 50
        # Memory that stock SGLang never writes differs from start to start, where nothing reads it.
        undefined = seen["left_alone"] if name == BIASES else [n for n in seen["left_alone"] if "k_norm" not in n]
        assert set(seen["differing"]) <= set(undefined), name


def test_a_buffer_of_the_checkpoint_is_refused_if_it_is_not_sent(found: dict[tuple[str, int], dict[str, Any]]) -> None:
    for seen in of(found, SCALARS):
        without_buffers, without_files = seen["refused"]
        assert "layers.0.layer_scalar is a buffer that the loader fills" in without_buffers
        assert "model.state_dict()" in without_buffers
        assert without_files == ""


def test_a_buffer_that_no_checkpoint_has_is_asked_of_nobody(found: dict[tuple[str, int], dict[str, Any]]) -> None:
    for seen in of(found, NORMALIZER):
        assert seen["refused"] == ["", ""]
        assert seen["left_alone"] == []


def test_layers_without_an_indexer_of_their_own_are_taken_as_stock_takes_them(
    found: dict[tuple[str, int], dict[str, Any]],
) -> None:
    for seen in of(found, SHARES_INDEXERS):
        assert sorted(seen["left_alone"]) == sorted(seen["unread"])
        if seen["unread"]:  # SGLang 0.5.23 builds none
            assert "indexer.wq_b.weight is not written by the loader" in seen["refused"][1]


def test_half_a_bias_may_be_left_alone(found: dict[tuple[str, int], dict[str, Any]]) -> None:
    for seen in of(found, BIASES):
        assert len(seen["left_alone"]) == 4
        assert "qkv_proj.bias is not written completely" in seen["refused"][1]
