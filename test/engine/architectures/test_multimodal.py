"""Models of images and sound under the names that transformers saves: bit for bit what stock loading leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support import zygote
from support.scripts import run_script
from support.sweep import sweep

GPU = {zygote.VARIABLE: "gpu"}  # the code paths of GPUs
pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


def examined(folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("multimodal.py")
    answers = run_script(script, str(folder), *names, timeout_s=450, environment=GPU)
    return dict(json.loads(line) for line in answers)


@pytest.mark.parametrize(
    "names", [("Qwen2_5_VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), sweep(())], ids=str
)
def test_every_tensor_of_every_tower_arrives(names: tuple[str, ...], tmp_path: Path) -> None:
    found = examined(tmp_path, *names)
    assert {name: (of["outcome"], of["why"]) for name, of in found.items()} == dict.fromkeys(found, ("passed", ""))
    if names:
        assert set(found) == set(names)
        return
    page = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text()
    listed = page[page.index("<!-- multimodal: begin -->") : page.index("<!-- multimodal: end -->")]
    assert set(re.findall(r"`(\w+)`", listed)) == set(found)
