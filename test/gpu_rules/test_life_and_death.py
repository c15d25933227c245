"""Many updates hold no more than few do; nothing is freed under a reader, and none is left behind by a failure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from support.gpu_jobs import DTYPE, Held, Job, Served, check_weights, serve, train, train_through_failures
from support.left_behind import torch_segments
from support.sweep import sweep
from support.toy import ToyRank
from support.virtual_gpus.description import Place
from support.virtual_gpus.world import left_over, run_with_gpus, virtual_gpus

UPDATES, MANY = 30, 1000
WARM = 10


def check_flat(held: Sequence[Held]) -> None:
    """Nothing grows, update after update."""
    warm, last = held[WARM], held[-1]
    fixed = ("descriptors", "mappings", "allocated", "mapped", "registered")
    # The least of several updates: a connection may be closing when one of them is looked at.
    grown = [name for name in fixed if min(getattr(late, name) for late in held[-5:]) > getattr(warm, name)]
    assert not grown, f"{grown}: update {WARM + 1}: {warm}; update {len(held)}: {last}"
    halfway = len(held) // 2
    made = last.objects - held[halfway].objects
    assert made < 1.5 * halfway + 500, f"{made} objects in {halfway} updates"  # each update adds its own `Held`
    assert last.resident - warm.resident < 4 << 20


@pytest.mark.parametrize("updates", [UPDATES, sweep(MANY)])
@pytest.mark.parametrize(
    ("offloaded", "transport", "unmap"),
    [(False, "ipc", True), (False, "ipc", False), (True, "ipc", False), (False, "p2p", False)],
)
def test_shards_that_move_in_every_update_leave_nothing_behind(offloaded, transport, unmap, updates):
    before = torch_segments()
    gpus_of = range(2), range(2, 4)
    job = Job(
        (2,), 2, updates, offloaded=offloaded, moves=True, held=True,
        options={"transport": transport}, update_options={"unmap_after": unmap},
    )  # fmt: skip
    with virtual_gpus(gpus=4, freed_while_mapped="violation" if unmap else "undefined") as gpus:
        places = [[Place("host 0", (n,)) for n in numbers] for numbers in gpus_of]
        trained, served = run_with_gpus(gpus, *places, train, serve, job, deadline_s=120 + 2 * updates)
        assert not left_over(gpus)
    assert all(not s.differing and len(s.versions) == updates for s in served)
    for rank in (*trained, *served):
        check_flat(rank.held)
    assert torch_segments() <= before


def test_memory_that_comes_again_at_its_address_is_mapped_anew():
    """All shards are in one allocation, which is freed and made again: the tensors look the same."""
    job = Job((2,), 1, updates=4, moves=True, segment=1 << 16)
    with virtual_gpus(gpus=2, freed_while_mapped="undefined") as gpus:
        places = [[Place("host 0", (n,)) for n in range(2)] for _ in range(2)]
        trained, served = run_with_gpus(gpus, *places, train, serve, job)
    assert all(not s.differing for s in served)
    assert {s.held[-1].mapped for s in served} == {2 << 16}
    assert len(trained[0].reports) == 4


@pytest.mark.parametrize("options", [{"staged": True}, {"verify": "full"}, {"staged": True, "unmap_after": True}])
def test_memory_is_freed_right_after_an_update_of_every_kind(options):
    job = Job((2,), 2, updates=2, moves=True, update_options={"unmap_after": True, **options})
    with virtual_gpus(gpus=2) as gpus:
        places = [Place("host 0", (n,)) for n in range(2)], [Place("host 0", (0, 1), n) for n in range(2)]
        _, served = run_with_gpus(gpus, *places, train, serve, job)
    assert all(s.versions == ["1", "2"] and not s.differing for s in served)


# -- failures, with NCCL between trainer ranks and engine ranks, or among engine ranks


def serve_with_a_failure(rank, size, requests, process, _transport, where="nowhere"):
    """Engine rank 1 fails in the second update: at "connect", which it does anew, or in the middle of "move"."""
    model = ToyRank(rank, size, DTYPE)
    process.give_memory(model)
    process.cuda.synchronize(process.device)
    receiver = WeightReceiver(TracedModel(model), rank, size, process.device)
    served = Served()

    def fail(*_args, **_options):
        raise OSError("it stumbled")

    for request in requests:
        transfers = receiver._executor.transfers
        if (request.update, rank) == (2, 1) and where == "move":
            transfers.last.end.move = fail
        if request.update == 2 and where == "connect":
            transfers.clear()
            if rank == 1:
                transfers.connect = fail
        elif "connect" in vars(transfers):
            del transfers.connect
        with process.update():
            output = receiver.update(request)
        requests.answer(output)
        if output.success:
            check_weights(model, request.weight_version, served)
    process.until_unmapped()  # a process that has ended unmaps, too, but leaves its virtual mappings behind
    return served


def serve_failing_in_move(*args):
    return serve_with_a_failure(*args, where="move")


def serve_failing_in_connect(*args):
    return serve_with_a_failure(*args, where="connect")


SEPARATE = [Place("a", (n,)) for n in range(2)], [Place("b", (0, 1), n) for n in range(2)]
TOGETHER = [Place("a", (n,)) for n in range(2)], [Place("a", (0, 1), n) for n in range(2)]


@pytest.mark.parametrize(("transport", "places"), [("p2p", SEPARATE), ("broadcast", TOGETHER)])
@pytest.mark.parametrize(
    ("serving", "kind"), [(serve_failing_in_move, "TornWeights"), (serve_failing_in_connect, "EngineRefused")]
)
def test_a_failure_ends_no_process_and_the_next_update_succeeds(transport, places, serving, kind):
    with virtual_gpus(hosts=("a", "b"), gpus=2) as gpus:
        told, served = run_with_gpus(gpus, *places, train_through_failures, serving, transport)
        assert not left_over(gpus)
    assert all(t == told[0] for t in told)
    first, second, third = told[0]
    assert (first, third) == ("updated", "updated")
    assert second.startswith(kind)
    assert "it stumbled" in second
    assert all(s.versions == ["1", "3"] and not s.differing for s in served)


def test_settings_by_which_nccl_would_hang_are_refused_with_the_cure():
    engines = [Place("a", (2, 3), n, environment={"NCCL_CUMEM_ENABLE": "0"}) for n in range(2)]
    with virtual_gpus(hosts=("a",), gpus=4) as gpus:
        told, _ = run_with_gpus(gpus, SEPARATE[0], engines, train_through_failures, serve_with_a_failure, "p2p")
    assert len(set(itertools.chain(*told))) == 1
    assert "NCCL_CUMEM_ENABLE" in told[0][0]
    assert told[0][0].startswith(("EngineRefused", "Unsupported", "Mismatch"))


def test_memory_without_handles_is_refused_where_it_could_only_be_sent_to_its_own_gpu():
    trainers = [Place("a", (n,), allocator="expandable_segments") for n in range(2)]
    with virtual_gpus(hosts=("a",), gpus=2) as gpus:
        told, _ = run_with_gpus(gpus, trainers, TOGETHER[1], train_through_failures, serve_with_a_failure, "auto")
    assert len(set(itertools.chain(*told))) == 1
    assert told[0][0].startswith("EngineRefused")
    assert "expandable_segments" in told[0][0]


# -- several engines at once


def test_engines_that_are_connected_at_once_leave_the_environment_and_find_room_on_a_gpu():
    """Each thread of a trainer rank makes a communicator, and all of them are in use at a time."""
    trainers = [Place("a", (n,)) for n in range(2)]
    engines = [Place("b", (n,)) for n in range(6)]
    with virtual_gpus(hosts=("a", "b"), gpus=6) as gpus:
        trained, served = run_with_gpus(gpus, trainers, engines, train, serve, Job((2,), 1))
    assert all(not s.differing for s in served)
    assert {r.transport for r in trained[0].reports[0].values()} == {"p2p"}
