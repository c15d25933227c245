"""Writes the tables of docs/reference, from the code.

python -m tools.website.pages

Each table stands between two comments of its page, so that people can write around it (`tools.marked`).
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from sglang_reshard.engine.context import Phase
from sglang_reshard.extras.probe.probe import Probe
from sglang_reshard.extras.snapshots.of_sender import SnapshotOptions
from sglang_reshard.gpu.rank_info import NCCL_SETTINGS
from sglang_reshard.observability.probe_report import OUTCOMES
from sglang_reshard.patches import metrics
from sglang_reshard.patches.launch import TORCHRUN_VARIABLES
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from tools import marked
from tools.website import fields, json_types, markdown, options, stubs

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
_GROUP = re.compile(r"^## (.+)\n+From `([\w.]+)`:\n((?:.|\n)*?)(?=^## |\Z)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^<!-- ::: ([\w.]+)\.(\w+) -->$", re.MULTILINE)


def tables() -> dict[tuple[str, str], Callable[[], str]]:
    """Returns page and name of each table -> its text."""
    snapshots = partial(options.of_class, SnapshotOptions, options.of_snapshots(), without=("name",))
    return {
        ("http", "messages"): json_types.messages,
        ("metrics", "metrics"): _metrics,
        ("metrics", "labels"): _labels,
        ("settings", "commands"): options.of_commands,
        ("settings", "nccl"): partial(_names, NCCL_SETTINGS),
        ("settings", "torchrun"): partial(_names, TORCHRUN_VARIABLES),
        ("settings", "sender-options"): partial(options.of_class, SenderOptions),
        ("settings", "update-options"): partial(options.of_class, UpdateOptions),
        ("settings", "snapshots"): snapshots,
        ("settings", "probe"): partial(options.of_class, Probe),
        ("settings", "verl"): options.of_verl,
        **{("api", name): partial(_entry, module, name) for _, module, names in api() for name in names},
    }


def path(page: str) -> Path:
    return FOLDER / f"{page}.md"


def api() -> list[tuple[str, str, list[str]]]:
    """Returns the groups of api.md: name, module that its names are imported from, and the names."""
    found = _GROUP.findall(path("api").read_text())
    return [
        (heading.lower().replace(" ", "-"), module, [name for _, name in _DIRECTIVE.findall(body)])
        for heading, module, body in found
    ]


def _entry(module: str, name: str) -> str:
    """The first paragraph of the docstring, and the signatures."""
    of = getattr(import_module(module), name)
    opening = fields.opening(inspect.getdoc(of) or "").split("\n\n")[0]
    return f"{markdown.inline(opening)}\n\n```python\n{stubs.stub(of)}\n```"


def _metrics() -> str:
    rows = [
        [f"`{m.name}`", m.kind.replace("version", "gauge"), markdown.codes(m.labels), m.help] for m in metrics.METRICS
    ]
    return markdown.table(["metric", "kind", "labels", "meaning"], rows)


def _labels() -> str:
    phases = markdown.codes(tuple(phase.value for phase in Phase))
    rows = [
        ["`phase` of `sglang_reshard_failures_total`", markdown.codes(metrics.FAILURE_PHASES)],
        ["`phase` of `sglang_reshard_phase_seconds`", phases],
        ["`outcome`", markdown.codes(OUTCOMES)],
        ["`transport`", "that moved the weights, see [HTTP endpoints](http.md#messages)"],
        ["`version`", "the engine's `weight_version`"],
    ]
    return markdown.table(["label", "values"], rows)


def _names(names: tuple[str, ...]) -> str:
    return textwrap.fill(" ".join(f"`{name}`" for name in names), 120, break_on_hyphens=False)


def main() -> None:
    for (page, name), text in tables().items():
        marked.write(path(page), name, text())


if __name__ == "__main__":
    main()
