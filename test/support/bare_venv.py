"""Environments that have a wheel and what it declares; torch alone is shared from the environment of these tests."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

UV = Path(sys.executable).with_name("uv")
_LOCK = Path(__file__).parents[2] / "requirements.lock"
_INSTALL_S = 600.0
# Torch's own folders, and those that its builds for GPUs require. All else that torch requires is installed.
_SHARED = ("torch", "functorch", "torchgen", "nvidia", "triton", "cuda")


class NoIndex(Exception):
    """uv has not got a package, neither in its cache nor from an index; the message ends with what uv said."""


def uv(*arguments: str) -> str:
    """Returns what uv prints. Raises NoIndex, also for requirements that contradict each other."""
    done = subprocess.run([UV, *arguments], capture_output=True, text=True, timeout=_INSTALL_S)
    if done.returncode:
        raise NoIndex(done.stderr.strip()[-2000:])
    return done.stdout


def without_extras(requirements: Iterable[str]) -> list[Requirement]:
    """Returns those that hold here."""
    found = map(Requirement, requirements)
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def make(folder: Path, wheel: Path) -> Path:
    """Returns the Python of a new environment in `folder`, with the wheel and the packages that it declares.

    They have the versions of requirements.lock, so that uv's cache has them after `make setup`. Raises NoIndex.
    """
    uv("venv", "--quiet", "--python", sys.executable, str(folder))
    python = folder / "bin" / "python"
    # torch itself is 3 GB with its libraries.
    wanted = (*declared(wheel), *without_extras(metadata.requires("torch") or ()))
    needed = [str(need) for need in wanted if not need.name.startswith(_SHARED)]
    install = ("pip", "install", "--quiet", "--python", str(python), "--constraint", str(_LOCK))
    try:
        uv(*install, "--offline", *needed)
    except NoIndex:
        uv(*install, *needed)
    uv("pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), str(wheel))
    _share_torch(folder)
    return python


def declared(wheel: Path) -> list[Requirement]:
    """Returns what the wheel requires, without its extras."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return without_extras(HeaderParser().parsestr(file.read(name).decode()).get_all("Requires-Dist", []))


def _share_torch(folder: Path) -> None:
    """Links torch's folders into one that the environment's path ends with."""
    (packages,) = folder.glob("lib/python*/site-packages")
    here = Path(str(metadata.distribution("torch").locate_file("")))
    shared = folder / "torch"
    shared.mkdir()
    for path in here.iterdir():
        if path.name in _SHARED or path.match("torch-*.dist-info"):
            os.symlink(path, shared / path.name)
    (packages / "torch.pth").write_text(f"{shared}\n")
