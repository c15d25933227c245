"""Emits OpenTelemetry spans of updates if the application has a tracer provider (extra `otel`).

    reshard.update                  trainer rank 0, `WeightSender.update`
        reshard.publish             publishing this rank's layout and handles
        reshard.request             the request to the engine, until its answer
            reshard.serve           the engine's tokenizer manager, including the wait for running requests
                reshard.PHASE       on each engine rank: trace, plan, connect, move, verify, commit

The request carries a W3C `traceparent` from the trainer to the engine. Nothing here imports OpenTelemetry: an
application that has a provider has imported it, and in any other a span costs one dictionary look-up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_reshard.version import __version__

_PREFIX = "sglang_reshard."  # of attributes
_API = "opentelemetry.trace"


@contextmanager
def span(name: str, *, parent: str = "", **attributes: str | int | float | bool) -> Iterator[Any]:
    """Opens a span around the block, and records an exception that leaves it. Yields None if nobody collects spans.

    parent      a `traceparent`; empty for the current span
    attributes  get the prefix "sglang_reshard."
    """
    trace = sys.modules.get(_API)
    if trace is None:
        yield None
        return
    tracer = trace.get_tracer("sglang_reshard", __version__)
    context = _propagator().extract({"traceparent": parent}) if parent else None
    with tracer.start_as_current_span(name, context=context, attributes=_prefixed(attributes)) as opened:
        yield opened


def set_attributes(opened: Any, **attributes: str | int | float | bool) -> None:
    """Adds attributes to a span that `span` yielded."""
    if opened is not None:
        opened.set_attributes(_prefixed(attributes))


def set_error(opened: Any, message: str) -> None:
    """Marks a span as failed although no exception leaves its block."""
    if opened is not None:
        trace = sys.modules[_API]
        opened.set_status(trace.Status(trace.StatusCode.ERROR, message))


def traceparent() -> str:
    """Returns the current span as a parent for another process; empty if there is none."""
    if _API not in sys.modules:
        return ""
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return carrier.get("traceparent", "")


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _prefixed(attributes: dict[str, Any]) -> dict[str, Any]:
    return {_PREFIX + name: value for name, value in attributes.items()}
