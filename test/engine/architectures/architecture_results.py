"""Outcomes by architecture, as JSON in benchmark/results and as the table in docs/results/architectures.md.

PYTHONPATH=test:. python test/engine/architectures/architecture_results.py    # the table anew from the JSON
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from architecture_cases import RESULTS, RUNS
from tools import marked

REPOSITORY = Path(__file__).parents[3]
FORWARDS = RESULTS.with_name("forwards.json")
PAGE = REPOSITORY / "docs" / "results" / "architectures.md"
NAME = "architectures"

# The runs that decide what the table says of an architecture; the others have columns of their own.
MAIN_RUNS = ("tp 1", "tp 2", "tp 4")
_WORST_LAST = ("passed", "refused", "cannot", "failed")
_KINDS = {
    "text": "Language models",
    "multimodal": "Models of images and sound",
    "draft": "Draft models, each built and loaded with its target",
}
_WORDS = {"passed": "yes", "refused": "refused", "cannot": "no", "failed": "FAILED"}


def collected(architectures: Iterable[list[str]], cases: Iterable[tuple[list[Any], dict[str, Any]]]) -> dict[str, Any]:
    """The lines that architecture_cases.py prints, put together by architecture and run."""
    found: dict[str, Any] = {}
    for name, kind, writer, own, usual, why in architectures:
        found[name] = {"kind": kind, "checkpoint": writer, "own": own, "config": usual, "why": why}
        found[name] |= {"has": [], "runs": {}}
    ranks: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for (name, run, rank), finding in cases:
        ranks[name, run][rank] = finding
    for (name, run), by_rank in ranks.items():
        entry = found[name]
        entry["runs"][run] = {
            "ranks": {str(r): by_rank[r]["outcome"] for r in sorted(by_rank)},
            "copies": {str(r): by_rank[r]["copies"] for r in sorted(by_rank) if by_rank[r]["copies"]},
        }
        worst = max(by_rank.values(), key=lambda f: _WORST_LAST.index(f["outcome"]))
        if worst["why"]:
            entry["runs"][run]["why"] = worst["why"]
        if len(by_rank) > 1 and (nowhere := set.intersection(*(set(f["unread"]) for f in by_rank.values()))):
            entry["runs"][run] |= {"together": "refused", "why": f"no engine rank's loader reads {min(nowhere)}"}
        entry["has"] = sorted({*entry["has"], *(h for f in by_rank.values() for h in f["has"])})
    return found


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Findings on GPU and on CPU code paths, which come from two processes."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            known = whole.setdefault(name, {**entry, "runs": {}})
            known["runs"] |= entry["runs"]
            known["has"] = sorted({*known["has"], *entry["has"]})
    return dict(sorted(whole.items()))


def outcome(run: Mapping[str, Any]) -> str:
    """The worst of its engine ranks', or that of all together: each may pass where an update of all is refused."""
    return max(*run["ranks"].values(), run.get("together", "passed"), key=_WORST_LAST.index)


def overall(entry: Mapping[str, Any]) -> str:
    """Of the main runs, as far as stock SGLang has them: passed, refused, failed; "cannot" when it has none.

    "in part" if it passes and the last sweep has not tried all of them, "no checkpoint" when there was nothing to try.
    """
    main = {outcome(entry["runs"][r]) for r in MAIN_RUNS if r in entry["runs"]}
    found = next((o for o in ("failed", "refused", "passed", "cannot") if o in main), "no checkpoint")
    return "in part" if found == "passed" and not entry["runs"].keys() >= set(MAIN_RUNS) else found


def save(found: Mapping[str, Any]) -> None:
    _save(RESULTS, architectures=found)


def saved() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())["architectures"] if RESULTS.exists() else {}


def save_forwards(found: Mapping[str, Any], newest: Mapping[str, Any]) -> None:
    """Saves what test_forwards.py has found with the pinned SGLang and with the newest."""
    _save(FORWARDS, architectures=dict(sorted(found.items())), newest=dict(sorted(newest.items())))


