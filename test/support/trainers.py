"""Runs a function on torchrun's ranks: `torchrun -m support.trainers MODULE:FUNCTION JSON`, results as JSON files.

The function gets the JSON's object and returns what its test wants to know. It has to run in processes of
its own, because an engine cannot be started under pytest's. It may be one of the test's own module.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest import children
from sglang_reshard.testing import cpu_host

TEST = Path(__file__).parent.parent


def run_trainers(
    ranks: int,
    function: Callable[[dict[str, Any]], Any] | str,
    folder: Path,
    *,
    deadline_s: float = 900,
    environment: Mapping[str, str] | None = None,
    **job: Any,
) -> list[Any]:
    """What `function`, or "module:name" of test/engine/live, returned on each of `ranks` trainer ranks."""
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__name__}"
    beside = TEST / "engine" / "live"
    if not isinstance(function, str):
        beside = Path(sys.modules[function.__module__].__file__ or "").parent
    results = folder / "results"
    results.mkdir()
    path = os.pathsep.join([str(TEST), str(TEST.parent), str(beside), cpu_host.environment(1)["PYTHONPATH"]])
    # A static rendezvous: torchrun's others look at the source of all modules for the name of a log record's method.
    command = [sys.executable, "-m", "torch.distributed.run", f"--master-port={children.free_port()}",
               f"--nproc-per-node={ranks}", "-m", "support.trainers", name,
               json.dumps({"folder": str(folder), **job})]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})}
    try:
        children.run(command, variables, folder / "log", time.monotonic() + deadline_s, lambda: None)
    except ReshardError as error:
        errors = "\n".join(f.read_text() for f in sorted(results.glob("*.error")))
        raise AssertionError(f"{error}\n{errors}") from error  # the end of a long message is what is seen
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(ranks)]


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
