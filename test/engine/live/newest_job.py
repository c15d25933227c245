"""What the trainer ranks of test_newest.py do with an engine of the newest SGLang; every one runs it in step."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from reshard_job import PROMPTS, Job
from sglang_reshard.patches.shared_segments import segments_of
from support.refusals import refusal_of

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
    from sglang_reshard.patches import torn_weights

    torn_weights.mark(engine.tokenizer_manager, REASON)
