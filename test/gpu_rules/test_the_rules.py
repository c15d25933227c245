"""The tests that docs/reliability.md names, of each rule of GPUs and of each hazard that a second reading found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import marked

TEST = Path(__file__).parent.parent
PAGE = TEST.parent / "docs" / "reliability.md"
LENGTHS = {"gpu-rules": 24, "gpu-rules-second-reading": 14}


@pytest.mark.parametrize("name", LENGTHS)
def test_each_row_names_a_test_that_exists(name: str) -> None:
    rows = [line.strip("|").split("|") for line in marked.read(PAGE, name).splitlines()[2:]]
    assert [int(row[0]) for row in rows] == list(range(1, LENGTHS[name] + 1))
    for *_, cell in rows:
        file, _, words = cell.strip().partition(": ")
        tree = ast.parse((TEST.parent / file.strip("`")).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert f"test_{words.replace(' ', '_')}" in functions, cell
