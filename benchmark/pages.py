"""Writes the tables of README.md and docs/results from the JSON files in benchmark/results.

python -m benchmark.pages [NAME ...]    # all of them, or those named

Each table has a template in `benchmark/templates`, and stands between two comments of its document, so that people can
write around it (`tools.marked`). The table of architectures is written by
`test/engine/architectures/architecture_results.py`, which knows its runs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmark import results
from benchmark.results import Head, Row, Rows
from tools import marked

_TEMPLATES = Path(__file__).parent / "templates"


class Table(NamedTuple):
    """A table of a document, made of a file of results by a template.

    writer  writes the file, where it may be missing
    """

    document: str
    source: Path
    template: str
    writer: str = ""

    def text(self, source: Path | None = None) -> str:
        """Returns the table of another file than `source`, if one is named."""
        path = source or self.source
        if self.writer and not path.exists():
            return f"No run is recorded: {self.writer} writes benchmark/results/{path.name}."
        found = json.loads(path.read_text())
        head, rows = results.load(path) if isinstance(found, list) else (found, [])
        return _environment().get_template(f"{self.template}.md").render(_said_of(path, head), rows=rows).strip("\n ")


def _table(name: str, page: str = "", file: str = "", template: str = "", writer: str = "") -> Table:
    """A table on the page of docs/results, of the file and by the template of its name, unless others are given."""
    document = page if page.endswith(".md") else f"docs/results/{page or name}.md"
    return Table(document, results.FOLDER / f"{file or name}.json", template or name, writer)


TABLES: dict[str, Table] = {
    "figures": _table("figures", page="README.md", file="bench"),
    "benchmark": _table("benchmark", file="bench"),
    "mesh-to-mesh": _table("mesh-to-mesh", file="mesh_to_mesh"),
    "fuzz-http": _table("fuzz-http", page="fuzz", template="fuzz"),
    "folders": _table("folders", template="fuzz"),
    "fuzz-deltas": _table("fuzz-deltas", page="fuzz"),
    "delta-checks": _table("delta-checks", page="deltas"),
    "control-transports": _table("control-transports", page="control", file="control_transports"),
    "gpu": _table("gpu", writer="`make test-gpu` on a host with a GPU"),
    "gpu-h100": _table("gpu-h100", page="gpu", template="gpu", writer="the same, on another GPU"),
    "one-gpu": _table("one-gpu", writer="an earlier benchmark"),
    "matrix": _table("matrix", page="docs/compatibility.md", writer="`make test-matrix`"),
    "test-all": _table("test-all", writer="`make test-all`"),
}
TABLES |= {path.stem: _table(path.stem) for path in sorted(_TEMPLATES.glob("*.md")) if path.stem not in TABLES}


def write(*names: str) -> None:
    """Writes the tables of these names, or all of them, into their documents."""
    for name in names or TABLES:
        marked.write(results.REPOSITORY / TABLES[name].document, name, TABLES[name].text())


def written(name: str) -> str:
    """Returns the table as its document has it."""
    return marked.read(results.REPOSITORY / TABLES[name].document, name)


def publish(
    name: str,
    command: str,
    rows: Sequence[msgspec.Struct | Row],
    notes: Sequence[str] = (),
    out: Path | None = None,
) -> None:
    """Saves rows as the results of a table and prints it. It is written into its document, too, unless `out` is given.

    notes  what was refused or skipped, and why
    out    another file for the rows
    """
    path = out or TABLES[name].source
    results.save(path, results.header(command, notes), rows)
    if path == TABLES[name].source:
        write(name)
    print(TABLES[name].text(path))


# -- what templates find


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = (three_digits, first_of, grouped, distinct_but_for, without_advice, figures_of_parts, figures_of_step)
    made.filters |= {call.__name__: call for call in filters}
    made.filters |= {"f": formatted, "cell": cell, "yes": lambda value: "yes" if value else "NO"}
    made.globals["rows_of"] = lambda name: results.load(results.FOLDER / f"{name}.json")[1]
    made.filters["sentence"] = lambda note: f"{note[0].upper()}{note[1:]}."
    made.filters |= {
        "mb": lambda value, spec=",.0f": formatted(value and value / 1e6, spec),
        "ms": lambda value, spec=".1f": formatted(value and value * 1e3, spec),
    }
    return made


def _said_of(path: Path, head: Head) -> dict[str, Any]:
    """Returns what every template may say of a file and its host."""
    host, link = head["host"], f"[{path.name}](../../benchmark/results/{path.name})"
    cores = f"{host['cores']} core{'s' if host['cores'] > 1 else ''}"
    gpus = f"GPUs {', '.join(host['gpus'])}" if host.get("gpus") else "no GPU"
    said = {
        "head": head,
        "notes": " ".join(head.get("notes", ())),
        "file": path.name,
        "link": link,
        "machine": f"{cores} ({host['cpu']}), {host['memory_gib']} GiB, {gpus}",
    }
    if "header" in head:
        versions, commit = head["versions"], head["commit"].replace("+", " with changes on top")
        said["measured"] = f"Measured by `{head['command']}` ({link}) on {said['machine']}, {head['date']}"
        said["measured_on"] = (
            f"Measured by `{head['command']}` on {said['machine']}, sglang {versions.get('sglang')}, torch "
            f"{versions['torch']}, at commit {commit}:"
        )
    return said


def formatted(value: Any, spec: str = ",", missing: str = "") -> str:
    """missing: what stands for None"""
    return missing if value is None else format(value, spec)


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:#.3g}"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def first_of(rows: Rows, **wanted: Any) -> Row | None:
    """Returns the first row with these values."""
    return next((row for row in rows if wanted.items() <= row.items()), None)


def grouped(rows: Rows, *names: str, first: bool = False) -> list[Rows]:
    """Returns rows with equal values together. first: equal in the first value that is not empty"""
    found: dict[Any, Rows] = {}
    for row in rows:
        values = tuple(row[name] for name in names)
        found.setdefault(next(filter(None, values)) if first else values, []).append(row)
    return list(found.values())


def distinct_but_for(rows: Rows, name: str) -> list[Row]:
    return list({tuple(value for key, value in row.items() if key != name): row for row in rows}.values())


def without_advice(why: str) -> str:
    """Returns the first part of an error."""
    return cell(re.split(r"[.;] (?:Compare|Send|Start) | \(sglang/", why)[0])


def figures_of_parts(rows: Rows) -> Iterator[tuple[str, Row]]:
    """Yields the parts of what items of the GPU battery have seen."""
    for row in rows:
        yield from ((name, part) for name, part in row["seen"].items() if isinstance(part, dict))


def figures_of_step(row: Row) -> str:
    """Returns figures as "name value", nested ones in parentheses."""
    seen = {name: value for name, value in row.items() if name not in ("case", "step", "right", "seconds")}
    if "phases" in seen:
        seen["phases"] = {f"{name}_ms": round(s * 1e3, 2) for name, s in seen["phases"].items()}
    return _figures(seen)


def _figures(seen: Row) -> str:
    parts = []
    for name, value in seen.items():
        text = f"({_figures(value)})" if isinstance(value, dict) else _figure(value)
        parts.append(f"{name.replace('_', ' ')} {text}")
    return "; ".join(parts)


def _figure(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_figure, value[:4])) + (", ..." if len(value) > 4 else "") or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    write(*sys.argv[1:])
