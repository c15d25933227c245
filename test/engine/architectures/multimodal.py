"""Tries models of images and sound, and answers with a line of JSON for each engine rank.

Run as a script by test_multimodal.py: SGLang chooses its code paths at import.

    multimodal.py FOLDER [ARCHITECTURE...]
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from examination import Finding, examine
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks
from support.checkpoints import write_checkpoint
from support.scripts import answer

# Of SGLang's registry, those whose tiny config of transformers' own class SGLang builds and loads on this host, with
# the keys that published configs have otherwise, or that no tiny width goes with.
_HEADS = {"vision_config": {"num_heads": 8}}
_NO_DEEPSTACK = {"vision_config": {"deepstack_visual_indexes": []}}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"vision_config": {"vision_use_head": False}},
    "Glm4vForConditionalGeneration": _HEADS,
    "Glm4vMoeForConditionalGeneration": _HEADS,
    "GlmAsrForConditionalGeneration": {},
    "Llama4ForConditionalGeneration": {},
    "Qwen2AudioForConditionalGeneration": {"audio_config": {"encoder_attention_heads": 8, "encoder_layers": 2}},
    "Qwen2VLForConditionalGeneration": {},
    "Qwen2_5_VLForConditionalGeneration": {},
    "Qwen3VLForConditionalGeneration": {},
    "Qwen3VLMoeForConditionalGeneration": {},
    "Qwen3_5ForConditionalGeneration": _NO_DEEPSTACK,
    "Qwen3_5MoeForConditionalGeneration": _NO_DEEPSTACK,
    "VoxtralForConditionalGeneration": {},
}
TP, DEADLINE_S = 2, 400


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:] or list(ARCHITECTURES)
    choose_code_paths(TP, gpu=True)
    import_before_forks()

    def work(name: str) -> Finding:
        write_checkpoint(name, root / name, multimodal=True, instead=ARCHITECTURES[name])
        return examine(str(root / name), tp_size=TP, tp_rank=TP - 1)

    for name, finding in run_in_forks(work, names, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([name, dataclasses.asdict(finding)]))


if __name__ == "__main__":
    main()
