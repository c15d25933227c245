"""OpenTelemetry spans of updates, where the application has a provider for them (extra `otel`).

    reshard.update                  trainer rank 0, `WeightSender.update`
        reshard.publish             what this rank makes known
        reshard.request             the engine is asked, until it answers
            reshard.serve           the engine's tokenizer manager; waits for running requests included
                reshard.PHASE       on each engine rank: trace, plan, connect, move, verify, commit

What crosses from the trainer to the engine is the request's `traceparent`, as W3C has it. Nothing here imports
OpenTelemetry: an application that has made a provider has imported it, and in any other a span costs a look-up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_reshard.version import __version__

_PREFIX = "sglang_reshard."  # of attributes


@contextmanager
def span(name: str, *, parent: str = "", **attributes: str | int | float | bool) -> Iterator[Any]:
    """A span around the block, None where nobody collects them. An exception that leaves the block is recorded.

    parent      a `traceparent`; empty for the span that is current here
    attributes  get the prefix "sglang_reshard."
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        yield None
        return
    tracer = trace.get_tracer("sglang_reshard", __version__)
    context = _propagator().extract({"traceparent": parent}) if parent else None
    with tracer.start_as_current_span(name, context=context, attributes=_prefixed(attributes)) as opened:
        yield opened


def tell(opened: Any, **attributes: str | int | float | bool) -> None:
    """What is known at a span's end only."""
    if opened is not None:
        opened.set_attributes(_prefixed(attributes))


def fail(opened: Any, message: str) -> None:
    """Mark a span as failed where no exception says so."""
    if opened is not None:
        opened.set_status(sys.modules["opentelemetry.trace"].Status(_error_code(), message))


def traceparent() -> str:
    """The current span, as another process can have it for a parent; empty where there is none."""
    if "opentelemetry.trace" not in sys.modules:
        return ""
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return carrier.get("traceparent", "")


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _error_code() -> Any:
    return sys.modules["opentelemetry.trace"].StatusCode.ERROR


def _prefixed(attributes: dict[str, Any]) -> dict[str, Any]:
    return {_PREFIX + name: value for name, value in attributes.items()}
