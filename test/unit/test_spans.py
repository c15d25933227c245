"""The spans of updates that are refused and that succeed; and nothing at all without OpenTelemetry."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from support.refusals import refusal_of
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world


def train(trainer: Any) -> dict[str, Any]:
    """Whether the span of each update has failed, and its trace, by the version."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    sender = trainer.sender()
    for version in ("refused", "2"):
        refused = refusal_of(lambda v=version: sender.update(checkpoint(1), weight_version=v))  # type: ignore[misc]
        assert refused[0] == ("EngineRefused" if version == "refused" else "")
    spans = [span for span in exporter.get_finished_spans() if span.name == "reshard.update"]
    return {
        span.attributes["sglang_reshard.version"]: (span.status.status_code.name == "ERROR", span.context.trace_id)
        for span in spans
    }


def serve(rank: int, size: int, requests: Any) -> None:
    receiver = receiver_of(ToyRank(rank, size))
    for request in requests:
        requests.answer(receiver.update(request, "not now" if request.weight_version == "refused" else ""))


def test_each_update_is_a_trace_of_its_own_and_a_refused_one_has_failed() -> None:
    ((told,), _) = run_world(1, 1, train, serve)
    assert {version: failed for version, (failed, _) in told.items()} == {"refused": True, "2": False}
    assert told["refused"][1] != told["2"][1]


WITHOUT = """
import sys
from sglang_reshard.observability import spans
import sglang_reshard.api.weight_sender
with spans.span("reshard.update", update=1) as span:
    spans.set_attributes(span, transport="ipc")
    spans.set_error(span, "no")
    assert spans.traceparent() == ""
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""


def test_without_opentelemetry_spans_are_nothing_and_it_is_not_imported() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT], stderr=subprocess.PIPE, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
