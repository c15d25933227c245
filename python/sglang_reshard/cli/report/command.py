"""`sglang-reshard report`: reads the JSON of a report, or a line for each update, and writes its page and its trace."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from sglang_reshard.cli.report.page import page
from sglang_reshard.cli.report.timeline import trace as traced
from sglang_reshard.errors import Mismatch
from sglang_reshard.observability.report import UpdateReport

STANDARD_INPUT = Path("-")


def run(path: Path, update: int, out: Path | None, trace: Path | None) -> str:
    """Writes the files, and returns a line that says where they are.

    out    of the page; by default next to `path`, with the ending .html
    trace  for Perfetto; None for none
    """
    report = read(path, update)
    out = out or (Path("update.html") if path == STANDARD_INPUT else path.with_suffix(".html"))
    out.write_text(page(report))
    written = [str(out)]
    if trace is not None:
        trace.write_bytes(traced(report))
        written.append(f"{trace} (open it at ui.perfetto.dev)")
    return f"{report.line()}: {', '.join(written)}"


def read(path: Path, update: int) -> UpdateReport:
    """Returns one report of a file.

    update  its number from 1 on; 0 for the last one

    Raises Mismatch if the file has no such report, and names the line that is none.
    """
    text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text()
    try:
        found = [msgspec.json.decode(text, type=UpdateReport)]
    except msgspec.DecodeError:
        found = [_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not found:
        raise Mismatch(f"{path} is empty. Write report.json() to it, a line for each update.")
    if update > len(found):
        raise Mismatch(f"{path} has {len(found)} reports, not {update}; pass --update 1 to {len(found)}")
    return found[update - 1]


def _line(path: Path, number: int, line: str) -> UpdateReport:
    try:
        return msgspec.json.decode(line, type=UpdateReport)
    except msgspec.DecodeError as error:
        raise Mismatch(f"{path}, line {number} is not the JSON of an UpdateReport: {error}") from None
