"""The examination of an engine rank sees what is wrong: with a trace that lies it does not pass."""

import json
from pathlib import Path

import pytest

from examination_mutants import MUTANTS, NORM
from support import zygote
from support.scripts import run_script

pytestmark = pytest.mark.engine


def test_every_mutant_of_the_trace_is_told(tmp_path):
    script = Path(__file__).with_name("examination_mutants.py")
    answers = run_script(script, str(tmp_path), environment={zygote.VARIABLE: "gpu"})
    lines = list(map(json.loads, answers))
    said = {name: (outcome, why) for name, outcome, why in lines}
    assert set(said) == {mutant.__name__ for mutant in MUTANTS}
    assert said["right"] == ("passed", "")
    for name, words in {
        "swapped": "1 of 43 live tensors differ: model.layers.0.mlp.experts.w13_weight",
        "writing": f"the trace wrote to {NORM}",
        "moving": "live tensors have moved",
        "refusing": f"stock loading writes {NORM}",
    }.items():
        outcome, why = said[name]
        assert outcome == "failed"
        assert words in why
