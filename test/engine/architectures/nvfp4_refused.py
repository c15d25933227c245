"""Sends weights in bfloat16 without scales to engine ranks in NVFP4, and answers with a line of JSON for each.

Run as a script by test_quantized_ranks.py: SGLang chooses its code paths at import.

    nvfp4_refused.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from examination import begin, built, remember_modules
from quantization import CASES, MODELS, leave_dummy_weights
from quantized_ranks import set_quantization
from sglang_reshard.cli.plan.forked_jobs import run_in_forks
from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.tracer import trace
from support import blackwell
from support.checkpoints import read_weights, tiny_checkpoints, write_checkpoint
from support.checkpoints.tiny_configs import IN_BLOCKS
from support.scripts import answer
from tools.oracle.digests import digests

METHODS = ("modelopt_fp4", "compressed-tensors, nvfp4")
DEADLINE_S = 300


def main() -> None:
    root = Path(sys.argv[1])
    begin(2)
    remember_modules()
    tiny_checkpoints.TINY = IN_BLOCKS

    def work(job: tuple[str, str, int]) -> tuple[str, bool]:
        method, kind, tp = job
        folder = root / "-".join(map(str, job)).replace(" ", "")
        write_checkpoint(MODELS[kind], folder)
        set_quantization(folder, CASES[method].config)
        blackwell.pretend()
        return refused(folder, tp)

    jobs = [(method, kind, tp) for method in METHODS for kind in MODELS for tp in (1, 2)]
    for job, (error, unchanged) in run_in_forks(work, jobs, processes=2, deadline_seconds=DEADLINE_S):
        answer(json.dumps([*job, error, unchanged]))


def refused(folder: Path, tp: int) -> tuple[str, bool]:
    """Returns the error, empty if there is none, and whether all live tensors are as they were."""
    leave_dummy_weights()
    model = built(str(folder), True, {"tp_size": tp, "tp_rank": tp - 1})
    before, weights = digests(model), read_weights(folder)
    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
    try:
        trace(model, specs)
    except ReshardError as error:
        return f"{type(error).__name__}: {error}", digests(model) == before
    return "", digests(model) == before


if __name__ == "__main__":
    main()