def _save(path: Path, **sections: Mapping[str, Any]) -> None:
    """An architecture a line, so that a change is a change of its line."""
    head = {"made by": "make test-all", "sglang": version("sglang"), "transformers": version("transformers")}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, cases in sections.items():
        entries = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
        lines.append(f'"{key}": {{\n{entries}\n}}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def saved_forwards(key: str = "architectures") -> dict[str, Any]:
    """key: "architectures" of the pinned SGLang, or "newest"."""
    return json.loads(FORWARDS.read_text()).get(key, {}) if FORWARDS.exists() else {}


_COUNTED = {
    "passed": "{} pass at tp 1, 2 and 4",
    "in part": "{} pass on one engine rank and were not tried on the others",
    "refused": "{} are refused",
    "cannot": "{} stock SGLang does not build or load here",
    "no checkpoint": "and for {} no checkpoint could be written",
}


def _counted(count: Mapping[str, int]) -> str:
    return ", ".join(words.format(count[outcome]) for outcome, words in _COUNTED.items() if count[outcome])


def table(found: Mapping[str, Any]) -> str:
    """Markdown: a row for each architecture that was tried, by kind, the reasons by number, and what was not tried."""
    runs = [r.name for r in RUNS]
    numbers: dict[str, int] = {}  # reason -> its number, in the order in which they come up
    lines = []
    for kind, title in _KINDS.items():
        of_kind = {name: entry for name, entry in found.items() if entry["kind"] == kind}
        count: dict[str, int] = defaultdict(int)
        for entry in of_kind.values():
            count[overall(entry)] += 1
        lines += [
            f"**{title}.** Of {len(of_kind)}, {_counted(count)}.",
            "",
            "| architecture | " + " | ".join([*runs, "forward"]) + " |",
            "|---" * (len(runs) + 2) + "|",
        ]
        lines += [_row(name, entry, runs, numbers) for name, entry in of_kind.items() if entry["runs"]]
        lines += [""]
    lines += [f"{number}. {reason}" for reason, number in numbers.items()]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, entry in found.items():
        if not entry["runs"]:
            by_reason[entry["why"] or "transformers has no class that would write a checkpoint"].append(name)
    lines += ["", "No checkpoint:", ""]
    lines += [f"- {reason}: {', '.join(names)}" for reason, names in by_reason.items()]
    lines += ["", "**Forward passes with SGLang 0.5.23.** " + _forwards_of_newest(saved_forwards("newest"))]
    return "\n".join(lines)


def _forwards_of_newest(cases: Mapping[str, Any]) -> str:
    of = {outcome: [name for name, case in cases.items() if case["outcome"] == outcome] for outcome in _WORST_LAST}
    refused = "".join(f" {name} is refused: {_short(cases[name]['why'])}." for name in of["refused"])
    return (
        f"Of {len(cases)} language models, {len(of['passed'])} pass as in the column, {len(of['refused'])} are "
        f"refused, and {len(of['cannot'])} SGLang's CPU code does not run.{refused}"
    )


def passing() -> dict[str, int]:
    """How many of the saved architectures pass, by kind."""
    entries = saved().values()
    return {kind: sum(e["kind"] == kind and overall(e) == "passed" for e in entries) for kind in _KINDS}


def _row(name: str, entry: Mapping[str, Any], runs: list[str], numbers: dict[str, int]) -> str:
    cells = []
    for run in runs:
        result = entry["runs"].get(run)
        cell = _WORDS[outcome(result)] if result else ""
        if result and result.get("why"):
            cell += f" ({numbers.setdefault(_short(result['why']), len(numbers) + 1)})"
        cells.append(cell)
    cells.append(_forward(saved_forwards().get(name), numbers))
    notes = [f"checkpoint of {entry['checkpoint']}"] if not entry["own"] else []
    notes += [f"config with {' and '.join(entry['config'])}"] if entry["config"] else []
    note = f" ({', '.join(notes)})" if notes else ""
    return f"| {name}{note} | " + " | ".join(cells) + " |"


def _forward(case: Mapping[str, Any] | None, numbers: dict[str, int]) -> str:
    """The cell for what forward_cases.py has found."""
    if case is None:
        return ""
    if case["outcome"] == "passed":
        kept = sorted({path.rpartition(".")[2] for path in case["derived"]})
        return f"yes, {', '.join(f'`{name}`' for name in kept)} again" if kept else "yes"
    return f"{_WORDS[case['outcome']]} ({numbers.setdefault(_short(case['why']), len(numbers) + 1)})"


def _short(reason: str) -> str:
    first = reason.split(". ")[0].replace("|", "\\|").replace("<", "\\<")
    return first if len(first) <= 160 else first[:157] + "..."


def write_table() -> None:
    marked.write(PAGE, NAME, table(saved()))


def written_table() -> str:
    return marked.read(PAGE, NAME)


if __name__ == "__main__":
    write_table()
