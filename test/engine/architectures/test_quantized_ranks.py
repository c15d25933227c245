"""Engine ranks in MXFP8 and NVFP4, updated in bfloat16, equal ranks that stock SGLang starts on a quantized checkpoint.

The quantizer is SGLang's own for MXFP8, and ModelOpt's for NVFP4.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import sglangs, zygote
from support.scripts import run_script
from support.sweep import sweep

pytestmark = [pytest.mark.engine]
BACKENDS = {"pinned": (), "newest": ("flashinfer_trtllm",)}  # all, or those named
RANKS = {("mxfp8", "pinned"): 28, ("mxfp8", "newest"): 14, ("nvfp4", "pinned"): 16, ("nvfp4", "newest"): 8}


@pytest.mark.parametrize("end", ["pinned", sweep("newest")])
@pytest.mark.parametrize("quantization", ["mxfp8", "nvfp4"])
def test_every_rank_has_what_the_quantizer_and_a_start_leave(quantization: str, end: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name(f"{quantization}_ranks.py")
    with sglangs.chosen(end):
        kind = {zygote.VARIABLE: "gpu" if end == "pinned" else "none"}
        found = [json.loads(line) for line in run_script(script, str(tmp_path), *BACKENDS[end], environment=kind)]
    assert len(found) == RANKS[quantization, end]
    assert [of for of in found if of[-1]] == []


def test_weights_without_scales_are_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    script = Path(__file__).with_name("nvfp4_refused.py")
    answers = run_script(script, str(tmp_path), environment={zygote.VARIABLE: "gpu"})
    found = [json.loads(line) for line in answers]
    assert len(found) == 8
    advice = {"modelopt_fp4": "_scale_2 with it", "compressed-tensors, nvfp4": "Send it quantized"}
    for method, kind, _, error, unchanged in found:
        assert unchanged
        start = "Unsupported: model.layers.0.mlp." + ("experts.0." if kind == "experts" else "")
        assert error.startswith(start), error
        assert "_proj.weight is bfloat16, and the engine keeps this weight in NVFP4 (" in error
        assert advice[method] in error
