"""docs/reference/metrics.md: the metrics, from `patches.metrics`, and the spans, from the calls that open them."""

from __future__ import annotations

import ast
import re

from sglang_reshard.engine.context import Phase
from sglang_reshard.observability.probe_report import OUTCOMES
from sglang_reshard.patches import metrics
from sglang_reshard.patches.metrics import METRICS
from tools.website import markdown, sources

_PHASE = "reshard.PHASE"
# Span -> who opens it, around what.
SPANS = {
    "reshard.update": ("trainer rank 0", "one update, of all engines"),
    "reshard.publish": ("trainer rank 0", "publishing this rank's layout and handles, within `reshard.update`"),
    "reshard.offer": ("trainer rank 0", "comparing weights with those sent before, for deltas"),
    "reshard.request": ("trainer rank 0", "the request to one engine, until its answer"),
    "reshard.serve": ("the server's tokenizer manager", "the update in the server, with the wait for running requests"),
    _PHASE: ("each engine rank", "one phase of the update: " + ", ".join(f"`{phase.value}`" for phase in Phase)),
}
# Attribute, after "sglang_reshard." -> what it is.
ATTRIBUTES = {
    "session": "name of the session, without its key",
    "update": "number of the update within the session",
    "version": "the `weight_version`; empty if the update leaves it unchanged",
    "transport": "how the weights were moved, after a success",
    "received_bytes": "bytes that all engine ranks received, after a success",
    "phase": "the phase that failed, after a failure",
    "engine_rank": "the engine rank, of a span of a phase",
}

_INTRODUCTION = """\
[Observability](../observability.md) shows how to collect these, with alerts and a dashboard."""

_METRICS = f"""\
A server that was started with `--enable-metrics` exports these on SGLang's own `/metrics`, in Prometheus' format. They
exist from the start. Seconds, bytes and nats are the units; a histogram's samples have the suffixes `_bucket`, `_sum`
and `_count`, and its buckets end at {", ".join(f"{edge:g}" for edge in metrics._SECONDS)} seconds."""

_SPANS = """\
With a tracer provider of OpenTelemetry in a process, these are its spans. The request carries the context of the
trainer's span as a W3C `traceparent`, so that an update is one trace."""


def page() -> str:
    rows = [
        [f"`{m.name}`", m.kind.replace("version", "gauge"), ", ".join(f"`{label}`" for label in m.labels), m.help]
        for m in METRICS
    ]
    labels = [
        ["`phase` of `sglang_reshard_failures_total`", ", ".join(f"`{phase}`" for phase in metrics.FAILURE_PHASES)],
        ["`phase` of `sglang_reshard_phase_seconds`", ", ".join(f"`{phase.value}`" for phase in Phase)],
        ["`outcome`", ", ".join(f"`{outcome}`" for outcome in OUTCOMES)],
        ["`transport`", "that moved the weights, see [HTTP endpoints](http.md#messages)"],
        ["`version`", "the engine's `weight_version`"],
    ]
    spans = [[f"`{name}`", where, markdown.cell(what)] for name, (where, what) in SPANS.items()]
    attributes = [[f"`sglang_reshard.{name}`", markdown.cell(what)] for name, what in ATTRIBUTES.items()]
    return markdown.page(
        "Metrics and spans",
        _INTRODUCTION,
        "## Metrics",
        _METRICS,
        markdown.table(["metric", "kind", "labels", ""], rows),
        "### Values of labels",
        markdown.table(["label", "values"], labels),
        "## Spans",
        _SPANS,
        markdown.table(["span", "opened by", "around"], spans),
        "### Attributes",
        markdown.table(["attribute", ""], attributes),
    )


def spans_of_the_code() -> set[str]:
    """Returns the names of all spans that the package opens; a phase's as `reshard.PHASE`."""
    found = set()
    for tree in sources.trees("span(", "set_attributes("):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("span") and node.args:
                name = node.args[0]
                if isinstance(name, ast.JoinedStr):
                    found.add(re.sub(r"\{\w+\}", lambda m: m[0][1:-1].upper(), ast.unparse(name)[2:-1]))
                elif isinstance(name, ast.Constant):
                    found.add(str(name.value))
    return found


def attributes_of_the_code() -> set[str]:
    """Returns the attributes that calls name; those given as `**labels` are of `DistributedUpdateWeightsReq.labels`."""
    found = set()
    for tree in sources.trees("span(", "set_attributes("):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("spans.span", "spans.set_attributes")):
                found |= {keyword.arg for keyword in node.keywords if keyword.arg not in (None, "parent")}
    return {name for name in found if name}
