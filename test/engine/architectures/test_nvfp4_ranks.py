"""Engine ranks in NVFP4, updated in bfloat16, have what stock SGLang starts with on ModelOpt's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import sglangs, zygote
from support.scripts import run_script
from support.sweep import sweep

pytestmark = [pytest.mark.engine]
BACKENDS = {"pinned": ((), 16), "newest": (("flashinfer_trtllm",), 8)}  # all, or those named; and the ranks


@pytest.mark.parametrize("end", ["pinned", sweep("newest")])
def test_every_rank_has_what_modelopt_s_quantizer_and_a_start_leave(end: str, tmp_path: Path) -> None:
    script, (backends, ranks) = Path(__file__).with_name("nvfp4_ranks.py"), BACKENDS[end]
    with sglangs.chosen(end):
        kind = {zygote.VARIABLE: "gpu" if end == "pinned" else "none"}
        found = [json.loads(line) for line in run_script(script, str(tmp_path), *backends, environment=kind)]
    assert len(found) == ranks
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
