"""Updates all engine ranks of some block-fp8 engines in bfloat16, and answers with a line of JSON for each.

Run as a script by test_block_fp8_ranks.py: SGLang chooses its code paths at import.

    block_fp8_ranks.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from examination import begin, examine
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from support.checkpoints import tiny_checkpoints, write_checkpoint
from support.checkpoints.tiny_configs import IN_BLOCKS
from support.scripts import answer

ARCHITECTURES = {
    "Qwen3ForCausalLM": ((1, 1), (2, 1), (4, 1)),
    "Qwen3MoeForCausalLM": ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2)),
    "DeepseekV3ForCausalLM": ((1, 1), (2, 1), (4, 1), (4, 2)),
}  # with their engines: TP and EP
DEADLINE_S = 1400


def main() -> None:
    root = Path(sys.argv[1])
    begin(4)
    # For four ranks with whole blocks.
    tiny_checkpoints.IN_BLOCKS = dataclasses.replace(IN_BLOCKS, wide=1024, narrow=512)
    for architecture in ARCHITECTURES:
        write_checkpoint(architecture, root / architecture, fp8=True)

    def work(job: tuple[str, int, int, int]) -> dict[str, object]:
        architecture, tp, ep, rank = job
        found = examine(str(root / architecture), tp_size=tp, ep_size=ep, tp_rank=rank)
        return dataclasses.asdict(found)

    jobs = [(name, tp, ep, rank) for name, runs in ARCHITECTURES.items() for tp, ep in runs for rank in range(tp)]
    for job, found in run_in_forks(work, jobs, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([*job, found]))


if __name__ == "__main__":
    main()
