"""What every route promises, alone and with routes around it: exact bytes, bounded memory, reuse, and all failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from route_model import packed_bytes
from route_script import FAULTY_RANK, HEALED, SCRIPT, TIMEOUT_S, TRAINERS, WARM, Case, Fault, Step, serve, train

from sglang_reshard.observability.report import UpdateReport
from support.nixl_env import needs_nixl
from support.world import run_world

SEVERAL = (1, 2, 1)
CASES = {
    "ipc": Case("ipc"),
    "p2p": Case("p2p"),
    "broadcast": Case("broadcast"),
    "nixl": Case("nixl"),
    "store": Case("store"),
    "delta(p2p)": Case("p2p", ("delta",)),
    "delta(nixl)": Case("nixl", ("delta",)),
    "relay(nixl)": Case("nixl", ("relay",), SEVERAL),
    "delta(relay(nixl))": Case("nixl", ("relay", "delta"), SEVERAL),
}
SENDS = ("p2p", "store")  # by which trainer ranks take part in every update
PREPARES = (*SENDS, "nixl")
ALL = tuple(CASES)


def outcome_of_all(fault: Fault, case: Case) -> str:
    """Returns the kind of the error of all engines' updates if a trainer rank's end fails; empty if it has none."""
    if case.transport not in (SENDS if fault.method == "start" else PREPARES):
        return ""
    return "TornWeights" if fault.method == "start" else "EngineRefused"


def cases(*kept: str, suffix: str = "", **changes: Any) -> list[Any]:
    """A param for each case, with these changes. `make test` tries those that are `kept`."""
    found = []
    for name, case in CASES.items():
        marks = [needs_nixl] if case.transport == "nixl" else []
        if name not in kept:
            marks.append(pytest.mark.sweep)
        found.append(pytest.param(replace(case, **changes), id=name + suffix, marks=marks))
    return found


CONVERTED = {"repacks": True, "live": torch.bfloat16}


@pytest.mark.parametrize(
    "case",
    [
        *cases(*ALL),
        *cases(suffix="-bfloat16", dtype=torch.bfloat16),
        *cases("ipc", "store", suffix="-converted", **CONVERTED),
    ],
)
def test_a_route_keeps_its_promises(case: Case) -> None:
    told, seen = run_world(TRAINERS, sum(case.engines), train, serve, case)
    before = [0] * sum(case.engines)
    relayed = False
    for number, step in enumerate(case.script, start=1):
        reports = {}
        for engine, name, ranks in of_engines(case):
            heard = [of_rank[number - 1][name] for of_rank in told]
            after = [seen[rank].get(number) for rank in ranks]
            kind = expected(step, case, engine)
            assert {one.kind for one in heard} == {kind}, (number, name, heard)
            assert max(one.seconds for one in heard) < TIMEOUT_S / 2, "nobody waits for the deadline"
            if not kind:
                assert {one.report.transport for one in heard} == {case.transport}
                assert [(rank.version, rank.torn) for rank in after] == [(number, False)] * len(ranks), (number, name)
                reports[name] = heard[0].report
            elif kind == "Unsupported":
                assert after == [None] * len(ranks), "the engine hears nothing of it"
            elif kind == "TornWeights":
                assert all(rank.torn for rank in after)
            else:
                culprit = f"{step.fault.side} rank {FAULTY_RANK}"
                assert all("the wire was cut" in one.text and culprit in one.text for one in heard)
                assert [(rank.version, rank.torn) for rank in after] == [(before[rank], False) for rank in ranks]
            for rank, found in zip(ranks, after, strict=True):
                if found is not None and not found.torn:
                    before[rank] = found.version
        check_traffic(case, reports)
        if reports:
            all_deltas = "delta" in case.around and not case.repacks and number in WARM
            spoiled = {case.names[case.faulty]} if step.spoils else set()
            assert {n: r.delta for n, r in reports.items()} == {n: all_deltas and n not in spoiled for n in reports}
            relayed |= any(report.relayed_bytes for report in reports.values())
    assert relayed == ("relay" in case.around)
    for of_rank in seen:
        # Two buckets, and tables; deltas have a bucket and their own two of the same size in addition.
        most = (5 if "delta" in case.around else 2) * case.bucket_bytes + 4096 * case.blocks
        assert max(found.held for found in of_rank.values()) <= most


# An engine that waits for a relay polls: its calls count time.
POLLED = "relay(nixl)"


@pytest.mark.parametrize("case", [param for param in cases("ipc", "delta(p2p)") if param.id != POLLED])
def test_a_warm_move_runs_no_python_for_every_tensor(case: Case) -> None:
    """It takes about as many calls for a model of 320 tensors as for one of 8, where both fit a bucket."""
    calls = []
    for blocks in (1, 40):
        warm = replace(case, blocks=blocks, bucket_bytes=32 << 20, script=SCRIPT[:2])
        _, seen = run_world(TRAINERS, sum(case.engines), train, serve, warm)
        calls.append(min(of_rank[2].calls for of_rank in seen))
    few, many = calls
    assert 0 < many < few + 312 / 2, "a call for each of the other tensors would be 312"


DEATHS = {
    "engine, connect": Fault("engine", "connect", first=True, kills=True),
    "engine, move": Fault("engine", "move", kills=True),
    "trainer, connect": Fault("trainer", "connect", first=True, kills=True),
    "trainer, start": Fault("trainer", "start", kills=True),
}


def deaths(*kept: tuple[str, str]) -> Iterator[Any]:
    """Params of a case and of a fault of an end that it has. `make test` tries those that are `kept`."""
    for phase, fault in DEATHS.items():
        names = [name for name, case in CASES.items() if fault.side == "engine" or outcome_of_all(fault, case)]
        for param in cases(*(name for name, of in kept if of == phase)):
            if param.id in names:
                yield pytest.param(*param.values, fault, id=f"{param.id}-{phase}", marks=param.marks)


@pytest.mark.parametrize(
    ("case", "fault"),
    [*deaths(("relay(nixl)", "engine, connect"), ("p2p", "trainer, start"), ("store", "engine, move"))],
)
def test_the_death_of_an_end_is_told_to_all_others(case: Case, fault: Fault) -> None:
    """Long before the deadline. Other engines have the new weights, in this update and in the next one."""
    several = len(case.engines) > 1
    later = (Step(),) if several and fault.side == "engine" else ()
    case = replace(case, script=(Step(), Step(fault=fault), *later))
    rank = FAULTY_RANK + (sum(case.engines[: case.faulty]) if fault.side == "engine" else 0)
    killed = f"{fault.side} rank {rank}"
    told, seen = run_world(TRAINERS, sum(case.engines), train, serve, case, killed=[killed])
    survivors = [of_rank for of_rank in told if of_rank is not None]
    assert len(survivors) == TRAINERS - (fault.side == "trainer")
    for engine, name, ranks in of_engines(case):
        dies = fault.side == "trainer" or engine == case.faulty
        for of_rank in survivors:
            one = of_rank[1][name]
            assert bool(one.kind) == dies, (name, one)
            assert one.seconds < TIMEOUT_S / 2, "nobody waits for the deadline"
        for found in (seen[rank] for rank in ranks if seen[rank] is not None):
            if not dies:
                assert {number: one.version for number, one in found.items()} == {1: 1, 2: 2, 3: 3}
            elif fault.side == "trainer":  # engine ranks may have begun before they hear of it
                assert found[2].torn or found[2].version == 1
            else:
                assert (found[2].version, found[2].torn) == ((1, False) if fault.first else (found[2].version, True))


def of_engines(case: Case) -> Iterator[tuple[int, str, range]]:
    """Yields each engine's number, its name, and the numbers of its ranks among all."""
    first = 0
    for engine, (name, size) in enumerate(zip(case.names, case.engines, strict=True)):
        yield engine, name, range(first, first + size)
        first += size


