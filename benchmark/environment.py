"""The environment of a benchmark's processes: quiet, offline, and with no more of SGLang's models than it needs."""

from __future__ import annotations

import os
from pathlib import Path

from benchmark.demo.model_modules import DISABLED_VARIABLE, unneeded_modules
from benchmark.results import REPOSITORY
from sglang_reshard.testing import cpu_host


def environment(folder: Path, engine_tp: int, device: str, *model_types: str) -> dict[str, str]:
    """For processes that leave their temporary files in `folder`, and import only the models of `model_types`."""
    temporary = folder / "tmp"
    temporary.mkdir()
    common = {
        **os.environ,
        "TMPDIR": str(temporary),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        DISABLED_VARIABLE: ",".join(unneeded_modules(*model_types)),
    }
    if device == "cpu":
        common |= {"CUDA_VISIBLE_DEVICES": "", **cpu_host.environment(engine_tp)}
    path = [str(REPOSITORY), *filter(None, [common.get("PYTHONPATH")])]
    return common | {"PYTHONPATH": os.pathsep.join(path)}
