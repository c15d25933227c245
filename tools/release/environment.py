"""An environment of requirements.lock with a forked wheel in SGLang's place: `python -m tools.release.environment`.

Neither the plugin's wheel nor the checkout is installed in it. uv links what its cache holds, so this costs little
room and time where the project's own environment has been set up.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.release import REPOSITORY

_INSTALL_S = 1800.0
_LOOK_S = 120.0
_LOOK = """
import importlib.metadata, pathlib, sys
import sglang_reshard
distributions = {d.name: d.version for d in importlib.metadata.distributions()}
print(pathlib.Path(sglang_reshard.__file__).parent)
print(distributions["sglang"])
print(distributions.get("sglang-reshard", "none"))
"""


class NotTheFork(Exception):
    """What an environment runs is not what the forked wheel holds; the message says what it is."""


def requirements(lock: str, wheel: Path) -> str:
    """The text of requirements.lock with `wheel` for SGLang. Raises ValueError if SGLang has no line there."""
    text, count = re.subn(r"(?m)^sglang==\S+$", lambda _: f"sglang @ {wheel.resolve().as_uri()}", lock)
    if count != 1:
        raise ValueError(f"requirements.lock has {count} lines sglang==VERSION; run `make lock`")
    return text


def make(folder: Path, wheel: Path) -> None:
    """The environment, anew. Raises subprocess.CalledProcessError; what failed has been written to standard error."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=_INSTALL_S)
    with tempfile.TemporaryDirectory() as temporary:
        listed = Path(temporary) / "requirements.txt"
        listed.write_text(requirements((REPOSITORY / "requirements.lock").read_text(), wheel))
        sync = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "sync",
            "--quiet",
            "--compile-bytecode",
            "--python",
            str(_python(folder)),
        ]
        subprocess.run([*sync, str(listed)], check=True, timeout=_INSTALL_S)


def look(folder: Path) -> str:
    """SGLang's version in the environment. Raises NotTheFork unless the package in use came with it, and it alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [_python(folder), "-c", _LOOK], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=_LOOK_S
    )
    if done.returncode:
        raise NotTheFork(f"sglang_reshard cannot be imported in {folder}:\n{done.stderr[-2000:]}")
    package, version, plugin = done.stdout.splitlines()
    if not Path(package).resolve().is_relative_to(folder.resolve()):
        raise NotTheFork(f"{folder} imports sglang_reshard from {package}; is PYTHONPATH or a .pth file in the way?")
    if "+reshard." not in version or plugin != "none":
        raise NotTheFork(f"{folder} has sglang {version} and sglang-reshard {plugin}, not the forked wheel alone")
    return version


def _python(folder: Path) -> Path:
    return folder.absolute() / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.release.environment", description=__doc__)
    parser.add_argument("folder", type=Path, help="what is in it will be gone")
    parser.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.wheel)
    print(f"{arguments.folder}: sglang {look(arguments.folder)}, sglang_reshard from it")


if __name__ == "__main__":
    main()
