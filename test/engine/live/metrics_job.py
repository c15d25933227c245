"""What the trainer of test_metrics_live.py does to a server that counts: updates that succeed, and two that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from torch.distributed.device_mesh import init_device_mesh

from benchmark.demo import tiny_model
from benchmark.demo.trainer import Trainer
from sglang_reshard import Probe, WeightSender
from sglang_reshard.extras.probe import module_logprobs
from support.refusals import refusal_of

SEQUENCES = [[*range(20, 52)], [4098, 0, 1500, 3]]


def update_a_server_that_counts(job: dict[str, Any]) -> dict[str, Any]:
    """/metrics as it was: before the first update, after three that went well and two that did not, after a load."""
    url, folder = job["url"], Path(job["folder"])
    provider = _export_spans_to(job["collector"])
    ranks = dist.get_world_size()
    trainer = Trainer(tiny_model.config(ranks, job["target_tp"]), init_device_mesh("cpu", (ranks,)))
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
    seen["session"] = sender._session.address.session
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
