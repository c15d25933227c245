"""Findings for people, one line each, and for programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_reshard.cli.doctor.finding import Finding

_STYLES = {"ok": "green", "warning": "yellow", "fail": "bold red"}


def failed(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def show(console: Console, findings: Sequence[Finding]) -> None:
    """A line each; what to do follows an arrow."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        says = Text(finding.says)
        if finding.cure:
            says.append(f"\n-> {finding.cure}", style=_STYLES[finding.status])
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), finding.name, says)
    console.print(table)
    counts = {status: sum(f.status == status for f in findings) for status in _STYLES}
    console.print(f"{counts['fail']} failed, {counts['warning']} warnings, {counts['ok']} ok", highlight=False)


def as_json(findings: Sequence[Finding]) -> str:
    """{"ok": bool, "findings": [{"name", "status", "says", "cure"}]}; not ok where one failed."""
    return msgspec.json.encode({"ok": not failed(findings), "findings": list(findings)}).decode()
