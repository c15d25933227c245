"""What an engine rank maps, opens and registers: no more than it reads, and nothing of pages that are gone."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from sglang_reshard.engine.prepared import Transfers
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from support import gpu_jobs
from support.gpu_jobs import DTYPE, Job, Served, check_weights, serve, train, train_through_failures
from support.toy import ToyRank
from support.virtual_gpus import journal
from support.virtual_gpus.description import Place
from support.virtual_gpus.journal import RuleBroken
from support.virtual_gpus.world import left_over, run_with_gpus, virtual_gpus

HOST = "host 0"
SMALL = 256  # bytes of a bucket: what is one box of a parameter is read in place


# -- a memory saver maps other pages at the same addresses


def places(trainers, engines, count=2):
    return [[Place(host, tuple(range(count)), n) for n in range(count)] for host in (trainers, engines)]


@pytest.mark.parametrize(
    ("transport", "engines", "delta"),
    [
        ("nixl", "b", "off"),
        ("nixl", "b", "auto"),
        ("p2p", "b", "off"),
        ("p2p", "b", "auto"),
        ("ipc", "a", "off"),
        ("broadcast", "a", "off"),
    ],
)
def test_weights_arrive_in_the_pages_that_a_memory_saver_has_resumed(transport, engines, delta):
    options = {"transport": transport, "delta": delta, "bucket_bytes": SMALL}
    job = Job((2,), 2, updates=3, saver=True, options=options)
    with virtual_gpus(hosts=("a", "b"), gpus=2) as gpus:
        trained, served = run_with_gpus(gpus, *places("a", engines), train, serve, job)
        assert not left_over(gpus)
    assert all(s.versions == ["1", "2", "3"] and not s.differing for s in served)
    assert {r.transport for reports in trained[0].reports for r in reports.values()} == {transport}


def test_engines_that_pass_on_weights_do_so_from_the_pages_that_are_there():
    job = Job((2,), 1, updates=3, saver=True, options={"transport": "nixl", "relay": True})
    with virtual_gpus(hosts=("a", "b"), gpus=2) as gpus:
        _, served = run_with_gpus(gpus, *places("a", "b"), train, serve, job)
    assert all(s.versions == ["1", "2", "3"] and not s.differing for s in served)


def serve_without_dropping(*args: Any) -> Served:
    Transfers.release_pages = lambda _: None  # type: ignore[method-assign]
    return gpu_jobs.serve(*args)


def test_an_engine_rank_that_keeps_its_registrations_is_reported():
    job = Job((2,), 2, saver=True, options={"transport": "nixl", "bucket_bytes": SMALL})
    with (
        pytest.raises(RuleBroken, match=r"the pages of allocation [0-9]+ were released while registered with NIXL"),
        virtual_gpus(hosts=("a", "b"), gpus=2) as gpus,
    ):
        run_with_gpus(gpus, *places("a", "b"), train, serve_without_dropping, job)


def serve_released_while_staged(rank, size, requests, process, _job):
    """The first update is staged, and its engine rank's weights are released before it is committed."""
    model = ToyRank(rank, size, DTYPE)
    process.give_memory(model)
    process.cuda.synchronize(process.device)
    receiver, served, outputs = WeightReceiver(TracedModel(model), rank, size, process.device), Served(), []
    for request in requests:
        output = receiver.stage(request)
        while receiver._staging is not None and (output := receiver.staged()) is None:
            time.sleep(0.01)
        if request.weight_version == "1":
            receiver.release_pages()
            process.pause(model)
            process.resume(model)
        if output.success:
            output = receiver.commit(request)
        outputs.append(output)
        requests.answer(output)
        if output.success:
            check_weights(model, request.weight_version, served)
    process.until_unmapped()
    return outputs, served


def train_through_a_release(trainer, process, _job):
    return train_through_failures(trainer, process, "nixl", updates=2, staged=True)


def test_a_staged_update_ends_when_the_weights_under_it_are_released():
    with virtual_gpus(hosts=("a", "b"), gpus=2) as gpus:
        told, served = run_with_gpus(
            gpus, *places("a", "b"), train_through_a_release, serve_released_while_staged, None
        )
    assert all(t == told[0] for t in told)
    assert "its weights are being released" in told[0][0]
    assert told[0][1] == "updated"
    assert all(s.versions == ["2"] and not s.differing for _, s in served)


# -- handles: as many are opened as are read


def serve_and_count(rank, _size, requests, process, job):
    """Trainer rank -> allocations that are read, what was opened in each update, and what was closed at the end."""
    own = rank % job.tp
    model = ToyRank(own, job.tp, DTYPE)
    process.give_memory(model)
    process.cuda.synchronize(process.device)
    receiver, served, touched = WeightReceiver(TracedModel(model), own, job.tp, process.device), Served(), None
    for request in requests:
        output = receiver.update(request)
        if output.success:
            plan = receiver._executor.transfer.target.read_plan
            pairs = zip(plan.trainer_ranks.tolist(), plan.tensor_ids[plan.copy_ids].tolist(), strict=True)
            touched = Counter(trainer_rank for trainer_rank, _ in set(pairs))
            check_weights(model, request.weight_version, served)
        requests.answer(output)
    process.until_unmapped()
    return touched, served


@pytest.mark.parametrize(("shards", "tp"), [(8, 8), (8, 2), (4, 4)])
def test_an_engine_rank_opens_the_allocations_that_it_reads_and_one_to_try_each_trainer_rank(shards, tp):
    with virtual_gpus(gpus=8) as gpus:
        trainers = [Place(HOST, (n,)) for n in range(shards)]
        engines = [Place(HOST, tuple(range(tp)), n) for n in range(tp)]
        _, served = run_with_gpus(gpus, trainers, engines, train, serve_and_count, Job((shards,), tp))
        seen = journal.read(gpus.folder)
    everything = 8 * shards  # tensors, of each trainer rank
    for rank, (touched, found) in enumerate(served):
        assert not found.differing
        own = [e for e in seen if e["who"] == f"engine rank {rank}"]
        opened, closed = journal.of(own, "open"), journal.of(own, "close")
        assert len(opened) <= sum(touched.values()) + len(touched)
        assert len(opened) == len(closed)
        if tp == 8:
            assert sum(touched.values()) < everything / 2, "the toy's loader reads a part of each trainer rank"
        # All are closed at the end, after one wait.
        last = own[[e["what"] for e in own].index("close", own.index(opened[-1])) :]
        assert {e["what"] for e in last} <= {"close", "trim", "free"}, last


# -- reads from GPU to GPU that bring other bytes


def test_weights_are_not_read_by_a_way_that_brings_other_bytes():
    """Behind PCIe ACS or an IOMMU; `verify` is off, and nobody would notice."""
    garbled = frozenset((a, b) for a in range(2) for b in range(2, 4))
    with virtual_gpus(gpus=4, garbled=garbled) as gpus:
        trainers = [Place(HOST, (n,)) for n in range(2)]
        engines = [Place(HOST, (2, 3), n) for n in range(2)]
        trained, served = run_with_gpus(gpus, trainers, engines, train, serve, Job((2,), 2))
    assert all(not s.differing and len(s.versions) == 2 for s in served)
    for reports in trained[0].reports:
        for report in reports.values():
            assert report.transport == "p2p"
            assert "reads as other bytes than were written there" in report.transport_reason
