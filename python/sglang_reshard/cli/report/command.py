"""`sglang-reshard report`: writes the page and the trace of one update."""

from __future__ import annotations

from pathlib import Path

from sglang_reshard.cli.report import files, page, perfetto


def run(path: Path, update: int, out: Path | None, trace: Path | None) -> str:
    """Writes the files, and returns a line that says where they are.

    out    of the page; by default next to `path`, with the ending .html
    trace  for Perfetto; None for none
    """
    report = files.read(path, update)
    out = out or (Path("update.html") if path == files.STANDARD_INPUT else path.with_suffix(".html"))
    out.write_text(page.page(report))
    written = [str(out)]
    if trace is not None:
        trace.write_bytes(perfetto.trace(report))
        written.append(f"{trace} (open it at ui.perfetto.dev)")
    return f"{report.line()}: {', '.join(written)}"
