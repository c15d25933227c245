"""Engine ranks in MXFP8, updated in bfloat16, have what stock SGLang starts with on its own quantizer's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import sglangs, zygote
from support.scripts import run_script
from support.sweep import sweep

pytestmark = [pytest.mark.engine]
BACKENDS = {"pinned": ((), 28), "newest": (("flashinfer_trtllm",), 14)}  # all, or those named; and the ranks


@pytest.mark.parametrize("end", ["pinned", sweep("newest")])
def test_every_rank_has_what_sglang_s_quantizer_and_a_start_leave(end: str, tmp_path: Path) -> None:
    script, (backends, ranks) = Path(__file__).with_name("mxfp8_ranks.py"), BACKENDS[end]
    with sglangs.chosen(end):
        kind = {zygote.VARIABLE: "gpu" if end == "pinned" else "none"}
        found = [json.loads(line) for line in run_script(script, str(tmp_path), *backends, environment=kind)]
    assert len(found) == ranks
    assert [of for of in found if of[-1]] == []
