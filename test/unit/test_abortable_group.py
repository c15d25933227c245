"""An aborted group ends all waits: of ranks that have died, and for messages that have arrived half."""

import os
import signal
import threading
import time

import pytest
import torch

from sglang_reshard.errors import DeadlineExceeded, ReshardError
from support.ready import CONTEXT
from support.sent import CPU, connected

TWO = {"members": [0, 1], "trainer_ranks": 1, "device": CPU, "timeout_s": 60}
THREE = {"members": [0, 1, 2], "trainer_ranks": 2, "device": CPU, "timeout_s": 60}
ENGINES = TWO | {"trainer_ranks": 0}
HALFWAY_BYTES = 2**28  # more than a kernel takes at once
SOON_S = 25.0


def store_at(port, hosts=False):
    return torch.distributed.TCPStore("127.0.0.1", port, is_master=hosts, wait_for_workers=False)


def die_at_once(port):
    connected(store_at(port), "r", peer_id=1, **THREE)
    os._exit(1)


def wait_in_vain(port, told):
    """Sends what trainer rank 0 never receives; says how long that took."""
    communicator = connected(store_at(port), "r", peer_id=2, **THREE)
    begun = time.monotonic()
    try:
        communicator.send([(0, torch.ones(2**20, dtype=torch.uint8))]).wait()
    except ReshardError as error:
        told.send((time.monotonic() - begun, str(error)))
    told.recv()


def test_abort_ends_all_waits_though_another_rank_has_died():
    store, (ours, theirs) = store_at(0, hosts=True), CONTEXT.Pipe()
    dying = CONTEXT.Process(target=die_at_once, args=(store.port,), daemon=True)
    waiting = CONTEXT.Process(target=wait_in_vain, args=(store.port, theirs), daemon=True)
    for process in (dying, waiting):
        process.start()
    communicator = connected(store, "r", peer_id=0, **THREE)
    dying.join(60)
    assert dying.exitcode == 1
    pending = communicator.send([(2, torch.ones(2**20, dtype=torch.uint8))])  # nor is this one ever received
    communicator.close()
    begun = time.monotonic()
    with pytest.raises(ReshardError, match=r"trainer rank 0 (could not send|stopped waiting)"):
        pending.wait()
    assert time.monotonic() - begun < SOON_S
    assert ours.poll(60)
    seconds, error = ours.recv()
    assert seconds < 2 * SOON_S
    assert "to trainer rank 0: the connection broke" in error
    ours.send("end")
    waiting.join(60)
    assert waiting.exitcode == 0


def started(communicator, other, verb, data):
    if verb == "broadcast":
        return communicator.broadcast(data, 0)
    return getattr(communicator, verb)([(other, data)])


def begin_and_stay(port, verb, options):
    """Sends, or receives as long as it runs: it stops before the first byte."""
    store = store_at(port)
    communicator = connected(store, "r", peer_id=0, **options)
    pending = started(communicator, 1, verb, torch.ones(HALFWAY_BYTES, dtype=torch.uint8))
    store.set("begun", "")
    if verb == "receive":
        os.kill(os.getpid(), signal.SIGSTOP)
    pending.wait()


@pytest.mark.parametrize(
    ("theirs", "ours", "options", "other"),
    [
        ("send", "receive", TWO, "trainer rank 0"),
        ("receive", "send", TWO, "trainer rank 0"),
        ("broadcast", "broadcast", ENGINES, "engine rank 0"),
    ],
)
def test_abort_ends_the_wait_for_half_a_message(theirs, ours, options, other):
    store = store_at(0, hosts=True)
    dying = CONTEXT.Process(target=begin_and_stay, args=(store.port, theirs, options), daemon=True)
    dying.start()
    communicator = connected(store, "r", peer_id=1, **options)
    data = torch.zeros(HALFWAY_BYTES, dtype=torch.uint8)
    store.wait(["begun"])
    time.sleep(0.2)  # a stop takes a moment, and so does the news that somebody receives
    pending = started(communicator, 0, ours, data)
    while ours != "send" and not data[0]:
        pass
    dying.kill()
    dying.join(60)
    assert dying.exitcode == -signal.SIGKILL
    assert not data[-1]
    threading.Timer(0.5, communicator.close).start()
    begun = time.monotonic()
    with pytest.raises(ReshardError, match=f"{communicator.name} stopped waiting for {other}: the process group was"):
        pending.wait()
    del communicator, pending  # gloo's own end of a group waits for its threads
    assert time.monotonic() - begun < SOON_S


def connect_and_stay(port, told):
    held = connected(store_at(port), "r", peer_id=0, **ENGINES)
    told.recv()
    held.close()


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (lambda group, data: group.broadcast(data, 0), "could not finish a broadcast with engine rank 0 within"),
        (lambda group, data: group.receive([(0, data)]), "could not receive a message from engine rank 0 within"),
    ],
)
def test_a_broadcast_ends_at_its_deadline_and_names_the_others(start, told):
    store, (ours, theirs) = store_at(0, hosts=True), CONTEXT.Pipe()
    silent = CONTEXT.Process(target=connect_and_stay, args=(store.port, theirs), daemon=True)
    silent.start()
    group = connected(store, "r", peer_id=1, **ENGINES)
    group.timeout_s = 0.5
    work = start(group, torch.zeros(8, dtype=torch.uint8))
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"engine rank 1 {told}"):
        work.wait()
    assert time.monotonic() - begun < SOON_S
    ours.send("end")
    silent.join(60)


def test_a_rank_that_does_not_come_to_a_broadcast_group_is_named():
    with pytest.raises(DeadlineExceeded, match="engine rank 1 waited 0 s for engine rank 0 to connect"):
        connected(store_at(0, hosts=True), "r", peer_id=1, **ENGINES | {"timeout_s": 0.5})
