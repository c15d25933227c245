"""vLLM in an environment of its own, below the project's: `make setup-vllm`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.rank_scripts import run_ranks

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "vllm" / "bin" / "python"
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make setup-vllm")
_LIMIT_S = 600


def run_job(job: Path, ranks: int, arguments: dict[str, Any], folder: Path) -> list[Any]:
    """Runs a script on so many ranks with vLLM's Python, see `run_ranks`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "test"), str(ROOT), str(ROOT / "python")]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM wants a NUMA node for each worker
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    return run_ranks(PYTHON, job, ranks, arguments, folder, environment, _LIMIT_S)
