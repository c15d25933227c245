"""The stock SGLang wheel that requirements.lock pins: from the package index that pip is configured for, checked."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from tools.release import REPOSITORY

DIGESTS = Path(__file__).parent / "sha256.txt"
_DOWNLOAD_S = 600.0
_PIN = re.compile(r"^sglang==(\S+)$", re.MULTILINE)


class Unavailable(Exception):
    """The wheel is not in the cache and pip could not get it; the message ends with what pip said."""


class WrongDigest(Exception):
    """A wheel is not the one whose digest is in sha256.txt, or has none there."""


def pinned_version(lock: str) -> str:
    """SGLang's version in the text of requirements.lock. Raises ValueError."""
    if not (pin := _PIN.search(lock)):
        raise ValueError("requirements.lock has no line sglang==VERSION; run `make lock`")
    return pin[1]


def get(cache: Path) -> Path:
    """The wheel for this Python and platform: from `cache`, or downloaded into it. Raises Unavailable, WrongDigest."""
    version = pinned_version((REPOSITORY / "requirements.lock").read_text())
    for wheel in sorted(cache.glob(f"sglang-{version}-*.whl")):
        if not parse_wheel_filename(wheel.name)[3].isdisjoint(sys_tags()):
            check(wheel, DIGESTS.read_text())
            return wheel
    return download(cache, version)


def download(cache: Path, version: str, python: str = "", platform: str = "") -> Path:
    """SGLang's wheel of that version, in `cache`; for another Python or platform if they are named, as pip names them.

    Raises Unavailable or WrongDigest.
    """
    asked = [*(["--python-version", python] if python else []), *(["--platform", platform] if platform else [])]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as new:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary=:all:", "--dest", new, *asked, f"sglang=={version}"]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"pip did not get sglang {version} within {_DOWNLOAD_S:.0f} s") from error
        wheels = list(Path(new).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise Unavailable(f"pip did not get sglang {version}: {done.stderr.strip()[-1000:]}")
        check(wheels[0], DIGESTS.read_text())
        return wheels[0].replace(cache / wheels[0].name)


def check(wheel: Path, digests: str) -> None:
    """Raise WrongDigest unless a line of `digests`, as sha256sum writes them, is of this wheel."""
    known = {name: digest for digest, name in (line.split() for line in digests.splitlines())}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if wheel.name not in known:
        raise WrongDigest(
            f"tools/release/sha256.txt does not know {wheel.name}; if you trust where it came from, add a line: "
            f"{digest}  {wheel.name}"
        )
    if known[wheel.name] != digest:
        raise WrongDigest(
            f"{wheel.name} has the SHA-256 {digest}, and tools/release/sha256.txt says {known[wheel.name]}; "
            "delete it, and see where pip gets it from"
        )
