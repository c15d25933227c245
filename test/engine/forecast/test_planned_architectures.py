"""What `plan` traces of a model without memory is what an engine rank traces of the same model in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planned_architectures import exact
from support import zygote
from support.scripts import run_script

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

# Tensors on the current device, whatever the default one is; experts; attention alone.
FEW = ("Qwen3NextForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")


# `plan` refuses them, and says why: a constructor and a loader that ask for values, which nothing has without memory.
ASK_FOR_VALUES = {"InternVLChatModel", "MllamaForConditionalGeneration"}


def differing(names: list[str], folder: Path) -> list[tuple[str, str]]:
    script = Path(__file__).with_name("planned_architectures.py")
    lines = run_script(script, str(folder), *names, timeout_s=3000, environment={zygote.VARIABLE: "gpu"})
    found = [json.loads(line) for line in lines]
    assert sorted(name for name, *_ in found) == sorted(names)
    assert all(copies for _, copies, _ in found)
    return [(name, wrong) for name, _, wrong in found if wrong]


def test_plans_of_a_few_architectures_are_those_of_models_in_memory(tmp_path: Path) -> None:
    assert differing(list(FEW), tmp_path) == []


@pytest.mark.sweep
def test_plans_of_all_architectures_whose_row_is_exact_are_those_of_models_in_memory(tmp_path: Path) -> None:
    names = list(exact())
    assert len(names) >= 50
    found = dict(differing(names, tmp_path))
    assert found.keys() == ASK_FOR_VALUES, found
    assert all("not the same" not in why for why in found.values())
