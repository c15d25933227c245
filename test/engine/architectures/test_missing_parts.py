"""What a trainer lacks of SGLang's fused parameters stays, if frozen= names it, and the rest is as stock loads it.

The reference is SGLang's own load of the engine's checkpoint with the trainer's tensors in it.
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from missing_parts import CASES
from support import zygote
from support.scripts import run_script

pytestmark = [pytest.mark.engine]
# With the transformers of the pinned SGLang neither of the two can build its config.
UNSUPPORTED = {"0.5.12": {"shared, Gemma-3n"}, "0.5.23": {"shared, of a whole model"}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    script = Path(__file__).with_name("missing_parts.py")
    folder = str(tmp_path_factory.mktemp("missing parts"))
    return [json.loads(line) for line in run_script(script, folder, environment={zygote.VARIABLE: "gpu"})]


def test_each_case_is_one_that_stock_sglang_loads(found: list[tuple[str, dict[str, Any]]]) -> None:
    assert len(found) == sum(len(case.ranks) for case in CASES.values())
    assert {name for name, seen in found if "cannot" in seen} == UNSUPPORTED[metadata.version("sglang")]


def test_the_frozen_of_the_refusal_and_wider_patterns_leave_exactly_what_is_missing(
    found: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, seen in found:
        if "cannot" in seen:
            continue
        assert seen["unequal"] == [[], []], name
        assert len(seen["moved"]) > 10
        assert "is not written completely" in seen["refused"]
        assert any(missing in seen["refused"] for missing in seen["missing"])
        kept, by_wider_patterns = seen["kept"]
        assert kept == by_wider_patterns
        parts = {re.sub(r".*\[|\]$", "", part) for part in kept}
        assert parts <= set(seen["missing"]) or name == "shared, of a whole model"
        assert all("[" in part or "k_norm" in part for part in kept)
