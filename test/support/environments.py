"""Environments of the matrix: the project's wheel under another Python, with another torch, or with a whole SGLang.

Each is installed once, in a folder of its own in .venv/matrix, and gets the wheel of the day.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sglang_reshard.patches.sglang_versions import NEWEST
from sglang_reshard.testing import cpu_host
from support.bare_venv import UV, declared

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv" / "matrix"
NIXL = ("nixl>=1.5,<1.6",)
# What the tests of this project import, but for the packages of an engine.
TESTS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "safetensors>=0.4", "cryptography>=42",
         "opentelemetry-sdk>=1.25", "opentelemetry-proto>=1.25", "pyyaml>=6")  # fmt: skip
_INSTALL_S = 1800.0
_VERSIONS = """\
import json, platform
from importlib import metadata
names = ("torch", "sglang", "transformers", "numpy", "typer")
found = {d.name: d.version for d in metadata.distributions() if d.name in names}
print(json.dumps({"python": platform.python_version(), **found}))
"""


@dataclass(frozen=True)
class Environment:
    """An installed environment.

    python     its interpreter
    versions   of Python, and of torch, SGLang and others where they are installed
    gigabytes  of its files; those that it shares with uv's cache are counted
    """

    python: Path
    versions: dict[str, str]
    gigabytes: float

    def variables(self, **more: str) -> dict[str, str]:
        """Returns the environment variables of a process that imports this environment's packages and no others.

        Tests in it do not record rows of the matrix themselves.
        """
        dropped = ("PYTHONPATH", "VIRTUAL_ENV", "SGLANG_RESHARD_MATRIX")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**kept, "PATH": f"{self.python.parent}{os.pathsep}{kept['PATH']}", **more}

    def stand_in(self) -> Path:
        """Returns the folder with the `sgl_kernel` of a host without a GPU, in the wheel that is installed here."""
        (found,) = self.python.parents[1].glob("lib/python*/site-packages/sglang_reshard/testing/cpu_host/stand_in")
        return found

    def engine_variables(self, tp_size: int) -> dict[str, str]:
        """Returns `variables` of an engine on a host without a GPU."""
        return self.variables(**{**cpu_host.environment(tp_size), "PYTHONPATH": str(self.stand_in())})

    def run_tests(self, files: Sequence[str], variables: dict[str, str], timeout_s: float) -> str:
        """Returns how many tests of these files passed or were skipped. Fails the test if one does."""
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, done.stdout[-8000:]
        return ", ".join(re.findall(r"\d+ (?:passed|skipped)", done.stdout.splitlines()[-1]))

    def row(self, kind: str, says: str, seconds: float, sglang: str = "") -> dict[str, Any]:
        """Returns a row of the matrix, see `row_of`; `sglang` is by default this environment's own."""
        own = {**self.versions, "sglang": sglang} if sglang else self.versions
        return row_of(own, kind, says, seconds, self.gigabytes)


def row_of(versions: dict[str, str], kind: str, says: str, seconds: float, gigabytes: float) -> dict[str, Any]:
    """Returns a row of the matrix.

    versions   of Python, torch and SGLang
    kind       of the test
    says       what has been run, and with which outcome
    seconds    that it took, without the installation
    gigabytes  of an environment that is installed for it; 0.0 if none is
    """
    return {
        "kind": kind,
        **{name: versions.get(name, "") for name in ("python", "torch", "sglang")},
        "says": says,
        "seconds": round(seconds, 1),
        "gigabytes": round(gigabytes, 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def own_row(kind: str, says: str, seconds: float, sglang: str) -> dict[str, Any]:
    """Returns a row of the matrix for the environment of these tests and another SGLang."""
    own = {"python": platform.python_version(), "torch": metadata.version("torch"), "sglang": sglang}
    return row_of(own, kind, says, seconds, 0.0)


def unpack(requirement: str, folder: Path) -> None:
    """Installs a package without its dependencies into a folder. Skips the test if uv reaches no index."""
    python = ("--python", sys.executable)
    _uv("pip", "install", "--quiet", *python, "--no-deps", "--compile-bytecode", "--target", str(folder), requirement)


def newest_sglang(wheel: Path) -> Environment:
    """Returns the newest SGLang that the patches are tested with, all that it requires, NIXL, and what tests import."""
    return install(f"sglang-{NEWEST}", "3.12", wheel, (f"sglang=={NEWEST}", *NIXL, *TESTS))


def interpreter(version: str) -> str:
    """Returns a Python of this version, such as "3.12", for `uv venv`: one of pyenv, or one that uv finds or gets."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    return str(found[-1]) if found else version


def install(name: str, version: str, wheel: Path, requirements: Sequence[str], lowest: bool = False) -> Environment:
    """Returns the environment, installed if it was not there or was installed from other requirements.

    name          of its folder
    version       of Python
    wheel         this project's
    requirements  others, for `uv pip install`
    lowest        take the lowest versions that `requirements` and the wheel declare

    Skips the test if uv reaches no index. Fails it if there is no solution.
    """
    options = ["--resolution", "lowest-direct", *map(str, declared(wheel))] if lowest else []
    folder, wanted = FOLDER / name, json.dumps([version, *requirements, *options])
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    to = ("pip", "install", "--quiet", "--python", str(python))
    if stamp.exists() and stamp.read_text() == wanted:
        _uv(*to, "--no-deps", "--reinstall-package", "sglang-reshard", str(wheel))
    else:
        shutil.rmtree(folder, ignore_errors=True)
        _uv("venv", "--quiet", "--python", interpreter(version), str(folder))
        _uv(*to, "--compile-bytecode", *options, str(wheel), *requirements)
        stamp.write_text(wanted)
    told = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, timeout=120, check=True)
    size = subprocess.run(["du", "-sk", str(folder)], capture_output=True, text=True, check=True)
    return Environment(python, json.loads(told.stdout), int(size.stdout.split()[0]) / 1e6)


def _uv(*arguments: str) -> None:
    done = subprocess.run([UV, *arguments], capture_output=True, text=True, timeout=_INSTALL_S, cwd=sys.prefix)
    if done.returncode:
        if any(sign in done.stderr for sign in ("error sending request", "dns error", "Network is unreachable")):
            pytest.skip(f"uv reaches no package index here: {done.stderr.strip()[-300:]}")
        pytest.fail(f"uv {' '.join(arguments[:2])}: {done.stderr.strip()[-3000:]}")
