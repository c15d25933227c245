"""What every route promises, alone and with a route around it: exact bytes, bounded memory, reuse, and all failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from route_script import BLOCKS, BUCKET_BYTES, ENGINES, HEALED, SCRIPT, TRAINERS, WARM, Size, serve, train

from support.nixl_env import needs_nixl
from support.sweep import sweep
from support.world import run_world

DELTA = {"delta": "auto"}
ROUTES = [
    pytest.param("ipc", {}, id="ipc"),
    pytest.param("p2p", {}, id="p2p"),
    pytest.param("broadcast", {}, id="broadcast"),
    pytest.param("nixl", {}, id="nixl", marks=needs_nixl),
    pytest.param("store", {}, id="store"),
    pytest.param("p2p", DELTA, id="delta(p2p)"),
    pytest.param("nixl", DELTA, id="delta(nixl)", marks=needs_nixl),
]


def swept(route: Any) -> Any:
    return pytest.param(*route.values, id=route.id, marks=[*route.marks, pytest.mark.sweep])


SENDS = ("p2p", "store")  # by which trainer ranks take part in every update
PREPARES = (*SENDS, "nixl")


@pytest.mark.parametrize("dtype", [torch.float32, sweep(torch.bfloat16)], ids=str)
@pytest.mark.parametrize(("route", "around"), ROUTES)
def test_a_route_keeps_its_promises(route: str, around: dict[str, Any], dtype: torch.dtype) -> None:
    told, seen = run_world(TRAINERS, ENGINES, train, serve, route, around, dtype, Size())
    before = [0] * ENGINES
    for number, step in enumerate(SCRIPT, start=1):
        outcomes = [of_rank[number - 1] for of_rank in told]
        ranks = [of_rank[number - 1] for of_rank in seen]
        if not _fails(step, route):
            for outcome in outcomes:
                assert not isinstance(outcome, tuple), (number, outcome)
                assert outcome.transport == route
            assert [rank.version for rank in ranks] == [number] * ENGINES, "what a fresh engine computes with"
            assert not any(rank.torn for rank in ranks)
        elif step.fault.method in ("move", "start"):
            assert {kind for kind, _ in outcomes} == {"TornWeights"}, outcomes
            assert all(rank.torn for rank in ranks)
        else:
            assert {kind for kind, _ in outcomes} == {"EngineRefused"}, outcomes
            assert all("the wire was cut" in text and f"{step.fault.side} rank 1" in text for _, text in outcomes)
            assert [(rank.version, rank.torn) for rank in ranks] == [(version, False) for version in before]
        if not any(rank.torn for rank in ranks):
            before = [rank.version for rank in ranks]
    _check_traffic(route, around, [report for report in told[0] if not isinstance(report, tuple)])
    for of_rank in seen:
        # Two buckets, and tables; deltas have a bucket and their own two of the same size in addition.
        assert max(rank.held for rank in of_rank) <= (5 if around else 2) * BUCKET_BYTES + 4096 * BLOCKS


@pytest.mark.parametrize(("route", "around"), [p if p.id in ("ipc", "delta(p2p)") else swept(p) for p in ROUTES])
def test_a_warm_move_runs_no_python_for_every_tensor(route: str, around: dict[str, Any]) -> None:
    """It takes about as many calls for a model of 320 tensors as for one of 8, where both fit a bucket."""
    calls = []
    for blocks in (1, 40):
        size = Size(blocks, bucket_bytes=32 << 20, steps=2)
        _, seen = run_world(TRAINERS, ENGINES, train, serve, route, around, torch.float32, size)
        calls.append(min(of_rank[-1].calls for of_rank in seen))
    few, many = calls
    assert 0 < many < few + 312 / 2, "a call for each of the other tensors would be 312"


def _fails(step: Any, route: str) -> bool:
    fault = step.fault
    if fault is None or fault.side == "engine":
        return fault is not None
    return route in (SENDS if fault.method == "start" else PREPARES)


def _check_traffic(route: str, around: dict[str, Any], reports: list[Any]) -> None:
    for report in reports:
        for rank in report.engine_ranks:
            if report.delta:
                assert 0 < rank.received_bytes < rank.least_bytes / 4
                assert 0 < rank.changed < rank.compared / 4
            elif route in ("broadcast", "nixl"):  # whole shards, and gaps between what is read together
                assert rank.received_bytes >= rank.least_bytes
            else:
                assert rank.received_bytes == rank.least_bytes
    assert any(report.delta for report in reports) == bool(around)


def test_the_script_has_what_it_is_for() -> None:
    assert all(SCRIPT[number - 1].fault is None for number in WARM)
    faulty = [number for number, step in enumerate(SCRIPT) if step.fault is not None]
    assert all(SCRIPT[number + 1] is HEALED or SCRIPT[number + 1].fault is not None for number in faulty)
    assert SCRIPT[-1] is HEALED
