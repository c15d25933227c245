"""Scripts that run once for each rank, under any Python."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_ranks(
    python: str | Path,
    job: Path,
    ranks: int,
    arguments: Any,
    folder: Path,
    environment: Mapping[str, str],
    limit_s: float,
) -> list[Any]:
    """Runs a script on so many ranks. Returns what each rank has written to its file, as JSON.

    A rank gets its number, the number of ranks, a folder and the arguments.
    """
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [python, job, str(rank), str(ranks), folder, json.dumps(arguments)]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(limit_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-6000:] for log in logs)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