def expected(step: Step, case: Case, engine: int) -> str:
    """Returns the kind of the error of an engine's update; empty if it succeeds."""
    fault = step.fault
    if step.options.get("staged") and "relay" in case.around:
        return "Unsupported"
    if fault is None:
        return ""
    if fault.side == "engine":
        if engine != case.faulty:
            return ""
        return "TornWeights" if fault.method == "move" else "EngineRefused"
    return outcome_of_all(fault, case)


def check_traffic(case: Case, reports: dict[str, UpdateReport]) -> None:
    """Of the engines that one step has updated."""
    for report in reports.values():
        for rank in report.engine_ranks:
            if report.delta:
                assert 0 < rank.received_bytes < rank.least_bytes / 4
                assert 0 < rank.changed < rank.compared / 4
            elif case.live is not None and case.around:  # some of it comes in the dtype of live weights
                assert rank.least_bytes / 2 <= rank.received_bytes < 2 * rank.least_bytes
            elif case.transport in ("broadcast", "nixl"):  # whole shards, and gaps between what is read together
                assert rank.received_bytes >= rank.least_bytes
            elif case.transport == "store":  # and what aligns items of several sizes
                assert rank.least_bytes <= rank.received_bytes < 1.01 * rank.least_bytes
            else:
                assert rank.received_bytes == rank.least_bytes
    whole = [report for report in reports.values() if not report.delta]
    if "relay" not in case.around or not whole:
        return
    needed = sum(rank.least_bytes for report in whole for rank in report.engine_ranks)
    sent = sum(rank.sent_bytes for report in whole for rank in report.trainer_ranks)
    if len(reports) == len(case.engines):
        assert all(report.relayed_bytes and not report.message for report in whole)
        apart = sum(size * packed_bytes(size) for size in case.engines) if case.repacks else 0  # no engine passes it on
        assert sent < 1.05 * (apart + (needed - apart) / len(reports)), "trainer ranks send all of it once"
    else:
        lost = case.names[case.faulty]
        assert all(f"engines did not pass on all weights: {lost}" in report.message for report in whole)


def test_the_script_has_what_it_is_for() -> None:
    assert all(SCRIPT[number - 1].fault is None for number in WARM)
    faulty = [number for number, step in enumerate(SCRIPT) if step.fault is not None]
    assert all(SCRIPT[number + 1] is HEALED or SCRIPT[number + 1].fault is not None for number in faulty)
    assert SCRIPT[-1] is HEALED
