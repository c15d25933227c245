"""Tries models of images and sound, and answers with a line of JSON for each engine rank.

Run as a script by test_multimodal.py: SGLang chooses its code paths at import.

    multimodal.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from examination import Finding, examine
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from support.checkpoints import write_checkpoint
from support.scripts import answer

# Of SGLang's registry, those whose tiny config of transformers' own class SGLang builds and loads on this host.
ARCHITECTURES = (
    "GlmAsrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
TP, DEADLINE_S = 2, 400


def main() -> None:
    root = Path(sys.argv[1])
    choose_code_paths(TP, gpu=True)
    import_before_forks()

    def work(name: str) -> Finding:
        write_checkpoint(name, root / name, multimodal=True)
        return examine(str(root / name), tp_size=TP, tp_rank=TP - 1)

    for name, finding in run_in_forks(work, ARCHITECTURES, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([name, dataclasses.asdict(finding)]))


if __name__ == "__main__":
    main()
