"""Every extra has a solution on each Python that its packages are made for, and verl has one with SGLang."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# SGLang has no wheels for Python 3.14.
ENGINES = PYTHONS[:-1]
_RESOLVE_S = 600.0
_NO_INDEX = re.compile(
    r"Failed to fetch|error sending request|dns error|Network is unreachable|was not found in the cache"
)


def solved(*arguments: str, python: str) -> str:
    """The versions that uv finds. Skips where it reaches no index; fails where there is no solution."""
    command = [UV, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_RESOLVE_S)
    if done.returncode and _NO_INDEX.search(done.stderr):
        pytest.skip(f"uv reaches no package index here: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def cases(extras: dict[str, tuple[str, ...]]) -> list[object]:
    """One case of each extra on the Python of requirements.lock, the others in sweeps."""
    return [
        pytest.param(extra, python, marks=[] if python == "3.11" else [pytest.mark.sweep])
        for extra, pythons in extras.items()
        for python in pythons
    ]


@pytest.mark.parametrize(
    ("extra", "python"),
    cases({"engine": ENGINES, "bench": ENGINES, "verl": ENGINES, "nixl": PYTHONS, "otel": PYTHONS, "docs": PYTHONS}),
)
def test_an_extra_has_a_solution(extra: str, python: str) -> None:
    found = solved("pyproject.toml", "--extra", extra, python=python)
    assert re.search(r"^torch==", found, re.MULTILINE)


@pytest.mark.parametrize("python", [p if p == "3.11" else pytest.param(p, marks=pytest.mark.sweep) for p in PYTHONS])
def test_a_trainer_s_side_has_a_solution(python: str) -> None:
    assert not re.search(r"^(sglang|verl)==", solved("pyproject.toml", python=python), re.MULTILINE)


@pytest.mark.parametrize("python", [p if p == "3.11" else pytest.param(p, marks=pytest.mark.sweep) for p in ENGINES])
def test_verl_and_its_sglang_have_a_solution_with_the_documented_overrides(python: str, tmp_path: Path) -> None:
    document = (ROOT / "docs" / "usage" / "installation.md").read_text()
    (lines,) = re.findall(r"cat > overrides.txt <<EOF\n(.+?)EOF\n", document, re.DOTALL)
    assert "uv pip install --override overrides.txt 'sglang-reshard[verl]' sglang==0.5.12" in document
    (tmp_path / "overrides.txt").write_text(lines)
    (tmp_path / "sglang.in").write_text("sglang==0.5.12\n")
    inputs = ("pyproject.toml", "--extra", "verl", str(tmp_path / "sglang.in"))
    found = solved(*inputs, "--override", str(tmp_path / "overrides.txt"), python=python)
    assert {"sglang==0.5.12", "verl==0.9.1"} <= set(found.splitlines())
    assert set(lines.splitlines()) - set((ROOT / "overrides.txt").read_text().splitlines()) == set()
