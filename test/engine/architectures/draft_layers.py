"""Traces targets together with drafts on SGLang's CPU code paths, and answers with a line of JSON for each rank.

Run as a script by test_draft_layers.py: SGLang chooses its code paths at import.

    draft_layers.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from examination import Finding, examine
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from support.checkpoints import PUBLISHED, write_checkpoint
from support.scripts import answer

# Two are a layer of the target's checkpoint, the others have one of their own.
DRAFTS = (
    "DeepseekV3ForCausalLMNextN",
    "Glm4MoeForCausalLMNextN",
    "LlamaForCausalLMEagle",
    "LlamaForCausalLMEagle3",
)
TP, DEADLINE_S = 2, 400


def examined(root: Path, name: str, rank: int, without: str) -> Finding:
    """without  tensors with this in their name are in the checkpoint, and no update sends them"""
    writer = PUBLISHED[name].writer
    assert writer is not None
    folder = root / f"{name}-{rank}-{without}"
    write_checkpoint(writer, folder, architecture=name)
    return examine(str(folder), gpu=False, draft=True, unsent=without, tp_size=TP, tp_rank=rank)


def main() -> None:
    root = Path(sys.argv[1])
    choose_code_paths(TP, gpu=False)
    import_before_forks()
    jobs = [(name, rank, "") for name in DRAFTS for rank in range(TP)] + [(DRAFTS[0], 0, "eh_proj")]
    for job, finding in run_in_forks(lambda j: examined(root, *j), jobs, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([*job, dataclasses.asdict(finding)]))


if __name__ == "__main__":
    main()
