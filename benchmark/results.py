"""The JSON files of results: a list of a header and rows, a line each, so that a change is a change of its line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from sglang_reshard.selftest import host

REPOSITORY = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "results"
BENCH, QUICK, SCALING = FOLDER / "bench.json", FOLDER / "bench-quick.json", FOLDER / "scaling.json"

Head = dict[str, Any]
Row = dict[str, Any]
Rows = list[Row]


def header(command: str, notes: Sequence[str]) -> dict[str, Any]:
    """What it ran on and with; no name and no path of the machine. notes: what was refused or skipped, and why."""
    facts = host.facts()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "header": True,
        "host": {"cpu": facts["cpu"], "cores": facts["cores"], "memory_gib": facts["memory_gib"], "gpus": gpus},
        "versions": {
            "python": platform.python_version(),
            **{name: facts[name] for name in ("torch", "sglang", "sglang-reshard")},
        },
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "notes": list(notes),
    }


def commit() -> str:
    """With a plus if the tree has changes; what the file COMMIT says, which a bundle has in place of a repository.

    Results do not count as changes: a command that writes several files would be none of a commit after the first.
    """
    said = REPOSITORY / "COMMIT"
    if said.exists():
        return said.read_text().strip()
    changes = _git("status", "--porcelain", "--untracked-files=no", ":/", ":!benchmark/results", ":!docs/results")
    return _git("rev-parse", "--short=12", "HEAD") + "+" * bool(changes)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()


def load_of_host() -> str:
    return f"The host's {os.cpu_count()} cores had a load of {os.getloadavg()[0]:.1f}, this run included."


def save(path: Path, head: dict[str, Any], rows: Sequence[msgspec.Struct | dict[str, Any]]) -> None:
    found = [head, *(_rounded(msgspec.to_builtins(row)) for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


def load(path: Path) -> tuple[dict[str, Any], Rows]:
    head, *rows = json.loads(path.read_text())
    if not head.get("header"):
        raise ValueError(f"{path.name} does not begin with a header")
    return head, rows


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Six significant digits say more than two runs have in common."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}
