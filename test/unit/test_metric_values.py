"""What updates leave on /metrics, as SGLang shows it: read back from the folder that its processes share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from sglang_reshard.control import Address
from sglang_reshard.engine.context import Phase
from sglang_reshard.observability.probe_report import OUTCOMES, ProbeSummary
from sglang_reshard.observability.report import RankReport
from sglang_reshard.patches import metrics
from sglang_reshard.patches.update_observer import observed
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq

SUCCESS = DistributedUpdateWeightsOutput(
    success=True,
    message="",
    transport="ipc",
    ranks=(
        RankReport(0, 300, 300, 10, {"trace": 0.5, "move": 0.002}),
        RankReport(1, 100, 100, 70, {"trace": 0.1, "move": 0.004}),
    ),
)
FAILURE = DistributedUpdateWeightsOutput(success=False, message="move, engine rank 1: no", torn=True, phase="move")
PROBES = (
    ProbeSummary("passed", 0.5, 1.0, 2.0),
    ProbeSummary("mismatch", 0.25, None, 4.0),
    ProbeSummary("skipped", 0.0, 0.0, 60.0),
)
REFUSED = DistributedUpdateWeightsOutput(success=False, message="not now")


class Manager:
    """As much of a tokenizer manager as metrics look at."""

    def __init__(self, enable_metrics: bool = True) -> None:
        self.enable_metrics = enable_metrics
        self.server_args = type("ServerArgs", (), {"weight_version": "default"})()


def request(version: str | None = None) -> DistributedUpdateWeightsReq:
    address = Address("a session", "127.0.0.1", 1, "00")
    return DistributedUpdateWeightsReq(
        address=address, update=1, layout="", handles=(), trainer_hosts=(), weight_version=version
    )


def play(outcomes: list[Any], enabled: bool = True) -> None:
    """Updates of these outcomes, one after the other; an exception is one that was left."""
    manager = Manager(enabled)
    metrics.initialize(None, manager)
    left = iter(outcomes)

    async def update(manager: Any, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        outcome = next(left)
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome.success:
            manager.server_args.weight_version = request.weight_version
            metrics.set_version(None, manager)  # as the hook on SGLang's method
        if outcome.torn:
            metrics.set_torn(manager, True)
        return outcome

    async def all_of_them() -> None:
        for number, outcome in enumerate(outcomes):
            expected = contextlib.suppress(asyncio.CancelledError if isinstance(outcome, BaseException) else ())
            with expected:
                await observed(update)(manager, request(f"version {number}"))

    asyncio.run(all_of_them())


def shown(shared: bool) -> dict[str, float]:
    """name{label=value} -> value, from what other processes see, or from this one's own."""
    from prometheus_client import REGISTRY, CollectorRegistry, multiprocess

    registry = REGISTRY
    if shared:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    return {
        sample.name + "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("sglang_reshard_")
    }


def main(shared: bool, enabled: bool) -> None:
    """In a process of its own: prometheus_client decides at its import whether there are several."""
    play([SUCCESS, FAILURE, REFUSED, asyncio.CancelledError(), SUCCESS], enabled)
    for probe in PROBES:
        metrics.observe_probe(Manager(enabled), probe)
    print(json.dumps(shown(shared)))


def seen(folder: Path | None, enabled: bool = True) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    if folder is not None:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    code = f"import test_metric_values; test_metric_values.main({folder is not None}, {enabled})"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True, timeout=300)
    return json.loads(ran.stdout)


@pytest.fixture(scope="module", params=[True, False], ids=["several processes", "one process"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return seen(tmp_path_factory.mktemp("metrics") if request.param else None)


def test_every_outcome_is_counted_and_the_old_version_goes_away(found: dict[str, float]) -> None:
    assert found["sglang_reshard_updates_total"] == 5
    failures = {key: value for key, value in found.items() if key.startswith("sglang_reshard_failures_total") and value}
    assert failures == {
        "sglang_reshard_failures_total{phase=left}": 1,
        "sglang_reshard_failures_total{phase=move}": 1,
        "sglang_reshard_failures_total{phase=request}": 1,
    }
    assert {f"sglang_reshard_failures_total{{phase={phase}}}" for phase in Phase} <= found.keys(), "zeros, too"
    assert found["sglang_reshard_received_bytes_total{transport=ipc}"] == 800
    assert found["sglang_reshard_bytes_per_second"] == pytest.approx(400 / 0.004)
    assert found["sglang_reshard_peak_extra_bytes"] == 70
    assert found["sglang_reshard_phase_seconds_count{phase=move}"] == 2
    assert found["sglang_reshard_phase_seconds_sum{phase=trace}"] == pytest.approx(1.0)
    assert found["sglang_reshard_update_seconds_count"] == 2
    assert found["sglang_reshard_torn"] == 1
    versions = [key for key in found if key.startswith("sglang_reshard_weights_info")]
    assert versions == ["sglang_reshard_weights_info{version=version 4}"]
    assert found["sglang_reshard_last_success_timestamp_seconds"] > 1e9


def test_probes_are_counted_and_one_that_was_skipped_shows_no_difference(found: dict[str, float]) -> None:
    for outcome in OUTCOMES:
        assert found[f"sglang_reshard_probes_total{{outcome={outcome}}}"] == 1
    assert found["sglang_reshard_probe_mean_difference"] == 0.25
    assert found["sglang_reshard_probe_largest_difference"] == float("inf")
    assert (found["sglang_reshard_probe_seconds_count"], found["sglang_reshard_probe_seconds_sum"]) == (2, 6.0)


def test_what_is_shown_is_what_is_declared(found: dict[str, float]) -> None:
    names = {key.partition("{")[0] for key in found}
    declared = set()
    for metric in metrics.METRICS:
        behind = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        declared |= {metric.name + end for end in behind}
    assert {name for name in names if not name.endswith("_created")} == declared


def test_nothing_is_shown_unless_the_server_has_metrics_enabled(tmp_path: Path) -> None:
    assert seen(tmp_path, enabled=False) == {}
    assert list(tmp_path.iterdir()) == []
