"""A server's /metrics, its log and its spans tell of updates; `sglang-reshard doctor` finds it well."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from sglang_reshard import Probe, WeightSender, __version__
from sglang_reshard.cli.layouts import Source
from sglang_reshard.extras.probe import module_logprobs
from sglang_reshard.observability.probe_report import OUTCOMES
from sglang_reshard.selftest import tiny_model
from sglang_reshard.selftest.trainer import Trainer
from sglang_reshard.testing import cpu_host
from support.collector import Collector, collecting
from support.refusals import refusal_of
from support.servers import launch, serving
from support.trainers import run_trainers

SEQUENCES = [[*range(20, 52)], [4098, 0, 1500, 3]]


def update_a_server_that_counts(job: dict[str, Any]) -> dict[str, Any]:
    """/metrics as it was: before the first update, after three that went well and two that did not, after a load."""
    url, folder = job["url"], Path(job["folder"])
    provider = _export_spans_to(job["collector"])
    ranks = dist.get_world_size()
    trainer = Trainer(tiny_model.config(ranks, job["target_tp"]), Source(tp=ranks))
    trainer.save_checkpoint(folder / "checkpoint")
    sender = WeightSender(url, timeout_s=180)
    seen = {"before": _metrics(url)}
    named = dict(trainer.model.named_parameters())
    probe = Probe(SEQUENCES, trainer.model)
    probes = (None, probe, Probe(SEQUENCES, lambda ids: one_nat_less(trainer.model, ids), on_mismatch="warn"))
    reports = [sender.update(named.items(), weight_version=f"step {n}", probe=p) for n, p in enumerate(probes, 1)]
    seen["same version"] = refusal_of(lambda: sender.update(named.items(), weight_version="step 3"))
    more = {**named, "nobody.wants.this": torch.ones(2)}
    seen["unknown name"] = refusal_of(lambda: sender.update(more.items(), weight_version="step 4"))
    seen["after"] = _metrics(url)
    body = {"model_path": str(folder / "checkpoint"), "load_format": "auto", "weight_version": "loaded"}
    httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=60).raise_for_status()
    seen["loaded"] = _metrics(url)
    sender.close()
    seen["reports"] = [report.as_dict() for report in reports]
    provider.shutdown()
    seen["session"] = sender.session.address.session
    return seen


def one_nat_less(model: torch.nn.Module, sequences: list[list[int]]) -> list[torch.Tensor]:
    """What a trainer of other weights would say."""
    return [logprobs - 1 for logprobs in module_logprobs(model, sequences)]


def _export_spans_to(url: str) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    trace.set_tracer_provider(provider)
    return provider


def _metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=10).raise_for_status().text


pytestmark = [pytest.mark.engine]
TP = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    tiny_model.save(folder / "model", TP, TP)
    return folder


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(folder: Path, collector: Collector) -> Iterator[str]:
    """A TP=1 server on dummy weights, with metrics, SGLang's own tracing, and this package's log as JSON."""
    traced = "--enable-trace", "--otlp-traces-endpoint", collector.url
    command = launch(folder / "model", TP, "--enable-metrics", *traced)
    environment = {
        **cpu_host.environment(TP),
        "SGLANG_RESHARD_LOG": "json",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }
    with serving(command, environment, folder / "log") as url:
        yield url


def samples(text: str) -> dict[str, float]:
    """Ours of a page of metrics."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("sglang_reshard_"))
    return {name: float(value) for name, value in lines}


def versions(of: dict[str, float]) -> set[str]:
    return {name for name in of if name.startswith("sglang_reshard_weights_info")}


