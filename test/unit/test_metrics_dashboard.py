"""The Grafana dashboard shows every metric that there is, and none that there is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_reshard.patches.metrics import METRICS

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
NAME = re.compile(r"\bsglang_reshard_\w+")
LABELS = re.compile(r"(?:by|without) \(([^)]*)\)|\{\{(\w+)\}\}")
SERVERS = {"instance", "job", "le"}  # labels that Prometheus gives


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def expressions() -> list[tuple[str, str]]:
    """Each with its legend."""
    return [(t["expr"], t["legendFormat"]) for panel in dashboard()["panels"] for t in panel["targets"]]


def exported() -> dict[str, str]:
    """What /metrics shows, with the metric that it is of."""
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    return {metric.name + end: metric.name for metric in METRICS for end in ends.get(metric.kind, ("",))}


def test_every_metric_is_shown_and_no_other() -> None:
    shown = {name for expression, _ in expressions() for name in NAME.findall(expression)}
    assert shown <= exported().keys()
    assert {exported()[name] for name in shown} == {metric.name for metric in METRICS}


def test_variables_ask_for_metrics_that_exist() -> None:
    asked = {name for variable in dashboard()["templating"]["list"] for name in NAME.findall(str(variable["query"]))}
    assert asked
    assert asked <= exported().keys()


def test_expressions_use_the_labels_that_their_metrics_have() -> None:
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    for expression, legend in expressions():
        has = set().union(*(labels[exported()[name]] for name in NAME.findall(expression))) | SERVERS
        for several, one in LABELS.findall(expression + legend):
            assert {label.strip() for label in (several or one).split(",")} <= has, expression


def test_panels_do_not_overlap_and_have_their_own_numbers() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for at in (panel["gridPos"] for panel in panels):
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert all(panel["title"] and panel["description"] for panel in panels)


GROWN = re.compile(
    r"\(((\w+)\{[^}]*\}) unless last_over_time\(\1\[6h\] offset (\$__rate_interval|\$__range)\)\)"
    r" or increase\(\1\[\3\]\)"
)


@pytest.mark.parametrize("expression", [expression for expression, _ in expressions()])
def test_a_single_scrape_shows_what_was_counted_before_it(expression: str) -> None:
    """`increase` and `rate` need two samples, and see nothing of what a counter had at its first one.

    A series without a sample before the window is new: it has grown by what it is, as a server starts with zeros.
    """
    counted = {m.name for m in METRICS if m.kind in ("counter", "histogram")}
    rest = GROWN.sub("", expression)
    assert not [name for name in NAME.findall(rest) if exported()[name] in counted], rest
    assert "rate(" not in rest
    assert "increase(" not in rest
