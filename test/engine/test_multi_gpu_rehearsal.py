"""The tests for several GPUs run under torchrun without one, on gloo, so that they do not rot; see test/multi_gpu."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_reshard.selftest.children import free_port
from sglang_reshard.testing import cpu_host
from support import descendants
from support.left_behind import torch_segments
from support.sweep import sweep

ROOT = Path(__file__).parents[2]
SUMMARY = "short test summary info"


@pytest.mark.engine
@pytest.mark.parametrize("ranks", [2, sweep(4)])
def test_they_pass_on_a_host_without_a_gpu(ranks: int) -> None:
    before = torch_segments()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:  # a socket's path below it holds 107 characters
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        variables["PYTHONPATH"] = cpu_host.environment(1)["PYTHONPATH"]
        # A static rendezvous: see support/trainers.py.
        torchrun = ["-m", "torch.distributed.run", f"--master-port={free_port()}", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *torchrun, "-m", "pytest", "--durations=15", "test/multi_gpu"]
        log = Path(folder, "log")
        try:
            status = descendants.run(command, variables, ROOT, log, timeout_s=450 * ranks)
        except descendants.Deadline as error:
            raise AssertionError(f"{error}\n{_end_of(log)}") from error
        assert status == 0, _end_of(log)
        assert " passed" in log.read_text(errors="replace")
    assert torch_segments() <= before


def _end_of(log: Path) -> str:
    """Returns the end of what pytest has written, without torchrun's own traceback."""
    text = log.read_text(errors="replace")
    summary = re.search(rf"{SUMMARY} =+\n.*?\n=+ .* =+\n", text, re.S)
    return text[: summary.end() if summary else None][-12_000:]
