"""Engines of SGLang's quantization methods: updated bit for bit, or refused by name; none is wrong in silence.

`make test-all` writes benchmark/results/quantization.json and docs/results/quantization.md; `make test` compares a few.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark import pages, results
from support import sglangs, zygote
from support.scripts import run_script

SAVED = results.FOLDER / "quantization.json"
PAGE = Path(__file__).parents[3] / "docs" / "results" / "quantization.md"
REGISTRY = "from sglang.srt.layers.quantization import QUANTIZATION_METHODS as m; print('methods:', *m)"
FEW = (
    "fp8, block", "fp8, of 16 bits", "gptq", "none, AMX", "none, flashinfer-trtllm", "w8a8_int8, of 16 bits", "mxfp8",
    "modelopt_fp4", "compressed-tensors, nvfp4, flashinfer-trtllm",
)  # fmt: skip
pytestmark = [pytest.mark.engine]


def test_each_is_exact_or_refused(tmp_path: Path) -> None:
    script = Path(__file__).with_name("quantization.py")
    sweep = "SGLANG_RESHARD_SWEEP" in os.environ
    cases = () if sweep else FEW
    answers = run_script(script, str(tmp_path), *cases, environment={zygote.VARIABLE: "gpu"})
    found: list[dict[str, Any]] = [
        dict(zip(("case", "model", "outcome", "why"), json.loads(line), strict=True)) for line in answers
    ]
    found.sort(key=lambda row: (row["case"], row["model"]))
    if sweep:
        results.save(SAVED, results.header("make test-all", []), found)
        pages.write("quantization")
    assert [row for row in found if row["outcome"] == "failed"] == []
    saved = [{**row, "why": ""} for row in results.load(SAVED)[1] if not cases or row["case"] in cases]
    assert [{**row, "why": ""} for row in found] == saved


@pytest.mark.parametrize("end", sglangs.ENDS)
def test_every_method_of_the_registry_is_on_the_page(end: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", REGISTRY], env=sglangs.environment(end), capture_output=True, text=True, timeout=200
    )
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("methods:")]
    assert set(line.split()[1:]) - set(re.findall(r"`([\w-]+)`", PAGE.read_text())) == set()
