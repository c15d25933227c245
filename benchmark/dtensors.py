"""Every kind of DTensor beside torch's own `full_tensor`: `python -m benchmark.dtensors [PYTHON ...]`.

The cases are those of `test/support/dtensors.py`, which `test/unit/test_dtensors.py` checks. Each further PYTHON is an
interpreter with another version of torch, numpy and msgspec, which runs them, too. Minutes for each on one core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmark import pages, results

COMMAND = "python -m benchmark.dtensors [PYTHON ...]"


def main(pythons: list[str]) -> None:
    folders = os.pathsep.join(str(results.REPOSITORY / folder) for folder in ("python", "test"))
    environment = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    rows = []
    for python in (sys.executable, *pythons):
        command = [python, "-m", "support.dtensor_rows"]
        run = subprocess.run(command, env=environment, cwd=results.REPOSITORY, stdout=subprocess.PIPE, check=True)
        rows += json.loads(run.stdout)
    pages.publish("dtensors", COMMAND, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
