"""Exports metrics of updates on SGLang's own /metrics if the server was started with --enable-metrics.

`METRICS` lists them. They are set in the tokenizer manager's process, which every update passes.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sglang_reshard.engine.context import Phase
from sglang_reshard.observability.probe_report import OUTCOMES, ProbeSummary
from sglang_reshard.observability.report import bytes_per_second, peak_extra_bytes, received_bytes, slowest_seconds
from sglang_reshard.patches import sglang_versions
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput
from sglang_reshard.route_table import FROM_FILES, ROUTES

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# Values of the label `phase` for updates that fail outside of the engine ranks' own phases.
REQUEST = "request"  # before the schedulers were asked
ENGINE = "engine"  # in a scheduler, outside of these phases, or the schedulers did not answer
LEFT = "left"  # the client disconnected before the end
FAILURE_PHASES = (REQUEST, *(phase.value for phase in Phase), "aborted", ENGINE, LEFT)

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    name  as on /metrics; a histogram's samples have the suffixes _bucket, _sum and _count
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "version"]
    help: str
    labels: tuple[str, ...] = ()


METRICS = (
    UPDATES := Metric("sglang_reshard_updates_total", "counter", "Number of updates requested, with any outcome."),
    FAILURES := Metric(
        "sglang_reshard_failures_total", "counter", "Number of failed updates, by the phase that failed.", ("phase",)
    ),
    UPDATE_SECONDS := Metric(
        "sglang_reshard_update_seconds",
        "histogram",
        "Duration of successful updates on the server in seconds, including the wait for running requests.",
    ),
    PHASE_SECONDS := Metric(
        "sglang_reshard_phase_seconds",
        "histogram",
        "Duration of each phase of successful updates in seconds, on the slowest engine rank.",
        ("phase",),
    ),
    RECEIVED := Metric(
        "sglang_reshard_received_bytes_total", "counter", "Bytes received by all engine ranks.", ("transport",)
    ),
    RATE := Metric(
        "sglang_reshard_bytes_per_second",
        "gauge",
        "Bytes received by all engine ranks per second of the slowest rank's move, in the last successful update.",
    ),
    PEAK := Metric(
        "sglang_reshard_peak_extra_bytes",
        "gauge",
        "Peak memory in bytes that an engine rank used beyond its own, in the last successful update.",
    ),
    SUCCEEDED := Metric(
        "sglang_reshard_last_success_timestamp_seconds", "gauge", "Unix time at which the last successful update ended."
    ),
    VERSION := Metric(
        "sglang_reshard_weights_info", "version", "1, labelled with the live weights' version.", ("version",)
    ),
    TORN := Metric("sglang_reshard_torn", "gauge", "1 while the weights are torn and requests are refused, else 0."),
    PROBES := Metric("sglang_reshard_probes_total", "counter", "Number of probes, by outcome.", ("outcome",)),
    PROBE_MEAN := Metric(
        "sglang_reshard_probe_mean_difference",
        "gauge",
        "Mean difference between the engine's and the trainer's log-probabilities in the last probe, in nats.",
    ),
    PROBE_LARGEST := Metric(
        "sglang_reshard_probe_largest_difference",
        "gauge",
        "Largest difference between the engine's and the trainer's log-probabilities in the last probe, in nats.",
    ),
    PROBE_SECONDS := Metric(
        "sglang_reshard_probe_seconds", "histogram", "Duration of probes in seconds, the trainer's part included."
    ),
)

# The values of labels that are known before the first update; the version's is set by `set_version`.
LABEL_VALUES = {
    FAILURES.name: FAILURE_PHASES,
    PHASE_SECONDS.name: tuple(phase.value for phase in Phase),
    RECEIVED.name: (*ROUTES, *FROM_FILES),
    PROBES.name: OUTCOMES,
}


def initialize(_result: Any, manager: TokenizerManager, *_: Any, **__: Any) -> None:
    """Exports zeros of every metric before the first update, without which a first increase would not be detected."""
    if not _enabled(manager):
        return
    collectors = _collectors()
    for metric, values in LABEL_VALUES.items():
        for value in values:
            collectors[metric].labels(value)
    for gauge in METRICS:
        if gauge.kind == "gauge":  # not shown before it is set, where several processes share a folder
            collectors[gauge.name].set(0)
    set_version(None, manager)


def set_torn(manager: TokenizerManager, torn: bool) -> None:
    if _enabled(manager):
        _collectors()[TORN.name].set(1 if torn else 0)


def set_version(_result: Any, manager: TokenizerManager, *_: Any, **__: Any) -> None:
    if _enabled(manager):
        version = str(sglang_versions.weight_version(manager) or "")
        _set_single_series(_collectors()[VERSION.name], VERSION.help, {"version": version})


def observe(manager: TokenizerManager, output: DistributedUpdateWeightsOutput, seconds: float) -> None:
    """Records the outcome of an update that took `seconds` in the tokenizer manager."""
    if not _enabled(manager):
        return
    collectors = _collectors()
    collectors[UPDATES.name].inc()
    if not output.success:
        collectors[FAILURES.name].labels(output.phase or REQUEST).inc()
        return
    collectors[UPDATE_SECONDS.name].observe(seconds)
    slowest = slowest_seconds(output.ranks)
    for phase, phase_seconds in slowest.items():
        collectors[PHASE_SECONDS.name].labels(phase).observe(phase_seconds)
    collectors[RECEIVED.name].labels(output.transport).inc(received_bytes(output.ranks))
    if rate := bytes_per_second(output.ranks, slowest):
        collectors[RATE.name].set(rate)
    collectors[PEAK.name].set(peak_extra_bytes(output.ranks))
    collectors[SUCCEEDED.name].set(time.time())


def observe_probe(manager: TokenizerManager, summary: ProbeSummary) -> None:
    """Records what a probe of the live weights has found. One that was skipped leaves the differences as they were."""
    if not _enabled(manager):
        return
    collectors = _collectors()
    collectors[PROBES.name].labels(summary.outcome).inc()
    if summary.outcome != "skipped":
        for metric, found in ((PROBE_MEAN, summary.mean_difference), (PROBE_LARGEST, summary.largest_difference)):
            collectors[metric.name].set(float("inf") if found is None else found)
        collectors[PROBE_SECONDS.name].observe(summary.seconds)


def _enabled(manager: TokenizerManager) -> bool:
    return bool(manager.enable_metrics) and bool(_collectors())


@functools.cache
def _collectors() -> dict[str, Any]:
    """Returns prometheus_client's collectors by name; empty if it is not installed.

    Created on first use: prometheus_client reads the folder that SGLang's processes share when it is imported.
    """
    try:
        from prometheus_client import Counter, Gauge, Histogram
    except ImportError:
        return {}
    collectors: dict[str, Any] = {}
    for metric in METRICS:
        arguments = metric.name, metric.help, metric.labels
        if metric.kind == "counter":
            collectors[metric.name] = Counter(*arguments)
        elif metric.kind == "histogram":
            collectors[metric.name] = Histogram(*arguments, buckets=_SECONDS)
        else:
            collectors[metric.name] = Gauge(*arguments, multiprocess_mode="mostrecent")
    return collectors


def _set_single_series(gauge: Any, help: str, labels: dict[str, str]) -> None:
    """Sets the gauge to 1 with these labels, and removes its other series.

    prometheus_client removes no series where several processes share a folder, as SGLang's do, and a series for each
    version of a long run would accumulate. But the collector reads every file of the folder: this series has a separate
    file, which is replaced as a whole.

    help  the gauge's, which it does not expose
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is None:
        gauge.clear()
        gauge.labels(**labels).set(1)
        return
    from prometheus_client.mmap_dict import MmapedDict, mmap_key

    # The collector takes kind, mode and process from the name.
    file = Path(folder, f"gauge_mostrecent_reshard{os.getpid()}.db")
    new = file.with_suffix(".new")
    new.unlink(missing_ok=True)
    (family,) = gauge.describe()
    series = MmapedDict(str(new))
    series.write_value(mmap_key(family.name, family.name, list(labels), list(labels.values()), help), 1.0, time.time())
    series.close()
    new.replace(file)