@pytest.fixture(scope="module")
def seen(server: str, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one trainer saw, who updated the server."""
    job = {"url": server, "target_tp": TP, "collector": collector.url}
    (seen,) = run_trainers(1, update_a_server_that_counts, tmp_path_factory.mktemp("trainer"), **job)
    return seen


def test_metrics_and_log_tell_of_updates(seen: dict[str, Any], folder: Path) -> None:
    before, after, loaded = (samples(seen[when]) for when in ("before", "after", "loaded"))
    assert before["sglang_reshard_updates_total"] == 0
    assert before['sglang_reshard_failures_total{phase="move"}'] == 0
    assert versions(before) == {'sglang_reshard_weights_info{version="default"}'}
    assert after["sglang_reshard_updates_total"] == 5
    assert "already version 'step 3'" in str(seen["same version"])
    assert "nobody.wants.this" in str(seen["unknown name"])
    failures = {name for name, value in after.items() if name.startswith("sglang_reshard_failures_total") and value}
    assert failures == {
        'sglang_reshard_failures_total{phase="plan"}',
        'sglang_reshard_failures_total{phase="request"}',
    }
    received = sum(rank["received_bytes"] for report in seen["reports"] for rank in report["engine_ranks"])
    assert after['sglang_reshard_received_bytes_total{transport="ipc"}'] == received
    assert after['sglang_reshard_phase_seconds_count{phase="move"}'] == 3
    moved = sum(report["seconds"]["move"] for report in seen["reports"])
    assert after['sglang_reshard_phase_seconds_sum{phase="move"}'] == pytest.approx(moved)
    assert after["sglang_reshard_torn"] == 0
    by_outcome = {outcome: f'sglang_reshard_probes_total{{outcome="{outcome}"}}' for outcome in OUTCOMES}
    assert [before[name] for name in by_outcome.values()] == [0, 0, 0]
    assert {outcome: after[name] for outcome, name in by_outcome.items()} == {"passed": 1, "mismatch": 1, "skipped": 0}
    _, passed, differs = (report["probe"] for report in seen["reports"])
    assert passed["largest_difference"] < 1e-3, "float32 on both sides"
    assert differs["mean_difference"] == pytest.approx(1.0, abs=1e-3)
    assert after["sglang_reshard_probe_mean_difference"] == pytest.approx(differs["mean_difference"])
    assert after["sglang_reshard_probe_seconds_count"] == 2
    assert versions(after) == {'sglang_reshard_weights_info{version="step 3"}'}
    assert versions(loaded) == {'sglang_reshard_weights_info{version="loaded"}'}, "SGLang's own updates are seen"
    told = [json.loads(line) for line in (folder / "log").read_text().splitlines() if line.startswith('{"time"')]
    ended = [(line["level"], line["version"]) for line in told if line["message"].startswith("update ")]
    assert ended == [
        ("INFO", "step 1"),
        ("INFO", "step 2"),
        ("INFO", "step 3"),
        ("ERROR", "step 3"),
        ("ERROR", "step 4"),
    ]
    assert {line["session"] for line in told} == {seen["session"]}


def test_a_collector_gets_one_trace_from_the_trainer_to_the_scheduler(
    seen: dict[str, Any], collector: Collector
) -> None:
    update = collector.await_span("reshard.update", version="step 1")
    collector.await_span("reshard.commit", trace=update.trace, engine_rank="0")
    collector.await_span("reshard.serve", trace=update.trace)
    assert update.attributes["sglang_reshard.session"] == seen["session"]
    of = {span.name: span for span in collector.trace(update.trace)}
    assert of["reshard.update"].parent == ""
    assert of["reshard.request"].parent == update.span
    assert of["reshard.serve"].parent == of["reshard.request"].span
    phases = {name: span.parent for name, span in of.items() if "sglang_reshard.engine_rank" in span.attributes}
    assert phases.keys() >= {"reshard.trace", "reshard.plan", "reshard.connect", "reshard.move", "reshard.commit"}
    assert set(phases.values()) == {of["reshard.serve"].span}
    assert collector.await_span("reshard.update", version="step 2").trace != update.trace


def test_the_doctor_finds_the_server_well(server: str) -> None:
    command = [str(Path(sys.executable).with_name("sglang-reshard")), "doctor", "--json", "--url", server]
    ran = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=False)
    found = {finding["name"]: finding for finding in json.loads(ran.stdout)["findings"]}
    assert [found[name]["status"] for name in ("server", "server's plugin", "server's weights")] == ["ok"] * 3, found
    assert __version__ in found["server's plugin"]["says"]
    assert ran.returncode == 0, found
