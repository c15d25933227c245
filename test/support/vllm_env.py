"""vLLM in an environment of its own, below the project's: `make setup-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "vllm" / "bin" / "python"
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make setup-vllm")
_LIMIT_S = 600


def run_job(job: Path, ranks: int, arguments: dict[str, Any], folder: Path) -> list[Any]:
    """Runs a script on so many ranks with vLLM's Python. Returns what each rank has written to its file, as JSON.

    A rank gets its number, the number of ranks, a folder and the arguments.
    """
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
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [PYTHON, job, str(rank), str(ranks), folder, json.dumps(arguments)]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-6000:] for log in logs)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
