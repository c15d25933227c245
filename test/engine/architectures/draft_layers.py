"""Traces targets together with drafts on SGLang's CPU code paths, and answers with a line of JSON for each rank.

Run as a script by test_draft_layers.py: SGLang chooses its code paths at import.

    draft_layers.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

from examination import Finding, begin, examine, remember_modules
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from support.checkpoints import DRAFT, PUBLISHED, write_checkpoint
from support.scripts import answer

# Two are a layer of the target's checkpoint, the others have one of their own.
DRAFTS = (
    "DeepseekV3ForCausalLMNextN",
    "Glm4MoeForCausalLMNextN",
    "LlamaForCausalLMEagle",
    "LlamaForCausalLMEagle3",
)
# A target that keeps the whole vocabulary on each rank, of which the draft gets a part.
OF_GEMMA = "LlamaForCausalLMEagle3 of Gemma3ForCausalLM"
TP, DEADLINE_S = 2, 400


def examined(root: Path, name: str, rank: int, without: str) -> Finding:
    """without  tensors with this in their name are in the checkpoint, and no update sends them"""
    architecture, _, target = name.partition(" of ")
    writer = PUBLISHED[architecture].writer
    assert writer is not None
    folder = root / f"{name}-{rank}-{without}"
    write_checkpoint(writer, folder, architecture=architecture)
    if target:
        of_llama = (folder / DRAFT).rename(root / f"{folder.name}-{DRAFT}")
        shutil.rmtree(folder)
        write_checkpoint(target, folder)
        of_llama.rename(folder / DRAFT)
    return examine(str(folder), gpu=False, draft=True, unsent=without, tp_size=TP, tp_rank=rank)


def main() -> None:
    root = Path(sys.argv[1])
    begin(TP, gpu=False)
    remember_modules()
    jobs = [(name, rank, "") for name in (*DRAFTS, OF_GEMMA) for rank in range(TP)] + [(DRAFTS[0], 0, "eh_proj")]
    for job, finding in run_in_forks(lambda j: examined(root, *j), jobs, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([*job, dataclasses.asdict(finding)]))


if __name__ == "__main__":
    main()
