"""TorchRL's own collector takes the weights of FSDP2 trainer ranks, by the scheme of the example."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from support.documents import ROOT, printed

TORCHRL = ROOT / ".venv" / "torchrl"


@pytest.mark.sweep
@pytest.mark.skipif(not TORCHRL.exists(), reason="TorchRL is not installed: make setup-torchrl")
def test_a_collector_has_the_trainer_s_weights_after_every_step() -> None:
    ran = subprocess.run(
        ["bash", "-c", printed("examples/torchrl_collector.py", "torchrl_collector.py")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = {
        who: re.findall(rf"{who}: step (\d+), checksum (\S+?)(?:,|$)", ran.stdout, re.MULTILINE)
        for who in ("trainer", "collector")
    }
    assert [step for step, _ in said["trainer"]] == ["1", "2", "3"]
    assert said["collector"] == said["trainer"]
    assert len({checksum for _, checksum in said["trainer"]}) == 3
