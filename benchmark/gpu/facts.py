"""What the battery ran on, and the file of its results."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmark.gpu.item import Row
from benchmark.gpu.peer import Here, Peer
from benchmark.gpu.place import DEVICE, GIB, Place
from sglang_reshard.version import __version__

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmark" / "results" / "gpu.json"


def of(place: Place) -> dict[str, Any]:
    """Asks another process: this one must not use the GPU before it forks others."""
    peer = Peer(place)
    try:
        found: dict[str, Any] = peer.call(_here)
        return found
    finally:
        peer.stop()


def _here(here: Here) -> dict[str, Any]:
    known = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB),
        "count": torch.cuda.device_count(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    if here.place.rehearsed:
        return {**known, "gpus": [], "driver": "none: rehearsed on virtual GPUs"}
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    gpu = torch.cuda.get_device_properties(DEVICE)
    return {
        **known,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "gpu_memory_gib": round(gpu.total_memory / GIB, 1),
        "multiprocessors": gpu.multi_processor_count,
        "driver": (driver.stdout.split("\n") or [""])[0].strip(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "kernel": platform.release(),
    }


def _cpu() -> str:
    with open("/proc/cpuinfo") as f:
        return next((line.partition(":")[2].strip() for line in f if line.startswith("model name")), platform.machine())


def save(path: Path, host: dict[str, Any], rows: Sequence[Row], command: str, verdict: str) -> None:
    """Writes a list of a header and rows, a line each, as `benchmark.results` does; that needs SGLang's version."""
    head = {
        "header": True,
        "host": host,
        "versions": {"python": host["python"], "torch": host["torch"], "sglang-reshard": __version__},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "verdict": verdict,
    }
    lines = [head, *map(msgspec.to_builtins, rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(msgspec.json.encode(line).decode() for line in lines) + "\n]\n")


def commit() -> str:
    """With a plus when the tree has changes; what a bundle says of itself outside a repository."""
    said = REPOSITORY / "COMMIT"
    if said.exists():
        return said.read_text().strip()
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return run.stdout.strip()
