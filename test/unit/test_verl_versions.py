"""Every verl but the one that the hooks are written for is refused when it imports sglang_reshard.verl."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported_beside(version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Imports sglang_reshard.verl in a process whose verl says that it is of this version, and has nothing else."""
    (folder / "verl").mkdir()
    (folder / "verl" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    return subprocess.run(
        [sys.executable, "-c", "import sglang_reshard.verl"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.7.1", "older than verl 0.9.1"),
        ("0.8.0", "older than verl 0.9.1"),
        ("0.9.0", "older than verl 0.9.1"),
        ("0.9.1.dev0", "older than verl 0.9.1"),
        ("0.9.2", "newer than verl 0.9.1"),
        ("0.10.0", "newer than verl 0.9.1"),
        ("main", "another version than verl 0.9.1"),
    ],
)
def test_another_verl_is_refused_by_name(version: str, says: str, tmp_path: Path) -> None:
    done = imported_beside(version, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"sglang_reshard.errors.Unsupported: verl {version} cannot sync")
    assert says in last
    assert "Install verl==0.9.1" in last


@pytest.mark.parametrize("version", ["0.9.1", "0.9.1.post1", "0.9.1+local"])
def test_the_supported_one_is_taken(version: str, tmp_path: Path) -> None:
    """The import then goes on to what this verl does not have."""
    last = imported_beside(version, tmp_path).stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: No module named 'verl.")


def test_the_extra_names_the_same_version() -> None:
    source = (ROOT / "verl_integration" / "verl_version.py").read_text()
    (supported,) = re.findall(r'^SUPPORTED = Version\("(.+?)"\)', source, re.MULTILINE)
    assert f'\nverl = ["verl=={supported}"]\n' in (ROOT / "pyproject.toml").read_text()
