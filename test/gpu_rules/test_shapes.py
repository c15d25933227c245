"""Every shape of trainer and engines takes exactly its bytes, bit for bit, and breaks no rule of GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.gpu_jobs import Job, Served, Trained, serve, train
from support.sweep import sweep
from support.toy_trainers import assert_told_alike
from support.virtual_gpus.description import Place, VirtualGpus
from support.virtual_gpus.world import left_over, run_with_gpus, virtual_gpus

NOTHING_NEW = {"trace", "plan", "connect"}


def trainer_places(gpus: VirtualGpus, numbers: range | None = None, **place: Any) -> list[Place]:
    """One on each GPU of every host, which sees no other, as Ray's workers do."""
    return [Place(host, (n,), **place) for host in gpus.hosts for n in numbers or range(gpus.gpus)]


def engine_places(gpus: VirtualGpus, tp: int, numbers: range | None = None, **place: Any) -> list[Place]:
    """One on each GPU of every host. Each sees those of its replica that are on its host, as verl's servers do."""
    everywhere = [(host, n) for host in gpus.hosts for n in numbers or range(gpus.gpus)]
    places = []
    for first in range(0, len(everywhere), tp):
        replica = everywhere[first : first + tp]
        for host, n in replica:
            visible = tuple(number for other, number in replica if other == host)
            places.append(Place(host, visible, visible.index(n), **place))
    return places


def run(gpus: VirtualGpus, trainers: list[Place], engines: list[Place], job: Job) -> tuple[list[Trained], list[Served]]:
    """Runs it, and checks what must hold for every shape."""
    trained, served = run_with_gpus(gpus, trainers, engines, train, serve, job)
    versions = [str(version) for version in range(1, job.updates + 1)]
    assert all(not s.differing and s.versions == versions for s in served)
    assert_told_alike([[report for reports in t.reports for report in reports.values()] for t in trained])
    for reports in trained[0].reports:
        assert len(reports) == len(engines) // job.tp
        for report in reports.values():
            assert sum(r.received_bytes for r in report.engine_ranks) == sum(r.least_bytes for r in report.engine_ranks)
            assert sum(t.sent_bytes for t in report.trainer_ranks) == report.received_bytes
    assert not left_over(gpus), "a mapping has outlived its session"
    return trained, served


def transports(trained: list[Trained]) -> set[str]:
    return {report.transport for reports in trained[0].reports for report in reports.values()}


def planned(trained: list[Trained], update: int) -> set[str]:
    """What was done anew in an update of any engine."""
    return {phase for report in trained[0].reports[update].values() for phase in report.seconds} & NOTHING_NEW


# -- colocated


@pytest.mark.parametrize("tp", [sweep(1), 2, sweep(4), 8])
def test_replicas_of_every_size_read_the_memory_of_their_host(tp):
    with virtual_gpus() as gpus:
        trained, _ = run(gpus, trainer_places(gpus), engine_places(gpus, tp), Job((8,), tp))
    assert transports(trained) == {"ipc"}
    assert not planned(trained, 1)


@pytest.mark.parametrize(
    ("hosts", "mesh", "tp", "expected"),
    [
        (2, (8,), 2, "ipc+p2p"),
        sweep(2, (8,), 8, "ipc+p2p"),
        sweep(4, (8,), 2, "ipc+p2p"),
        sweep(4, (8,), 4, "ipc+p2p"),
        (4, (8,), 8, "ipc+p2p"),
        (2, (2, 4), 4, "ipc"),
    ],
)
def test_replicas_within_a_host_over_two_and_over_all(hosts, mesh, tp, expected):
    with virtual_gpus(hosts=tuple(f"host {i}" for i in range(hosts)), gpus=8 // hosts) as gpus:
        trained, _ = run(gpus, trainer_places(gpus), engine_places(gpus, tp), Job(mesh, tp))
    assert transports(trained) == {expected}
    assert not planned(trained, 1)


# -- how weights live


def test_offloaded_shards_are_read_from_host_memory_and_nothing_is_planned_anew():
    with virtual_gpus(gpus=4) as gpus:
        job = Job((4,), 2, updates=3, offloaded=True, moves=True)
        trained, _ = run(gpus, trainer_places(gpus), engine_places(gpus, 2), job)
    assert transports(trained) == {"ipc"}
    assert not planned(trained, 1)
    assert not planned(trained, 2)


def test_live_weights_that_are_freed_and_allocated_between_updates():
    with virtual_gpus(gpus=4) as gpus:
        job = Job((4,), 2, updates=3, live_moves=True, moves=True, update_options={"unmap_after": True})
        trained, _ = run(gpus, trainer_places(gpus), engine_places(gpus, 2), job)
    assert transports(trained) == {"ipc"}


def test_shards_of_one_segment_are_one_mapping():
    with virtual_gpus(gpus=2) as gpus:
        job = Job((2,), 1, segment=1 << 16)
        _, served = run(gpus, trainer_places(gpus), engine_places(gpus, 1), job)
    assert {s.held[-1].mapped for s in served} == {2 << 16}


@pytest.mark.parametrize("allocator", ["expandable_segments", sweep("cudaMallocAsync")])
def test_memory_without_handles_is_sent_where_no_gpu_would_be_twice_in_a_communicator(allocator):
    with virtual_gpus(gpus=4) as gpus:
        trainers = trainer_places(gpus, range(2), allocator=allocator)
        trained, _ = run(gpus, trainers, engine_places(gpus, 2, range(2, 4)), Job((2,), 2))
    assert transports(trained) == {"p2p"}


# -- disaggregated


@pytest.mark.parametrize("base", [{}, sweep({"delta_device": torch.device("cpu")})], ids=str)
def test_what_has_changed_is_sent_between_gpus(base: dict[str, Any]) -> None:
    with virtual_gpus(hosts=("trainer", "engine"), gpus=2) as gpus:
        trainers = [Place("trainer", (n,)) for n in range(2)]
        engines = [Place("engine", (0, 1), n) for n in range(2)]
        options = {"transport": "p2p", "delta": "auto", **base}
        job = Job((2,), 2, updates=3, drift=True, options=options, update_options={"verify": "full"})
        trained, served = run_with_gpus(gpus, trainers, engines, train, serve, job)
    assert all(not s.differing and len(s.versions) == 3 for s in served)
    reports = [report for of_update in trained[0].reports for report in of_update.values()]
    assert [report.delta for report in reports] == [False, True, True]
    assert reports[2].received_bytes < reports[0].received_bytes / 4


def test_gpus_of_their_own_on_one_host():
    with virtual_gpus(gpus=4) as gpus:
        trained, _ = run(gpus, trainer_places(gpus, range(2)), engine_places(gpus, 2, range(2, 4)), Job((2,), 2))
    assert transports(trained) == {"ipc"}


def test_gpus_without_peer_access():
    apart = frozenset((a, b) for a in range(2) for b in range(2, 4))
    with virtual_gpus(gpus=4, without_peers=apart) as gpus:
        trained, _ = run(gpus, trainer_places(gpus, range(2)), engine_places(gpus, 2, range(2, 4)), Job((2,), 2))
    assert transports(trained) == {"p2p"}


def test_hosts_of_their_own():
    with virtual_gpus(hosts=("trainers", "engines"), gpus=2) as gpus:
        trainers = [p for p in trainer_places(gpus) if p.host == "trainers"]
        engines = [p for p in engine_places(gpus, 2) if p.host == "engines"]
        trained, _ = run(gpus, trainers, engines, Job((2,), 2))
    assert transports(trained) == {"p2p"}
