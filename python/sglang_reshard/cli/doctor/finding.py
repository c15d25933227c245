"""The result of one check, and how findings are shown. Needs no package that could be missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warning", "fail"]
_COLOURS = {"ok": "\033[32m", "warning": "\033[33m", "fail": "\033[1;31m"}
_PLAIN = "\033[0m"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's output.

    status  "fail" if updates are impossible, "warning" if some uses are affected, else "ok"
    says    what was found
    cure    what to do; empty if nothing needs to be done
    """

    name: str
    status: Status
    says: str
    cure: str = ""


def ok(name: str, says: str) -> list[Finding]:
    return [Finding(name, "ok", says)]


def warning(name: str, says: str, cure: str) -> list[Finding]:
    return [Finding(name, "warning", says, cure)]


def fail(name: str, says: str, cure: str) -> list[Finding]:
    return [Finding(name, "fail", says, cure)]


def failed(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def as_text(findings: Sequence[Finding], *, coloured: bool = False) -> str:
    """Returns a line for each; what to do follows an arrow. `coloured`: for a terminal."""
    lines = []
    for finding in findings:
        begin, end = (_COLOURS[finding.status], _PLAIN) if coloured else ("", "")
        lines.append(f"{begin}{finding.status:9}{end}{finding.name}: {finding.says}")
        if finding.cure:
            lines.append(f"{'':9}{begin}-> {finding.cure}{end}")
    count = {status: sum(f.status == status for f in findings) for status in _COLOURS}
    return "\n".join([*lines, f"{count['fail']} failed, {count['warning']} warnings, {count['ok']} ok"])


def as_json(findings: Sequence[Finding]) -> str:
    """{"ok": bool, "findings": [{"name", "status", "says", "cure"}]}; not ok where one failed."""
    return json.dumps({"ok": not failed(findings), "findings": [asdict(finding) for finding in findings]})


def show(findings: Sequence[Finding], *, json: bool) -> int:
    """Prints the findings, and returns the exit code."""
    print(as_json(findings) if json else as_text(findings, coloured=sys.stdout.isatty()))
    return int(failed(findings))
