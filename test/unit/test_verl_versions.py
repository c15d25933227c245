"""Every verl but the one that the hooks are written for is refused when it imports sglang_reshard.verl."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_reshard.errors import Unsupported

ROOT = Path(__file__).parents[2]
VERSION = ROOT / "verl_integration" / "verl_version.py"


def check(version: str) -> None:
    """As sglang_reshard.verl does when it is imported, which needs verl itself."""
    runpy.run_path(str(VERSION))["check"](version)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.7.1", "older than verl 0.9.1"),
        ("0.9.0", "older than verl 0.9.1"),
        ("0.9.1.dev0", "older than verl 0.9.1"),
        ("0.9.2", "newer than verl 0.9.1"),
        ("0.10.0", "newer than verl 0.9.1"),
        ("main", "another version than verl 0.9.1"),
    ],
)
def test_another_verl_is_refused_by_name(version: str, says: str) -> None:
    with pytest.raises(Unsupported, match=f"verl {version} cannot sync .*{says}.* Install verl==0.9.1"):
        check(version)


def test_the_supported_one_is_taken() -> None:
    for version in ("0.9.1", "0.9.1.post1", "0.9.1+local"):
        check(version)


def test_the_import_beside_another_verl_is_refused(tmp_path: Path) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("__version__ = '0.9.2'\n")
    command = [sys.executable, "-c", "import sglang_reshard.verl"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "sglang_reshard.errors.Unsupported: verl 0.9.2 cannot sync" in done.stderr


def test_the_extra_names_the_same_version() -> None:
    supported = runpy.run_path(str(VERSION))["SUPPORTED"]
    assert f'\nverl = ["verl=={supported}"]\n' in (ROOT / "pyproject.toml").read_text()
