"""The metrics of a sync, out of the reports of the engines that took part."""

from __future__ import annotations

import msgspec

from sglang_reshard.observability.report import RankReport, TrainerRankReport, UpdateReport
from sglang_reshard.verl.metrics import sync_metrics, transport_reasons


def report(transport: str, received: int, move: float) -> UpdateReport:
    return UpdateReport(
        success=True,
        message="",
        weight_version=None,
        transport=transport,
        transport_reason="requested",
        bucket_bytes=1,
        seconds={"move": move},
        engine_ranks=(RankReport(0, received, received, 7, {"move": move}),),
        trainer_ranks=(TrainerRankReport(0, 100, received), TrainerRankReport(1, 100, 0)),
    )


def test_other_trainer_ranks_have_no_rows_and_one_metric_less() -> None:
    short = msgspec.structs.replace(report("ipc", 1_000, 0.25), trainer_ranks=())
    metrics = sync_metrics({"a": report("ipc", 1_000, 0.25)}, 2.0)
    assert metrics.pop("reshard/sent_bytes_rank0") == 1_000.0
    assert sync_metrics({"a": short}, 2.0) == metrics


def test_the_slowest_and_the_largest_count() -> None:
    reports = {"a": report("ipc", 1_000, 0.25), "b": report("p2p", 4_000, 0.5)}
    assert sync_metrics(reports, 2.0) == {
        "reshard/seconds": 2.0,
        "reshard/bytes_per_rank": 4_000.0,
        "reshard/gb_per_s": 2e-6,
        "reshard/peak_extra_bytes": 7.0,
        "reshard/sent_bytes_rank0": 5_000.0,
        "reshard/seconds/move": 0.5,
        "reshard/transport/ipc": 1.0,
        "reshard/transport/p2p": 1.0,
    }
    assert transport_reasons(reports) == "a: ipc: requested; b: p2p: requested"
    assert transport_reasons({"a": reports["a"], "c": reports["a"]}) == "a, c: ipc: requested"
