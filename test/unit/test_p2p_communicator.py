"""P2P communicators close without a leak, and errors name the rank that is missing."""

import time

import pytest
import torch

from sglang_reshard.errors import DeadlineExceeded
from support.sent import CPU, connected, open_here
from support.world import run_world


def join_and_leave(trainer, times):
    """Make and drop connections; what is open afterwards, beside what was at the first."""
    store = trainer.group and torch.distributed.distributed_c10d._get_default_store()
    counts = []
    for i in range(times):
        communicator = connected(
            store,
            f"r{i}",
            peer_id=trainer.rank,
            members=range(trainer.size),
            trainer_ranks=1,
            backend="gloo",
            device=CPU,
            timeout_s=5,
        )
        data = torch.full((100_000,), trainer.rank, dtype=torch.uint8)
        others = [r for r in range(trainer.size) if r != trainer.rank]
        arrived = [(r, torch.empty(100_000, dtype=torch.uint8)) for r in others]
        pending = [communicator.receive(arrived), communicator.send([(r, data) for r in others])]
        for ops in pending:
            ops.wait()
        assert all((buffer == r).all() for r, buffer in arrived)
        communicator.close()
        del communicator, pending
        torch.distributed.barrier()
        time.sleep(0.02)
        counts.append(open_here())
    return counts[2], counts[-1]


def no_engine(rank, size, requests, *_):
    for request in requests:
        requests.answer(request)


def test_connections_end_with_their_threads_and_descriptors():
    counted, _ = run_world(3, 1, join_and_leave, no_engine, 40)
    for early, late in counted:
        assert late <= early


def come_late(trainer):
    store = torch.distributed.distributed_c10d._get_default_store()
    if trainer.rank == 1:
        return ""
    options = {"members": [0, 1, 2], "trainer_ranks": 2, "backend": "gloo", "device": CPU, "timeout_s": 1}
    with pytest.raises(DeadlineExceeded) as late:
        connected(store, "r", peer_id=2 if trainer.rank == 2 else 0, **options)
    return str(late.value)


def test_a_rank_that_does_not_connect_is_named():
    told, _ = run_world(3, 1, come_late, no_engine)
    assert told[0] == "trainer rank 0 waited 1 s for trainer rank 1 to connect; look at their logs"
    assert told[2] == "engine rank 0 waited 1 s for trainer rank 1 to connect; look at their logs"


def stay_silent(trainer):
    store = torch.distributed.distributed_c10d._get_default_store()
    options = {"members": [0, 1], "trainer_ranks": 1, "backend": "gloo", "device": CPU, "timeout_s": 1}
    communicator = connected(store, "r", peer_id=trainer.rank, **options)
    told = ""
    if trainer.rank == 1:
        with pytest.raises(DeadlineExceeded) as silent:
            communicator.receive([(0, torch.empty(8, dtype=torch.uint8))]).wait()
        told = str(silent.value)
    torch.distributed.barrier()
    return told


def test_a_silent_peer_is_named_at_the_deadline():
    told, _ = run_world(2, 1, stay_silent, no_engine)
    assert told[1].startswith("engine rank 0 could not receive a message from trainer rank 0 within 1 s")
