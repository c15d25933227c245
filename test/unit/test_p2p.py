"""Exact boxes, sent: what is ready to send is used again, released with the shards, and an abort ends all waits."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from sglang_reshard.errors import ReshardError
from sglang_reshard.routes.wire.communicator import Communicators
from support.ready import CONTEXT
from support.sent import CPU
from support.toy import checkpoint
from support.toy_serving import serve
from support.toy_trainers import State
from support.world import run_world

GROUPS = ((0, 1), (0, 2))
OPTIONS = {"trainer_ranks": 1, "device": CPU, "timeout_s": 60}


def train_with_moved_memory(trainer, updates):
    sender = trainer.sender(transport="p2p")
    keys, kept = [], []
    for version in range(1, updates + 1):
        state = State((2,), "fsdp", torch.float32)
        kept.append(state)  # so that the next one has other addresses
        state.become(version)
        assert "connect" in sender.update(state.given).seconds
        dist.barrier()
        keys.append(sender._worker._session.client.num_keys())
        dist.barrier()
    return keys


def test_connections_that_are_made_anew_leave_no_keys_behind():
    (keys, _), versions = run_world(2, 2, train_with_moved_memory, serve, 6)
    assert versions == [[1, 2, 3, 4, 5, 6]] * 2
    assert keys[5] == keys[1]


def train_released(trainer):
    """What is kept ready keeps the shards' memory, until it is released."""
    sender = trainer.sender(timeout_s=10, transport="p2p")
    state = checkpoint(1)
    sender.update(state.items())
    alive = torch.multiprocessing.reductions.StorageWeakRef(state["up.weight"].untyped_storage())
    state["up.weight"] = state["up.weight"].clone()
    kept = not alive.expired()
    sender.release()
    freed = alive.expired()
    again = "connect" in sender.update(state.items()).seconds
    state["up.weight"] = state["up.weight"].clone()
    moved = "connect" in sender.update(state.items()).seconds
    return kept, freed, again, moved


def test_shards_that_are_released_or_replaced_are_made_ready_again():
    told, versions = run_world(1, 1, train_released, serve)
    assert told == [(True, True, True, True)]
    assert versions == [[1, 1, 1]]


def receive_nothing(port, peer_id):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    communicators = Communicators(GROUPS, peer_id=peer_id, **OPTIONS)
    communicators.connect(store, [0])
    begun = time.monotonic()
    with pytest.raises(ReshardError):
        communicators.receive([(0, torch.zeros(8, dtype=torch.uint8))]).wait()
    os._exit(0 if time.monotonic() - begun < 40 else 1)


def test_an_abort_ends_the_waits_in_all_communicators():
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
