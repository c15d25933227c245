"""What results say of trust, as the tables and sentences in RESHARDING_GUIDE.md.

python -m benchmark.trust    # all of them anew
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark import marked, results

GUIDE = results.REPOSITORY / "RESHARDING_GUIDE.md"


def digest(head: dict[str, Any], rows: results.Rows) -> str:
    lines = [
        f"{_by(head, 'digest')}. `x copy`: seconds against those of a plain copy of the same bytes in the same run.",
        "",
        "| weights | side | looks at | bytes read, MB | seconds | ns an element | x copy |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['case']} | {r['side']} | {r['selection']} | {r['bytes'] / 1e6:,.0f} | {r['seconds']:.4f} | "
        f"{r['ns_per_element']:.2f} | {r['times_copy']:.2f} |"
        for r in rows
        if "times_copy" in r
    ]
    return "\n".join(lines)


def faults(head: dict[str, Any], rows: results.Rows) -> str:
    lines = [
        f"{_by(head, 'faults')}: {len(rows)} rows, of which these are the sums.",
        "",
        "| fault | tried | in or at | what the engine had afterwards | noticed within, s |",
        "|---|---:|---|---|---:|",
    ]
    for fault in dict.fromkeys(map(_fault, rows)):
        of = [row for row in rows if _fault(row) == fault]
        seconds = [row["detect_s"] for row in of if row["detect_s"] is not None]
        lines.append(
            f"| {fault} | {len(of)} | {'any' if of[0]['group'] else _listed(of, 'phase')} | {_listed(of, 'outcome')} | "
            f"{f'{max(seconds):.2f}' if seconds else ''} |"
        )
    return "\n".join(lines)


def fuzz(head: dict[str, Any], rows: results.Rows) -> str:
    cases, failed = sum(row["cases"] for row in rows), [row["test"] for row in rows if row["outcome"] != "passed"]
    seconds = sum(row["seconds"] for row in rows)
    ended = f"{len(failed)} failed: {', '.join(failed)}" if failed else "none found anything"
    return f"{_by(head, 'fuzz')}: {cases:,} cases of {len(rows)} tests, {seconds:,.0f} s of cases; {ended}."


def soak(head: dict[str, Any], rows: results.Rows) -> str:
    summary = next(row for row in rows if row["row"] == "summary")
    held = [f"{row['process']} {row['held_ratio']:.4f}" for row in rows if row["row"] == "process"]
    lines = [
        f"{_by(head, 'soak')}: {summary['updates']:,} updates of a TP=2 server in {summary['seconds']:,.0f} s (median "
        f"{summary['update_seconds_median']:.3f} s, the wait for running requests included), while clients asked for "
        f"{summary['requests']:,} answers.",
        "",
        f"- {summary['failures']} requests failed, {summary['wrong_version']} had a version that was not due.",
        f"- {summary['versions_verified']} versions verified: by `verify`, by a stock load, by transformers' tokens.",
        f"- Memory in the last tenth of the updates against the second tenth: {', '.join(held)}.",
    ]
    return "\n".join(lines)


TOLD: dict[str, Callable[[dict[str, Any], results.Rows], str]] = {
    "digest": digest,
    "faults": faults,
    "fuzz": fuzz,
    "soak": soak,
}


def path(name: str) -> Path:
    return results.FOLDER / f"{name}.json"


def text(name: str) -> str:
    return TOLD[name](*results.load(path(name)))


def _by(head: dict[str, Any], name: str) -> str:
    host = head["host"]
    gpus = f"GPUs {', '.join(host['gpus'])}" if host["gpus"] else "no GPU"
    link = f"[{name}.json](benchmark/results/{name}.json)"
    return f"By `{head['command']}` ({link}) on {host['cores']} cores ({host['cpu']}), {host['memory_gib']} GiB, {gpus}"


def _fault(row: dict[str, Any]) -> str:
    return str(row["group"] or row["fault"])


def _listed(rows: results.Rows, column: str) -> str:
    return ", ".join(dict.fromkeys(row[column] for row in rows if row[column]))


def write_guide() -> None:
    for name in TOLD:
        marked.write(GUIDE, name, text(name))


if __name__ == "__main__":
    write_guide()
