"""Compares the outcomes in two results files: `python -m benchmark.compare OLD NEW`.

Reads files as `make test-faults` and `make test-all` (architectures.json) write them. What was measured, such as
seconds, the host, and the words of explanations are left out. Prints a line for each difference, and exits
with 1 if there is one.

    git show v0.1:benchmark/results/faults.json > build/faults.json
    python -m benchmark.compare build/faults.json benchmark/results/faults.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

# Differ from run to run, are prose, or are no longer recorded (scalars: false in every row).
_LEFT_OUT = {
    "seconds", "detect_s", "peak_extra_bytes", "transport_reason", "why", "scalars", "host",
}  # fmt: skip
_RANDOM = "random faults"

Outcomes = Mapping[str, Any]


def outcomes(found: Any) -> Outcomes:
    """Maps a row's name to its outcome, for the content of either file.

    Rows of random faults, which have a `group`, are one row: the set of their outcomes.
    """
    if isinstance(found, list):
        return _faults(found)
    if "architectures" in found:
        return _flat(found["architectures"], 3)
    raise ValueError("neither the results of faults nor of architectures")


def differences(old: Outcomes, new: Outcomes) -> Iterator[str]:
    """Yields a line for each row that is missing, added or has another outcome.

    Of random faults only an outcome that is new is a difference: another run draws other faults.
    """
    for name in {**old, **new}:
        if name not in new:
            yield f"{name}: missing, was {_shown(old[name])}"
        elif name not in old:
            yield f"{name}: added, is {_shown(new[name])}"
        elif name == _RANDOM:
            if unseen := new[name] - old[name]:
                yield f"{name}: end in {_shown(unseen)}, which none did before"
        elif old[name] != new[name]:
            yield f"{name}: was {_shown(old[name])}, is {_shown(new[name])}"


def _faults(found: list[dict[str, Any]]) -> Outcomes:
    rows: dict[str, list[str]] = defaultdict(list)
    random: set[str] = set()
    for row in found:
        if row.get("header"):
            continue
        if row["group"]:
            random.add(row["outcome"])
        else:
            rows[", ".join(filter(None, (row["fault"], row["phase"], row["transport"])))].append(row["outcome"])
    several: dict[str, Any] = {name: sorted(ends) for name, ends in rows.items()}
    return several | ({_RANDOM: random} if random else {})


def _flat(value: Any, depth: int, prefix: str = "") -> dict[str, Any]:
    """A row for each leaf of nested dictionaries and lists, down to some depth, named by the keys that lead there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if depth == 0 or not items:
        return {prefix: _kept(value)}
    rows: dict[str, Any] = {}
    for key, inner in items:
        if key not in _LEFT_OUT:
            rows |= _flat(inner, depth - 1, f"{prefix}, {key}" if prefix else str(key))
    return rows


def _kept(value: Any) -> Any:
    return {k: _kept(v) for k, v in value.items() if k not in _LEFT_OUT} if isinstance(value, dict) else value


def _shown(outcome: Any) -> str:
    return json.dumps(sorted(outcome) if isinstance(outcome, set) else outcome)


def main(old: Path, new: Path) -> None:
    before, after = (outcomes(json.loads(path.read_text())) for path in (old, new))
    lines = list(differences(before, after))
    print("\n".join([*lines, f"{len(before)} rows before, {len(after)} now, {len(lines)} differences"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    typer.run(main)
