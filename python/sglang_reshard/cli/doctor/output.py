"""Findings for people, one line each, and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from sglang_reshard.cli.doctor.finding import Finding

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ok": "green", "warning": "yellow", "fail": "bold red"}


def failed(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def show(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Prints a line each; what to do follows an arrow. Without the package rich, it is plain text."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(as_text(findings))
        return
    console = console or Console()
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        says = Text(finding.says)
        if finding.cure:
            says.append(f"\n-> {finding.cure}", style=_STYLES[finding.status])
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), finding.name, says)
    console.print(table)
    console.print(_counts(findings), highlight=False)


def as_text(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:9}{finding.name}: {finding.says}")
        if finding.cure:
            lines.append(f"{'':9}-> {finding.cure}")
    return "\n".join([*lines, _counts(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    """{"ok": bool, "findings": [{"name", "status", "says", "cure"}]}; not ok where one failed."""
    return json.dumps({"ok": not failed(findings), "findings": [asdict(finding) for finding in findings]})


def _counts(findings: Sequence[Finding]) -> str:
    count = {status: sum(f.status == status for f in findings) for status in _STYLES}
    return f"{count['fail']} failed, {count['warning']} warnings, {count['ok']} ok"
