"""Prints the rows of bench.json on the terminal, and renders them for README.md and docs/results (see `pages`)."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmark import results
from benchmark.cases import STOCK

_COLUMNS = (
    "path",
    "seconds, median",
    "p95",
    "x copy limit",
    "x faster than stock",
    "GB/s per rank",
    "received / least",
    "peak extra MB",
    "control ms",
    "bit-exact",
)


def cells(row: dict[str, Any]) -> list[str]:
    """One for each of the columns, on the terminal and in docs/results/benchmark.md."""
    faster, control = row["times_faster_than_stock"], row["control_seconds"]
    return [
        "SGLang's own" if row["path"] == STOCK else row["path"],
        _three_digits(row["seconds_median"]),
        _three_digits(row["seconds_p95"]),
        f"{row['times_limit']:.1f}",
        "" if row["path"] == STOCK or faster is None else f"{faster:.0f}",
        _three_digits(row["gb_per_s_per_rank"]),
        f"{row['bytes_received_ratio']:.2f}",
        f"{row['peak_extra_bytes'] / 1e6:,.1f}",
        "" if control is None else f"{control * 1e3:.1f}",
        "yes" if row["bit_exact"] else "NO",
    ]


def by_case(rows: results.Rows) -> dict[str, results.Rows]:
    found: dict[str, results.Rows] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return found


def title(case: str, rows: results.Rows) -> str:
    """What holds of all rows of a case."""
    first = rows[0]
    limit = _three_digits(first["limit_seconds"])
    return f"{case}: {first['tensors']:,} tensors, {first['bytes'] / 1e6:,.0f} MB; copy limit {limit} s"


def print_rows(console: Console, rows: results.Rows, notes: list[str]) -> None:
    for case, of_case in by_case(rows).items():
        table = Table(title=title(case, of_case))
        for i, column in enumerate((*_COLUMNS, "updates")):
            table.add_column(column, justify="right" if i else "left")
        for row in of_case:
            table.add_row(*cells(row), str(row["updates"]))
        console.print(table)
        for row in of_case:
            if row["path"] == "auto":
                console.print(f"auto took {row['transport']}: {row['transport_reason']}", markup=False, highlight=False)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def markdown(head: dict[str, Any], rows: results.Rows) -> str:
    """Returns the tables of docs/results/benchmark.md: one for each case, and what they were measured on."""
    lines = [_measured_on(head)]
    for case, of_case in by_case(rows).items():
        lines += ["", f"**{title(case, of_case)}**", ""]
        lines += ["| " + " | ".join(_COLUMNS) + " |", "|---" + "|---:" * (len(_COLUMNS) - 1) + "|"]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in of_case]
    lines += ["", *(f"- {note}" for note in head["notes"])]
    return "\n".join(lines).rstrip()


def costs(head: dict[str, Any], rows: results.Rows) -> str:
    """Returns the table of README.md: `auto` beside SGLang's own path, a row for each case that has both."""
    lines = [
        _measured_on(head),
        "",
        "| case | MB | tensors | this package, s | SGLang's own, s | times faster | plain copy of what ranks lack, s "
        "| bytes received, of those needed | peak extra memory, MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case, of_case in by_case(rows).items():
        by_path = {row["path"]: row for row in of_case}
        if "auto" not in by_path or STOCK not in by_path:
            continue
        ours, stock = by_path["auto"], by_path[STOCK]
        row = [case, f"{ours['bytes'] / 1e6:,.0f}", f"{ours['tensors']:,}"]
        row += [_three_digits(r["seconds_median"]) for r in (ours, stock)]
        row += [f"{ours['times_faster_than_stock']:.0f}", _three_digits(ours["limit_seconds"])]
        row.append(" / ".join(f"{r['bytes_received_ratio']:.2f}" for r in (ours, stock)))
        row.append(" / ".join(f"{r['peak_extra_bytes'] / 1e6:,.1f}" for r in (ours, stock)))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _measured_on(head: dict[str, Any]) -> str:
    host, versions = head["host"], head["versions"]
    commit = head["commit"].replace("+", " with changes on top")
    gpus = f"GPUs {', '.join(host['gpus'])}" if host["gpus"] else "no GPU"
    return (
        f"Measured by `{head['command']}` on {host['cores']} cores ({host['cpu']}), {host['memory_gib']} GiB, {gpus}, "
        f"sglang {versions['sglang']}, torch {versions['torch']}, at commit {commit}:"
    )


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:#.3g}"
