"""One trace of an update, from the trainer through the engine's processes; and nothing at all without OpenTelemetry."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("opentelemetry.sdk")

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.control import Address
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import EngineRefused
from sglang_reshard.observability import spans
from sglang_reshard.patches.update_observer import observed
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from support.toy import ToyRank
from support.toy_trainers import State
from support.world import run_world


class Collected:
    """The spans of this process, as they end."""

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        trace.set_tracer_provider(provider)

    def told(self) -> list[dict[str, Any]]:
        return [
            {
                "name": span.name,
                "trace": span.context.trace_id,
                "span": span.context.span_id,
                "parent": span.parent.span_id if span.parent else None,
                "attributes": dict(span.attributes),
                "failed": not span.status.is_ok and span.status.status_code.name == "ERROR",
            }
            for span in self._exporter.get_finished_spans()
        ]


def train(trainer: Any, updates: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    collected = Collected()
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    state = State((trainer.size,), "tp", torch.float32)
    for number, options in enumerate(updates, start=1):
        state.become(number)
        with pytest.raises(EngineRefused) if options["weight_version"] == "refused" else contextlib.nullcontext():
            sender.update(state.given, **options)
    sender.close()
    return collected.told()


def serve(rank: int, size: int, requests: Any, updates: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    collected = Collected()
    receiver = WeightReceiver(TracedModel(ToyRank(rank, size, torch.float32)), rank, size, torch.device("cpu"))
    for request in requests:
        requests.answer(receiver.update(request, "not now" if request.weight_version == "refused" else ""))
    return collected.told()


def test_an_update_is_one_trace_on_both_sides() -> None:
    trainers, engines = run_world(2, 2, train, serve, ({"weight_version": "42", "verify": "full"},))
    assert trainers[1] == [], "trainer rank 0 tells of the whole update"
    (update,) = [span for span in trainers[0] if span["name"] == "reshard.update"]
    assert update["parent"] is None
    named = {"sglang_reshard.update": 1, "sglang_reshard.version": "42", "sglang_reshard.transport": "ipc"}
    assert named.items() <= update["attributes"].items()
    assert update["attributes"]["sglang_reshard.received_bytes"] > 0
    parents = {span["name"]: span["parent"] for span in trainers[0]}
    assert parents == {"reshard.update": None, "reshard.publish": update["span"], "reshard.request": update["span"]}
    (request,) = [span for span in trainers[0] if span["name"] == "reshard.request"]
    for rank, told in enumerate(engines):
        assert {span["trace"] for span in told} == {update["trace"]}
        assert {span["parent"] for span in told} == {request["span"]}
        assert {span["attributes"]["sglang_reshard.engine_rank"] for span in told} == {rank}
        names = [span["name"] for span in told]
        for phase in ("trace", "plan", "connect", "move", "verify", "commit"):
            assert f"reshard.{phase}" in names


def test_each_update_is_a_trace_of_its_own_and_a_refused_one_has_failed() -> None:
    updates = {"weight_version": "refused"}, {"weight_version": "2"}
    trainers, _ = run_world(1, 1, train, serve, updates)
    found = {s["attributes"]["sglang_reshard.version"]: s for s in trainers[0] if s["name"] == "reshard.update"}
    assert found["refused"]["failed"]
    assert not found["2"]["failed"]
    assert found["refused"]["trace"] != found["2"]["trace"]


def watch() -> None:
    """In a process of its own: what the tokenizer manager tells of an update that fails, and hands on to schedulers."""
    collected = Collected()
    manager = type("Manager", (), {"enable_metrics": False})()
    asked = DistributedUpdateWeightsReq(
        address=Address("a session", "127.0.0.1", 1, "00"), update=7, layout="", handles=(), trainer_hosts=()
    )
    handed_on = []

    async def update(manager: Any, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        handed_on.append(request.traceparent)
        return DistributedUpdateWeightsOutput(success=False, message="no", phase="move")

    with spans.span("the trainer's"):
        parent = spans.traceparent()
    asyncio.run(observed(update)(manager, msgspec.structs.replace(asked, traceparent=parent)))
    trainers, serve = collected.told()
    assert serve["name"] == "reshard.serve"
    assert (serve["trace"], serve["parent"]) == (trainers["trace"], trainers["span"])
    assert serve["failed"]
    assert serve["attributes"]["sglang_reshard.phase"] == "move"
    assert serve["attributes"]["sglang_reshard.session"] == "a session"
    (traceparent,) = handed_on
    assert traceparent.split("-")[1:3] == [f"{serve['trace']:032x}", f"{serve['span']:016x}"]
    # A parent that is none is no error: the span begins a trace.
    asyncio.run(observed(update)(manager, msgspec.structs.replace(asked, traceparent="nonsense")))
    assert collected.told()[-1]["parent"] is None


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


@pytest.mark.parametrize("code", ["import test_spans; test_spans.watch()", WITHOUT], ids=["engine", "without"])
def test_in_a_process_of_its_own(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
