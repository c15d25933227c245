"""Metrics on SGLang's own /metrics, where the server was started with --enable-metrics.

`METRICS` says all there are. They are set in the tokenizer manager's process, which every update passes.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sglang_reshard.engine.context import PHASES
from sglang_reshard.observability.report import bytes_per_second, peak_extra_bytes, received_bytes, slowest_seconds
from sglang_reshard.patches import versions
from sglang_reshard.patches.version_series import show_only
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# Where an update fails outside the engine ranks' own phases.
REQUEST = "request"  # before the schedulers were asked
ENGINE = "engine"  # in a scheduler, outside of these phases, or the schedulers did not answer
LEFT = "left"  # whoever asked for it did not wait for the end
_FAILURE_PHASES = (REQUEST, *PHASES, "aborted", ENGINE, LEFT)

_VERSION_SETTER = "_update_weight_version_if_provided"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One of what /metrics shows.

    name  as it is there; a histogram's has _bucket, _sum and _count behind it
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "version"]
    help: str
    labels: tuple[str, ...] = ()


UPDATES = Metric("sglang_reshard_updates_total", "counter", "Updates that were asked for, however they ended.")
FAILURES = Metric(
    "sglang_reshard_failures_total", "counter", "Updates that failed, by the phase in which they did.", ("phase",)
)
UPDATE_SECONDS = Metric(
    "sglang_reshard_update_seconds",
    "histogram",
    "Seconds of a successful update as the server saw it; the wait for running requests is among them.",
)
PHASE_SECONDS = Metric(
    "sglang_reshard_phase_seconds",
    "histogram",
    "Seconds of a phase of a successful update, on the slowest engine rank.",
    ("phase",),
)
RECEIVED = Metric(
    "sglang_reshard_received_bytes_total", "counter", "Bytes that all engine ranks received.", ("transport",)
)
RATE = Metric(
    "sglang_reshard_bytes_per_second",
    "gauge",
    "Bytes of all engine ranks over the seconds of the slowest rank's move, in the last successful update.",
)
PEAK = Metric(
    "sglang_reshard_peak_extra_bytes",
    "gauge",
    "The most memory that an engine rank took beyond its own, in the last successful update.",
)
SUCCEEDED = Metric(
    "sglang_reshard_last_success_timestamp_seconds", "gauge", "When the last successful update ended, as Unix time."
)
VERSION = Metric("sglang_reshard_weights_info", "version", "1, with the version of the live weights.", ("version",))
TORN = Metric("sglang_reshard_torn", "gauge", "1 while the weights are torn and requests are refused, else 0.")

METRICS = (
    UPDATES,
    FAILURES,
    UPDATE_SECONDS,
    PHASE_SECONDS,
    RECEIVED,
    RATE,
    PEAK,
    SUCCEEDED,
    VERSION,
    TORN,
)


def apply() -> None:
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    mixin = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
    # With the communicators, because what SGLang needs for its metrics has been set up by then.
    HookRegistry.register(
        f"{mixin}.init_communicators", lambda _result, manager, *_, **__: begin(manager), HookType.AFTER
    )
    # Stock updates come by it too.
    if hasattr(TokenizerControlMixin, _VERSION_SETTER):
        HookRegistry.register(
            f"{mixin}.{_VERSION_SETTER}", lambda _result, manager, *_, **__: show_version(manager), HookType.AFTER
        )


def begin(manager: TokenizerManager) -> None:
    """All that can be shown before the first update: who looks for a rise must have seen a zero."""
    if not _shown(manager):
        return
    made = _made()
    for phase in _FAILURE_PHASES:
        made[FAILURES.name].labels(phase)
    show_torn(manager, False)
    show_version(manager)


def show_torn(manager: TokenizerManager, torn: bool) -> None:
    if _shown(manager):
        _made()[TORN.name].set(1 if torn else 0)


def show_version(manager: TokenizerManager) -> None:
    if _shown(manager):
        show_only(_made()[VERSION.name], VERSION.help, {"version": str(versions.weight_version(manager) or "")})


def observe(manager: TokenizerManager, output: DistributedUpdateWeightsOutput, seconds: float) -> None:
    """An update has ended. `seconds` as the tokenizer manager saw it."""
    if not _shown(manager):
        return
    made = _made()
    made[UPDATES.name].inc()
    if not output.success:
        made[FAILURES.name].labels(output.phase or REQUEST).inc()
        return
    made[UPDATE_SECONDS.name].observe(seconds)
    slowest = slowest_seconds(output.ranks)
    for phase, s in slowest.items():
        made[PHASE_SECONDS.name].labels(phase).observe(s)
    made[RECEIVED.name].labels(output.transport).inc(received_bytes(output.ranks))
    if rate := bytes_per_second(output.ranks, slowest):
        made[RATE.name].set(rate)
    made[PEAK.name].set(peak_extra_bytes(output.ranks))
    made[SUCCEEDED.name].set(time.time())
    show_version(manager)


def _shown(manager: TokenizerManager) -> bool:
    return bool(manager.enable_metrics) and bool(_made())


@functools.cache
def _made() -> dict[str, Any]:
    """By name; empty without prometheus_client.

    At the first use: it looks at SGLang's folder for several processes when it is imported.
    """
    try:
        from prometheus_client import Counter, Gauge, Histogram
    except ImportError:
        return {}
    made: dict[str, Any] = {}
    for metric in METRICS:
        arguments = metric.name, metric.help, metric.labels
        if metric.kind == "counter":
            made[metric.name] = Counter(*arguments)
        elif metric.kind == "histogram":
            made[metric.name] = Histogram(*arguments, buckets=_SECONDS)
        else:
            made[metric.name] = Gauge(*arguments, multiprocess_mode="mostrecent")
    return made
