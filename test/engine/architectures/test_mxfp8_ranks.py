"""Engine ranks in MXFP8, updated in bfloat16, have what stock SGLang loads of its own quantizer's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import zygote
from support.scripts import run_script

pytestmark = [pytest.mark.engine]


def test_every_rank_has_what_sglang_s_quantizer_and_stock_loading_leave(tmp_path: Path) -> None:
    script = Path(__file__).with_name("mxfp8_ranks.py")
    answers = run_script(script, str(tmp_path), environment={zygote.VARIABLE: "gpu"})
    found = [json.loads(line) for line in answers]
    assert len(found) == 28
    assert [of for of in found if of[-1]] == []
