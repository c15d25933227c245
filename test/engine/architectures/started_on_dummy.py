"""Updates engine ranks that were started on dummy weights, and compares them with ranks that stock SGLang starts.

Run as a script by test_started_on_dummy.py: SGLang chooses its code paths at import. It answers with a line of JSON for
each architecture and rank.

    started_on_dummy.py FOLDER
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from examination import built, said
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.tracer import trace
from support.checkpoints import read_weights, write_checkpoint
from support.checkpoints.tiny_checkpoints import write_weights
from support.live_memory import differing
from support.scripts import answer
from support.sglang_state import published_arguments
from tools.oracle.digests import digests
from tools.oracle.replay import replay

TP, SEEDS, DEADLINE_S = 2, (1, 2), 500
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


def specs_of(weights: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]


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


def work(root: Path, job: tuple[str, int, bool]) -> dict[str, Any]:
    name, rank, updates = job
    try:
        if updates:
            return updated(root, name, rank)
        return {"digests": started(folder_of(root, name, SEEDS[-1]), rank)}
    except (Exception, SystemExit) as error:
        return {"cannot" if updates else "stock_cannot": said(error, str(root))}


def main() -> None:
    root = Path(sys.argv[1])
    choose_code_paths(TP, gpu=True)
    import_before_forks()
    names = list(ARCHITECTURES)
    written = run_in_forks(functools.partial(write, root), names, processes=2, deadline_seconds=DEADLINE_S)
    assert len(list(written)) == len(names)
    jobs = [(name, rank, updates) for name in names for rank in range(TP) for updates in (False, True)]
    found = dict(run_in_forks(functools.partial(work, root), jobs, processes=2, deadline_seconds=DEADLINE_S))
    for name, rank, updates in jobs:
        if updates:
            seen, fresh = found[name, rank, True], found[name, rank, False]
            ours, stocks = seen.pop("digests", {}), fresh.pop("digests", {})
            answer(json.dumps([name, rank, {**fresh, **seen, "differing": differing(ours, stocks), "of": len(stocks)}]))


if __name__ == "__main__":
    main()
