"""What the battery ran on, and the file of its results."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmark import results
from benchmark.gpu.item import Row
from benchmark.gpu.peer import Here, Peer
from benchmark.gpu.place import DEVICE, GIB, Place
from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.selftest.host import cpu
from sglang_reshard.version import __version__

RESULTS = results.FOLDER / "gpu.json"


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
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB),
        "count": torch.cuda.device_count(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    if here.place.rehearsed:
        gib = here.place.card_gib
        no_driver, copies = "none: rehearsed on virtual GPUs", "virtual kernels"
        return {**known, "gpus": [], "gpu_memory_gib": gib, "driver": no_driver, "copies": copies}
    gpu = torch.cuda.get_device_properties(DEVICE)
    return {
        **known,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "gpu_memory_gib": round(gpu.total_memory / GIB, 1),
        "multiprocessors": gpu.multi_processor_count,
        "driver": driver(),
        "copies": copied_by(DEVICE),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "kernel": platform.release(),
    }


def driver() -> str:
    """Returns its version, by the kernel's module where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if not said.returncode and said.stdout.strip():
            return said.stdout.split("\n")[0].strip()
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[0]
    return "unknown: no nvidia-smi, and no /proc/driver/nvidia/version"


def copied_by(device: torch.device) -> str:
    """Returns what makes copies here: Triton's kernels, or torch's foreach, and then what may be missing."""
    copies = CopyList()
    copies.add(torch.zeros(4, device=device), torch.ones(4, device=device))
    copies.build()
    if copies.launches:
        return f"Triton {importlib.metadata.version('triton')}"
    missing = [
        *(["Triton"] if importlib.util.find_spec("triton") is None else []),
        *(["C compiler"] if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))) else []),
        *(["Python.h"] if not Path(sysconfig.get_path("include"), "Python.h").exists() else []),
    ]
    return "torch's foreach, as Triton cannot be used" + (f": no {' and no '.join(missing)}" if missing else "")


def save(path: Path, host: dict[str, Any], rows: Sequence[Row], command: str, verdict: str) -> None:
    """Writes the rows after a header; that of `benchmark.results` has SGLang's version."""
    head = {
        "header": True,
        "host": host,
        "versions": {"python": host["python"], "torch": host["torch"], "sglang-reshard": __version__},
        "commit": results.commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "verdict": verdict,
    }
    results.save(path, head, rows)


def passed(path: Path, host: dict[str, Any]) -> list[Row]:
    """Returns the rows of items that have passed, if the file is of this commit and of such a GPU."""
    if not path.exists():
        return []
    head, *rows = msgspec.json.decode(path.read_bytes())
    if (head["commit"], head["host"]["gpus"]) != (results.commit(), host["gpus"]):
        raise SystemExit(f"{path} is of commit {head['commit']} on {head['host']['gpus']}; run without --resume")
    return [row for row in msgspec.convert(rows, list[Row]) if row.verdict == "pass"]
