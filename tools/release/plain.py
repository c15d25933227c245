"""The plugin's wheel, from the checkout: `python -m tools.release.plain`.

setuptools makes it, in a copy without what earlier builds left behind. It is then written anew, because setuptools
keeps the modes of the checkout's files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.release import DIST, REPOSITORY, archive

_SOURCES = ("LICENSE", "README.md", "pyproject.toml", "setup.py", "python", "patches", "verl_integration")
_LEFT_BEHIND = ("__pycache__", "*.pyc", "*.egg-info")
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
_BUILD_S = 300.0


class BuildFailed(Exception):
    """setuptools made no wheel; the message ends with what it said."""


def build(folder: Path) -> Path:
    """The wheel, in `folder`. Raises BuildFailed."""
    with tempfile.TemporaryDirectory() as temporary:
        copy, built = Path(temporary) / "checkout", Path(temporary) / "built"
        _copy(copy)
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, str(built)], cwd=copy, capture_output=True, text=True, timeout=_BUILD_S
        )
        wheels = list(built.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise BuildFailed(
                f"setuptools ended with {done.returncode} and {len(wheels)} wheels:\n{done.stderr[-4000:]}"
            )
        return archive.write(archive.read(wheels[0]), folder)


def _copy(to: Path) -> None:
    to.mkdir()
    for name in _SOURCES:
        if (source := REPOSITORY / name).is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns(*_LEFT_BEHIND))
        else:
            shutil.copyfile(source, to / name)


if __name__ == "__main__":
    print(build(DIST))
