"""The environment of a benchmark's processes, which import `benchmark` and `tools` from the checkout."""

from __future__ import annotations

import os
from pathlib import Path

from benchmark.results import REPOSITORY
from sglang_reshard.selftest import environment as quiet


def environment(folder: Path, engine_tp: int, device: str, *model_types: str) -> dict[str, str]:
    """As `selftest.environment` has it, for processes that are started anywhere."""
    common = quiet.environment(folder, engine_tp, device, *model_types)
    return common | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [common.get("PYTHONPATH")])])}
