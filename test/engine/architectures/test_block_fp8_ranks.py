"""Every engine rank of block-fp8 engines of TP 1, 2 and 4 and EP 2: from bfloat16, what verl's quantizer and stock
loading leave, fused and stacked layers, experts and MLA's derived weights among them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import zygote
from support.scripts import run_script

pytestmark = [pytest.mark.engine, pytest.mark.sweep]


def test_every_rank_has_what_verl_s_quantizer_and_stock_loading_leave(tmp_path: Path) -> None:
    script = Path(__file__).with_name("block_fp8_ranks.py")
    answers = run_script(script, str(tmp_path), environment={zygote.VARIABLE: "gpu"})
    found = [json.loads(line) for line in answers]
    assert len(found) == 31
    assert [of for of in found if of[-1]["outcome"] != "passed"] == []
    assert all("block-fp8" in of[-1]["has"] for of in found)
