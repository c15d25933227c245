"""The forked wheel, SGLang's and the plugin's in one: `python -m tools.release.fork --number 1`.

To be installed in place of SGLang, and of the plugin. Of stock's files all but four are as they were: its version
module, METADATA, WHEEL and entry_points.txt, and RECORD, which is made anew. The same two wheels make the same bytes.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from tools.release import DIST, REPOSITORY, archive, metadata, plain, stock
from tools.release.archive import Entry, Wheel

CACHE = REPOSITORY / "build" / "stock"
_VERSION_MODULE = "sglang/_version.py"
_CHANGED = {"METADATA", "WHEEL", "entry_points.txt", "top_level.txt"}
# SGLang 0.5.12 leaves this open, and pip would choose a release that refuses the transformers which it pins.
NEEDS = ("kernels<0.15",)


def fork(theirs: Wheel, ours: Wheel, number: int) -> Wheel:
    """Both wheels' files as one wheel, version `THEIRS+reshard.NUMBER`. Raises CannotMerge or BadWheel."""
    version = f"{theirs.version}+reshard.{number}"
    made = replace(theirs, version=version)
    entries = []
    for entry in theirs.entries:
        name = _within(theirs, entry)
        if entry.path == _VERSION_MODULE:
            notice = f"Changed by sglang-reshard {ours.version}: the version, and no more."
            text = metadata.with_version(entry.data.decode(), theirs.version, version, notice)
            entry = replace(entry, data=text.encode())
        elif name in _CHANGED:
            continue
        elif name:
            entry = replace(entry, path=f"{made.dist_info}/{name}")
        entries.append(entry)
    for entry in ours.entries:
        name = _within(ours, entry)
        if name.startswith("licenses/"):
            licensed = f"{made.dist_info}/licenses/{ours.name}/{name.removeprefix('licenses/')}"
            entries.append(replace(entry, path=licensed))
        elif not name:
            entries.append(entry)
    entries += [Entry(f"{made.dist_info}/{name}", text.encode()) for name, text in _about(theirs, ours, version)]
    return replace(made, entries=tuple(entries))


def _within(wheel: Wheel, entry: Entry) -> str:
    """Its path in the dist-info folder; empty if it is not in there."""
    return entry.path.removeprefix(f"{wheel.dist_info}/") if entry.path.startswith(f"{wheel.dist_info}/") else ""


def _about(theirs: Wheel, ours: Wheel, version: str) -> list[tuple[str, str]]:
    """The files on the wheel itself that are made of both wheels'."""

    def both(name: str) -> tuple[str, str]:
        return theirs.about(name).decode(), ours.about(name).decode()

    described = metadata.merged(*both("METADATA"), version, NEEDS, f"{ours.name}/LICENSE")
    generator = f"Generator: {metadata.PLUGIN} ({ours.version})"
    return [
        ("METADATA", described),
        ("WHEEL", re.sub(r"(?m)^Generator: .*$", generator, both("WHEEL")[0])),
        ("entry_points.txt", metadata.merged_entry_points(*both("entry_points.txt"))),
        ("top_level.txt", "".join(both("top_level.txt"))),
    ]


def build(stock_wheel: Path, number: int, folder: Path) -> Path:
    """The forked wheel, in `folder`, of that stock wheel and this checkout."""
    with tempfile.TemporaryDirectory() as temporary:
        ours = archive.read(plain.build(Path(temporary)))
    return archive.write(fork(archive.read(stock_wheel), ours, number), folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.release.fork", description=__doc__)
    parser.add_argument("--number", type=int, default=1, help="the fork's: the N of +reshard.N")
    parser.add_argument("--python", default="", help="for another Python than this, such as 3.12")
    parser.add_argument("--platform", default="", help="for another platform, such as manylinux_2_34_aarch64")
    arguments = parser.parse_args()
    if arguments.number < 1:
        parser.error("--number counts from 1")
    if arguments.python or arguments.platform:
        version = stock.pinned_version((REPOSITORY / "requirements.lock").read_text())
        stock_wheel = stock.download(CACHE, version, arguments.python, arguments.platform)
    else:
        stock_wheel = stock.get(CACHE)
    print(build(stock_wheel, arguments.number, DIST))


if __name__ == "__main__":
    main()
