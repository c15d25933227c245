"""Runs a function on torchrun's ranks: `torchrun -m support.trainers MODULE:FUNCTION JSON`, results as JSON files.

The function gets the JSON's object and returns what its test wants to know. It has to run in processes of
its own, because an engine cannot be started under pytest's.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEST = Path(__file__).parent.parent


def run_trainers(
    ranks: int,
    function: str,
    folder: Path,
    *,
    deadline_s: float = 300,
    environment: Mapping[str, str] | None = None,
    **job: Any,
) -> list[Any]:
    """What `function` ("module:name" of a module beside the tests) returned on each of `ranks` trainer ranks."""
    from sglang_reshard import cpu_host

    results = folder / "results"
    results.mkdir()
    log = folder / "log"
    path = os.pathsep.join([str(TEST), str(TEST / "engine"), cpu_host.environment(1)["PYTHONPATH"]])
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m",
             "support.trainers", function, json.dumps({"folder": str(folder), **job})],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    errors = "\n".join(f.read_text() for f in sorted(results.glob("*.error")))
    assert code == 0, f"trainer ranks ended with {code}\n{errors}\n{log.read_text()[-6000:]}"
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(ranks)]


def _end(process: subprocess.Popen[Any]) -> None:
    """End torchrun, its workers, and the engine's processes, which are all of the session that we started."""
    import psutil

    ours = [p for p in psutil.process_iter() if _session_of(p.pid) == process.pid]
    for p in ours:
        if p.pid != process.pid:
            p.kill()
    process.kill()
    process.wait()


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def main() -> None:
    import torch.distributed as dist

    name, job = sys.argv[1], json.loads(sys.argv[2])
    results = Path(job["folder"]) / "results"
    module, function = name.split(":")
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    try:
        value = getattr(importlib.import_module(module), function)(job)
        (results / f"{rank}.json").write_text(json.dumps(value))
    except BaseException:
        (results / f"{rank}.error").write_text(f"trainer rank {rank}:\n{traceback.format_exc()}")
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
