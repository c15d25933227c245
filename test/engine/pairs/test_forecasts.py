"""What is forecast of an update is what the update then does: the same bytes of every rank, the same way, for the same
reason.

The forecast has a config alone, and models on the meta device; the update has real ones, real shards, and tells in its
report. Both run on the code paths of a CPU engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pair_host import PairHost
from pairs import Pair, Placing
from sglang_reshard.cli.layouts import Source, StagedTarget
from sglang_reshard.cli.plan.checkpoint import prepare
from sglang_reshard.cli.plan.command import make_plan
from sglang_reshard.cli.plan.figures import Forecast
from sglang_reshard.cli.plan.request import PlanRequest
from support.nixl_env import needs_nixl

pytestmark = [pytest.mark.engine]

FSDP, HSDP = Source(fsdp=3), Source(replicas=2, fsdp=2)
# (mesh, placing of every tensor): what the words of a source mean, in those of a pair.
MESHES: dict[Source, tuple[tuple[int, ...], Placing]] = {FSDP: ((3,), ("S0",)), HSDP: ((2, 2), ("R", "S0"))}
CASES = [
    ("dense", FSDP, StagedTarget(2), "p2p", 4096),
    ("experts", HSDP, StagedTarget(4, ep=2), "broadcast", 1 << 20),
    ("latent", FSDP, StagedTarget(2), "auto", 512),
    pytest.param("experts", FSDP, StagedTarget(2), "nixl", 4096, marks=needs_nixl),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[PairHost]:
    with PairHost("cpu", models) as running:
        yield running


@pytest.mark.parametrize(("model", "source", "target", "transport", "bucket_bytes"), CASES)
def test_an_update_is_as_it_was_forecast(
    host: PairHost,
    models: Path,
    tmp_path: Path,
    model: str,
    source: Source,
    target: StagedTarget,
    transport: str,
    bucket_bytes: int,
) -> None:
    mesh, placing = MESHES[source]
    pair = Pair(model, mesh, (placing,), False, "bfloat16", "bfloat16", target.tp, target.ep, bucket_bytes, transport)
    report = host.run(pair)["trainers"][0]["reports"][0]
    # The config alone: the checkpoint's tensors must follow from it.
    (shown := tmp_path / "shown.json").write_text((models / model / "config.json").read_text())
    question = PlanRequest(
        model=model,
        folder=str(prepare(str(shown), 0, tmp_path)),
        source=source,
        target=target,
        device="cpu",
        colocated=True,
        transport=transport,
        bucket_bytes=bucket_bytes,
    )
    forecast = make_plan(question, Console(stderr=True))
    assert forecast.refused == ()
    assert forecast.transport == report["transport"]
    assert forecast.transport_reason == report["transport_reason"]
    assert bytes_of(forecast) == {
        "received": [rank["received_bytes"] for rank in report["engine_ranks"]],
        "least": [rank["least_bytes"] for rank in report["engine_ranks"]],
        "held": [rank["shard_bytes"] for rank in report["trainer_ranks"]],
        "sent": [rank["sent_bytes"] for rank in report["trainer_ranks"]],
    }
    for rank, told in zip(forecast.engine_ranks, report["engine_ranks"], strict=True):
        assert rank.extra_bytes <= told["peak_extra_bytes"]
    assert [sum(row) for row in forecast.link_bytes] == bytes_of(forecast)["sent"]


def bytes_of(forecast: Forecast) -> dict[str, list[int]]:
    return {
        "received": [rank.received_bytes for rank in forecast.engine_ranks],
        "least": [rank.least_bytes for rank in forecast.engine_ranks],
        "held": [rank.shard_bytes for rank in forecast.trainer_ranks],
        "sent": [rank.sent_bytes for rank in forecast.trainer_ranks],
    }
