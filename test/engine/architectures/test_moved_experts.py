"""Redundant experts, and experts that EPLB has moved: bit for bit what stock loading leaves where they are now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import zygote
from support.scripts import run_script

pytestmark = [pytest.mark.engine]


def test_each_update_goes_to_where_the_experts_are(tmp_path: Path) -> None:
    script = Path(__file__).with_name("moved_experts.py")
    answers = run_script(script, str(tmp_path), environment={zygote.VARIABLE: "gpu"})
    found = [json.loads(line) for line in answers]
    assert len(found) == 4
    assert [of for of in found if of[-1]] == []
