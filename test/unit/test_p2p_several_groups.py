"""A transfer over several communicators delivers every byte, and an abort or a failure in one of them ends all waits.

Two engine ranks are said to share a GPU, so that each gets a communicator of its own; messages go through gloo.
"""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import ReshardError
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.routes.p2p import engine as p2p_engine
from sglang_reshard.routes.p2p.groups import plan_p2p_groups
from sglang_reshard.routes.wire.communicator import Communicators
from support.ready import CONTEXT
from support.sent import CPU
from support.toy import ToyRank, checkpoint
from support.toy_trainers import sharded
from support.world import run_world
from test_p2p import MIB, serve, train


def share_a_gpu():
    def groups(topology, per_round):
        trainers, engines = per_round.shape
        found = plan_p2p_groups(
            per_round, [RankGpuInfo()] * trainers, [RankGpuInfo("GPU-0")] * engines, ["a"] * engines
        )
        assert len(found) == engines
        return found

    p2p_engine._communicators = groups


def serve_in_groups(*arguments):
    share_a_gpu()
    return serve(*arguments)


@pytest.mark.parametrize("bucket_bytes", [256, MIB])
def test_what_is_sent_over_several_communicators_is_exact(bucket_bytes):
    transfers, served = run_world(2, 2, train, serve_in_groups, (2,), "tp", torch.float32, bucket_bytes, 3)
    assert [differing for differing, _ in served] == [[], []]
    assert transfers == [[transfers[0][0]] * 3] * 2, "connections are kept"


def stumble_once(copies):
    """Let the next `run` of a CopyList raise."""
    run = copies.run

    def fail():
        copies.run = run
        raise OSError("the trainer stumbled")

    copies.run = fail


def train_through_a_mishap(trainer, mishap):
    """Three updates; in the second, trainer rank 1 stumbles between two rounds, or engine rank 1 before the first."""
    sender = WeightSender.over(trainer.group, trainer.send, bucket_bytes=64, timeout_s=60, transport="p2p")
    state = dict(sharded(1, (2,), "tp", torch.float32))
    told = []
    for update in (1, 2, 3):
        if (mishap, update, trainer.rank) == ("trainer", 2, 1):
            stumble_once(sender._worker._transfers[0]._prepared.end._sender._rounds[1][1])
        begun = time.monotonic()
        try:
            told.append(sender.update(state.items()).success)
        except ReshardError as error:
            told.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - begun < 40
    sender.close()
    return told


def serve_through_a_mishap(rank, size, requests, mishap):
    model = ToyRank(rank, size)
    receiver = WeightReceiver(TracedModel(model), rank, size, CPU)
    move = receiver._executor._move

    def stumble(course):
        if (mishap, course.request.update, rank) == ("engine", 2, 1):
            raise OSError("the engine rank stumbled")
        move(course)

    receiver._executor._move = stumble
    for request in requests:
        requests.answer(receiver.update(request))
    stock = ToyRank(rank, size)
    stock.load_weights(checkpoint(1).items())
    return all(torch.equal(p, getattr(model, n)) for n, p in stock.named_parameters())


def fail_in_groups(*arguments):
    share_a_gpu()
    return serve_through_a_mishap(*arguments)


@pytest.mark.parametrize("mishap", ["trainer", "engine"])
def test_a_failure_in_one_communicator_is_told_to_all_and_the_next_update_heals_it(mishap):
    told, exact = run_world(2, 2, train_through_a_mishap, fail_in_groups, mishap)
    assert told[0] == told[1]
    assert (told[0][0], told[0][2]) == (True, True)
    assert "stumbled" in told[0][1]
    assert exact == [True, True]


GROUPS = ((0, 1), (0, 2))
OPTIONS = {"trainer_ranks": 1, "device": CPU, "timeout_s": 60}


def receive_nothing(port, peer_id):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    communicators = Communicators(GROUPS, peer_id=peer_id, **OPTIONS)
    communicators.connect(store, [0])
    begun = time.monotonic()
    with pytest.raises(ReshardError):
        communicators.receive([(0, torch.zeros(8, dtype=torch.uint8))]).wait()
    os._exit(0 if time.monotonic() - begun < 40 else 1)


def test_an_abort_ends_the_waits_in_all_of_them():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peers = [CONTEXT.Process(target=receive_nothing, args=(store.port, peer), daemon=True) for peer in (1, 2)]
    for peer in peers:
        peer.start()
    communicators = Communicators(GROUPS, peer_id=0, **OPTIONS)
    communicators.connect(store, [1, 2])
    pending = communicators.receive([(1, torch.zeros(8, dtype=torch.uint8)), (2, torch.zeros(8, dtype=torch.uint8))])
    threading.Timer(0.3, communicators.abort).start()
    begun = time.monotonic()
    with pytest.raises(ReshardError, match=r"trainer rank 0 (stopped waiting|could not receive)"):
        pending.wait()
    assert time.monotonic() - begun < 30
    for peer in peers:
        peer.join(60)
    assert [peer.exitcode for peer in peers] == [0, 0]
