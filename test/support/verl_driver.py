"""A function as the driver of verl: `python -m support.verl_driver MODULE:FUNCTION JSON`, its result a JSON file."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from support import ray_workers, zygote


def main() -> None:
    module, function = sys.argv[1].split(":")
    job = json.loads(sys.argv[2])
    if zygote.is_fork():
        ray_workers.fork_workers()
    result = getattr(importlib.import_module(module), function)(job)
    (Path(job["folder"]) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
