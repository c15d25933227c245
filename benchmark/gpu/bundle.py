"""Packs what `make test-gpu` needs on a host without a network: `python -m benchmark.gpu.bundle [--python 3.12]`.

The files of the commit that it needs, and the packages that a host with torch may lack,
as wheels of that Python, unpacked. On the host: `tar xf gpu-bundle.tar.gz && cd sglang-reshard && make test-gpu`.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmark.gpu.packages import FOLDER, NAMES
from benchmark.results import REPOSITORY, commit

ARCHIVE = REPOSITORY / "build" / "gpu-bundle.tar.gz"
MAX_BYTES = 64 << 20
_PARTS = ("Makefile", "LICENSE", "README.md", "benchmark", "python", "test/support")
_TOP = "sglang-reshard"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.gpu.bundle", description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version on the host")
    parser.add_argument("--platform", default="x86_64-manylinux_2_28", help="of the host, as uv names it")
    options = parser.parse_args()
    _download(options.python, options.platform)
    _pack()
    nbytes = ARCHIVE.stat().st_size
    if nbytes > MAX_BYTES:
        raise SystemExit(f"{ARCHIVE.name} has {nbytes:,} bytes, and at most {MAX_BYTES:,} may travel")
    what = f"commit {commit().removesuffix('+')}, for Python {options.python}"
    print(f"{ARCHIVE.relative_to(REPOSITORY)}: {nbytes:,} bytes, {what}")


def _download(python: str, platform: str) -> None:
    """Installs the packages for another Python beside this one's."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    where = ["--python-version", python, "--python-platform", platform, "--target", str(FOLDER)]
    subprocess.run([*uv, *where, *NAMES], check=True)


def _pack() -> None:
    """What is not committed does not travel."""
    archived = subprocess.run(
        ["git", "archive", "--format=tar", f"--prefix={_TOP}/", "HEAD", *_PARTS], cwd=REPOSITORY, stdout=subprocess.PIPE
    )
    archived.check_returncode()
    said = (commit().removesuffix("+") + "\n").encode()
    with tarfile.open(ARCHIVE, "w:gz") as archive, tarfile.open(fileobj=io.BytesIO(archived.stdout)) as committed:
        for member in committed:
            if not member.name.startswith(f"{_TOP}/benchmark/results/"):
                archive.addfile(member, committed.extractfile(member) if member.isfile() else None)
        header = tarfile.TarInfo(f"{_TOP}/COMMIT")
        header.size = len(said)
        archive.addfile(header, io.BytesIO(said))
        archive.add(FOLDER, f"{_TOP}/{FOLDER.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
