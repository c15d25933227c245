"""An engine of the newest SGLang that the patches work with: what the others of these tests show of the pinned one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from reshard_job import Job
from sglang_reshard.patches.sglang_versions import NEWEST
from sglang_reshard.patches.shared_segments import segments_of
from support.live_engines import PROMPTS
from support.refusals import refusal_of
from support.sglangs import chosen
from support.trainers import run_trainers

REASON = "engine rank 1 has half of update 7"


def updates_and_mistakes(job: dict[str, Any]) -> dict[str, Any]:
    """Two updates, the second staged; what SGLang itself loads of the same; and what must be refused."""
    import sglang

    run = Job(job)
    first = run.engine.engine  # None on all ranks but the first
    seen: dict[str, Any] = {"version": sglang.__version__, "ours": {}, "stock": {}, "tokens": {}, "expected": {}}
    for version, options in (("1", {}), ("2", {"staged": True})):
        run.step_and_save(version)
        run.update(version, **options)
        seen["tokens"][version] = run.tokens()
        seen["ours"][version] = run.live_digests(version)
        seen["expected"][version] = run.expected_tokens(version)
    seen["said"] = said_version(run)
    seen["cached"] = [cached_tokens(run), cached_tokens(run)]
    run.update("the same", flush_cache="by_version")
    seen["cached"] += [cached_tokens(run), cached_tokens(run)]
    run.update("2")
    seen["same version"] = run.refusal("2")
    if first is not None:
        assert first.begin_weight_update()[0]
    seen["in a session"] = run.refusal("3")
    if first is not None:
        assert first.end_weight_update()[0]
        for version in ("1", "2"):
            assert first.update_weights_from_disk(str(run.checkpoint(version)), load_format="auto")[0]
            seen["stock"][version] = run.live_digests(f"stock {version}")
        tear(first)
    dist.barrier()
    seen["while torn"] = refusal_of(run.tokens)
    run.update("3")
    seen["tokens"]["healed"] = run.tokens()
    had = set() if first is None else segments_of(first.get_all_child_pids())
    run.engine.shutdown()
    seen["segments"] = {"had": [s.name for s in had], "left": [s.name for s in had if s.exists()]}
    return seen


def said_version(run: Job) -> str:
    """The version of the weights that an answer says it comes from."""
    (output,) = run.engine.generate(input_ids=PROMPTS[:1], sampling_params={"temperature": 0, "max_new_tokens": 2})
    return output["meta_info"]["weight_version"]


def cached_tokens(run: Job) -> int:
    """Of a long prompt."""
    (output,) = run.engine.generate(input_ids=[list(range(1000, 1064))], sampling_params={"max_new_tokens": 2})
    return output["meta_info"]["cached_tokens"]


def tear(engine: Any) -> None:
    from sglang_reshard.patches import sound_weights

    sound_weights.mark(engine.tokenizer_manager, REASON)


pytestmark = [pytest.mark.engine]


def test_it_does_what_the_pinned_one_does(tmp_path: Path) -> None:
    """Three trainer ranks with FSDP2, to TP=2, in float32, where tokens are decided by the weights alone."""
    job = {"source_tp": 1, "target_tp": 2, "dtype": "float32", "bucket_bytes": 1 << 20, "transport": "p2p"}
    with chosen("newest"):
        ranks = run_trainers(3, updates_and_mistakes, tmp_path, **job)
    seen = ranks[0]
    assert seen["version"] == str(NEWEST)
    for version in ("1", "2"):
        assert len(seen["ours"][version]) == 2
        assert len(seen["ours"][version][0]) > 10
        assert seen["ours"][version] == seen["stock"][version], "its own load of a checkpoint"
        assert seen["tokens"][version] == seen["expected"][version], "transformers'"
    assert seen["tokens"]["1"] != seen["tokens"]["2"]
    assert seen["said"] == "2"
    for mistake, says in {"same version": "already version '2'", "in a session": "call end_weight_update"}.items():
        for rank in ranks:
            kind, message = rank[mistake]
            assert kind == "EngineRefused"
            assert says in message
    first, second, of_new_weights, again = seen["cached"]
    assert (first, of_new_weights) == (0, 0), "versions of the cache are kept apart"
    assert min(second, again) > 0
    assert seen["while torn"] == ["TornWeights", REASON]
    assert seen["tokens"]["healed"] == seen["tokens"]["2"]
    assert any(name.startswith("sglang_loads_") for name in seen["segments"]["had"])
    assert seen["segments"]["left"] == [], "shared memory"
