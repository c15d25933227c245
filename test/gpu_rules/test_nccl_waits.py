"""No call of NCCL's stops a process: one thread goes on while another waits, a third aborts, and a peer is stopped."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from benchmark.gpu.nccl_waits import ticking
from sglang_reshard.errors import DeadlineExceeded, PeerDisconnected, ReshardError
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.routes.wire.communicator import Communicator
from sglang_reshard.routes.wire.ctas import MOST
from support.gpu_jobs import Job, serve, train
from support.virtual_gpus import journal
from support.virtual_gpus.description import Place
from support.virtual_gpus.nccl import CTAS, FROZEN_S
from support.virtual_gpus.world import run_with_gpus, virtual_gpus

TOGETHER = [Place("host 0", (number,)) for number in range(2)]
STILL_S = FROZEN_S / 2  # a thread that ticks may stand still for less than that: the host is busy
TIMEOUT_S = 3.0
SOON_S = 10.0


def nothing(*_):
    """Instead of engine ranks."""


def run(task, *arguments):
    with virtual_gpus(gpus=2) as gpus:
        told, _ = run_with_gpus(gpus, TOGETHER, [], _call, nothing, task, *arguments, deadline_s=90)
    return told


def _call(trainer, process, task, *arguments):
    process.cuda.synchronize(process.device)
    store = dist.PrefixStore("nccl", dist.distributed_c10d._get_default_store())
    return task(trainer.rank, process, store, *arguments)


def communicator(rank, process, timeout_s=TIMEOUT_S):
    return Communicator((0, 1), peer_id=rank, trainer_ranks=2, device=process.device, timeout_s=timeout_s)


def stop_until_told(store):
    store.set("pid", str(os.getpid()))
    store.wait(["stop"])
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def stop_the_other(store):
    pid = int(store.get("pid"))
    store.set("stop", "")
    while not stopped(pid):
        time.sleep(0.01)
    return pid


def beside_the_stopped(store, group, call, aborts_s):
    """The error that a call raises beside a stopped peer, how long that takes, and how long a thread stood still.

    aborts_s  when the group is aborted meanwhile; None: never
    """
    pid, error = stop_the_other(store), None
    with ticking() as still_s:
        if aborts_s is not None:
            threading.Timer(aborts_s, group.abort).start()
        begun = time.monotonic()
        try:
            call()
        except ReshardError as raised:
            error = type(raised)
        seconds = time.monotonic() - begun
        group.close()
        time.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    return error, seconds, still_s()


def ended(told, error):
    raised, seconds, still_s = told
    assert raised is error
    assert seconds < SOON_S
    assert still_s < STILL_S


def receive_from_who_is_stopped(rank, process, store, aborts_s):
    group = communicator(rank, process, TIMEOUT_S if aborts_s is None else 60.0)
    group.connect(store)
    if rank:
        stop_until_told(store)
        group.close()
        return None
    pending = group.receive([(1, torch.zeros(8, dtype=torch.uint8, device=process.device))])
    return beside_the_stopped(store, group, pending.wait, aborts_s)


@pytest.mark.parametrize(("aborts_s", "error"), [(0.3, PeerDisconnected), (None, DeadlineExceeded)])
def test_a_wait_that_is_aborted_beside_a_stopped_peer_stops_no_other_thread(aborts_s, error):
    ended(run(receive_from_who_is_stopped, aborts_s)[0], error)


def broadcast_with_who_is_stopped(rank, process, store):
    group = Communicator((0, 1), peer_id=rank, trainer_ranks=0, device=process.device, timeout_s=60.0)
    group.connect(store)
    group.broadcast(torch.zeros(1, dtype=torch.uint8, device=process.device), 0).wait()
    if rank:
        stop_until_told(store)
        group.close()
        return None
    work = group.broadcast(torch.zeros(8, dtype=torch.uint8, device=process.device), 1)
    return beside_the_stopped(store, group, work.wait, 0.3)


def test_a_broadcast_that_is_aborted_beside_a_stopped_peer_stops_no_other_thread():
    ended(run(broadcast_with_who_is_stopped)[0], PeerDisconnected)


def connect_to_who_is_stopped(rank, process, store, aborts_s):
    """The other member has come, and is stopped before NCCL has connected it."""
    if rank:
        store.set("joined/1", "")
        store.set("ctas/1", "16")
        if store.add("entered", 1) == 2:
            store.set("all_entered", "")
        stop_until_told(store)
        return None
    group = communicator(rank, process, TIMEOUT_S if aborts_s is None else 60.0)
    return beside_the_stopped(store, group, lambda: group.connect(store), aborts_s)


@pytest.mark.parametrize(("aborts_s", "error"), [(1.0, PeerDisconnected), (None, DeadlineExceeded)])
def test_connecting_to_a_peer_that_is_stopped_ends_and_stops_no_other_thread(aborts_s, error):
    ended(run(connect_to_who_is_stopped, aborts_s)[0], error)


def wait_on_the_waiting_stream(rank, process, store):
    """What a thread computes on while it waits; and the stream that it has afterwards."""
    before = torch.cuda.current_stream(process.device)
    with runtime().waiting_stream(process.device):
        inside = torch.cuda.current_stream(process.device)
    return inside != before, torch.cuda.current_stream(process.device) == before


def test_a_wait_has_a_stream_of_its_own_and_leaves_the_threads_own():
    assert run(wait_on_the_waiting_stream) == [(True, True)] * 2


# -- room on a GPU


def test_nine_engines_at_once_find_room_on_a_gpu_of_their_trainers():
    engines = [Place("b", (n,)) for n in range(9)]
    with virtual_gpus(hosts=("a", "b"), gpus=9) as gpus:
        trained, served = run_with_gpus(gpus, [Place("a", (0,))], engines, train, serve, Job((1,), 1, updates=1))
        made = journal.of(journal.read(gpus.folder), "communicator")
    assert all(not s.differing for s in served)
    assert {r.transport for r in trained[0].reports[0].values()} == {"p2p"}
    of_the_trainer = [entry["ctas"] for entry in made if entry["who"] == "trainer rank 0"]
    assert len(of_the_trainer) == 9
    assert sum(of_the_trainer) <= CTAS
    assert max(of_the_trainer) <= MOST
