"""NCCL: one rank alone, two ranks on one GPU, and a GPU that does not end."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

from benchmark.gpu import nccl_waits, sharing
from benchmark.gpu.item import Bench, Item, Skip
from benchmark.gpu.peer import Here, everywhere
from benchmark.gpu.place import DEVICE, GIB, MIB, pattern, same_bytes
from sglang_reshard.control import Address
from sglang_reshard.protocol.session import LOOPBACK, Session
from sglang_reshard.routes.wire.nccl import NcclGroup

_TIMEOUT_S = 6.0
_LATE_S = 6.0  # beyond a deadline, for threads and processes
_SPECIAL = ("NCCL_", "TORCH_NCCL_")


def alone(bench: Bench) -> None:
    bench.enter()
    session = Session.host(LOOPBACK, 20.0)
    before = _environment()
    with session.trainer_channel(1, "battery") as channel:
        store = session.store(0, 20.0, channel.scope)
        begin = time.perf_counter()
        group = _group(store, "alone")
        bench.saw(connect_seconds=time.perf_counter() - begin)
        _self_send(bench, group)
        begin = time.perf_counter()
        group.abort(())
        bench.saw(abort_seconds=time.perf_counter() - begin)
        bench.check(time.perf_counter() - begin < _LATE_S, "an idle communicator took seconds to abort")
        _from_threads(bench, store)
    after = _environment()
    bench.check(before == after, f"the environment was changed: {sorted(set(before.items()) ^ set(after.items()))}")
    bench.check(sharing.computes(bench.here), "the GPU does not compute any more")


def _group(store: Any, name: str) -> NcclGroup:
    group = NcclGroup(torch.distributed.PrefixStore(name, store), 0, 1, DEVICE, 20.0)
    group.connect()
    return group


def _self_send(bench: Bench, group: NcclGroup) -> None:
    """Of more bytes than 31 bits count, in one operation: NCCL wants both halves in one group."""
    size = bench.place.pick(3 * GIB, 2 * MIB)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    destination = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    pattern(3, source)
    torch.cuda.synchronize(DEVICE)
    begin = time.perf_counter()
    with group._coalesced() as works:
        group._pg.send([source], 0, 0)
        group._pg.recv([destination], 0, 0)
    group.wait(works[0], time.monotonic() + 30)
    torch.cuda.synchronize(DEVICE)
    bench.saw(self_send_bytes=size, self_send_seconds=time.perf_counter() - begin)
    bench.check(same_bytes(source, destination), "the bytes of a message to itself differ")


def _from_threads(bench: Bench, store: Any) -> None:
    """Several communicators at once, as several engines' are made by a trainer rank."""
    failed: list[str] = []

    def make(number: int) -> None:
        try:
            with torch.cuda.device(DEVICE):
                group = _group(store, f"thread {number}")
                buffer = torch.full((MIB,), number, dtype=torch.uint8, device=DEVICE)
                group.wait(group.broadcast(buffer, 0), time.monotonic() + 20)
                group.abort(())
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")

    begin = time.perf_counter()
    threads = [threading.Thread(target=make, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    bench.saw(four_threads_seconds=time.perf_counter() - begin)
    bench.check(not failed, f"in threads: {failed[:2]}")
    bench.check(not any(thread.is_alive() for thread in threads), "a thread still waits")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_SPECIAL)}


# -- 12: two ranks on one GPU


def twice(bench: Bench) -> None:
    ranks = [bench.peer(f"rank {number}", visible=("0", (0,))) for number in range(2)]
    session = Session.host(LOOPBACK, 20.0)
    found = everywhere(ranks, join, session.address, "twice", _TIMEOUT_S, ranked=True)
    bench.saw(errors=[error for error, _ in found], seconds=[seconds for _, seconds in found])
    for error, seconds in found:
        bench.check(bool(error), "two ranks of one GPU were connected; NCCL did not refuse")
        bench.check(seconds < _TIMEOUT_S + _LATE_S, f"it took {seconds:.0f} s to be refused")
    for peer in ranks:
        bench.check(peer.call(sharing.computes), f"{peer.place.name} cannot use its GPU any more")


def stopped(bench: Bench) -> None:
    """A member that does not come, because it was stopped: the other one's wait ends at its deadline."""
    waiting, stopping = bench.peer("rank that waits"), bench.peer("rank that is stopped")
    session = Session.host(LOOPBACK, 20.0)
    stopping.call(sharing.computes)
    stopping.signal(signal.SIGSTOP)
    error, seconds = waiting.call(join, 0, session.address, "stopped", _TIMEOUT_S)
    stopping.signal(signal.SIGCONT)
    bench.saw(error=error, seconds=seconds)
    bench.check(bool(error), "it was connected to a process that was stopped")
    bench.check(seconds < _TIMEOUT_S + _LATE_S, f"its wait took {seconds:.0f} s, with a deadline of {_TIMEOUT_S:.0f} s")
    bench.check(waiting.call(sharing.computes), "the rank that waited cannot use its GPU any more")


def join(here: Here, peer_id: int, address: Address, name: str, timeout_s: float) -> tuple[str, float]:
    """Connects to the other of two. Returns the error, empty if there was none, and the seconds that it took."""
    with nccl_waits.communicator(here, address, name, peer_id, 2, timeout_s) as (group, store):
        return nccl_waits.outcome(lambda: group.connect(store))


# -- 13: a GPU that does not end


def endless(bench: Bench) -> None:
    if bench.place.rehearsed:
        raise Skip("virtual GPUs have no endless kernels")
    victim = bench.peer("rank whose GPU does not end")
    session = Session.host(LOOPBACK, 20.0)
    free = bench.peer("watcher").call(sharing.free)
    error, seconds = victim.call(_wait_endlessly, session.address)
    bench.saw(error=error, seconds=seconds)
    bench.check("within 3 s" in error, f"the wait ended otherwise: {error!r}")
    bench.check(seconds < 3 + _LATE_S, f"a wait of 3 s took {seconds:.0f} s")
    time.sleep(10)  # a watchdog would have ended it by now
    bench.check(victim.alive, "the process was ended")
    bench.check(victim.call(_pid) == victim.pid, "the process does not answer any more")
    victim.kill()
    bench.saw(free_before=free)


def _wait_endlessly(here: Here, address: Address) -> tuple[str, float]:
    with nccl_waits.communicator(here, address, "endless", 0, 1) as (group, store):
        group.connect(store)
        buffer = torch.zeros(MIB, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize(DEVICE)
        torch.cuda._sleep(1 << 41)  # cycles: about twenty minutes
        pending = group.broadcast(buffer, 0)
        here.kept["pending"] = (buffer, pending)
        group.timeout_s = 3.0
        found = nccl_waits.outcome(pending.wait)
        group.abort()
        return found


def _pid(here: Here) -> int:
    return os.getpid()


ITEMS = (
    Item(11, "NCCL alone", "a communicator of one rank connects, carries 3 GiB, aborts, from threads too", alone),
    Item(12, "NCCL with a GPU twice", "an error in seconds on both ranks, which go on", twice),
    Item(12, "NCCL with a rank stopped", "an error at the deadline on the other rank, which goes on", stopped),
    Item(13, "watchdog", "a wait for an endless kernel ends at its deadline; nothing ends the process", endless),
    Item(13, "NCCL wait is aborted", "one thread waits, one aborts, a third goes on meanwhile", nccl_waits.aborted),
    Item(
        13,
        "NCCL waits to connect",
        "ends at its deadline and when aborted, and another thread goes on meanwhile",
        nccl_waits.unconnected,
    ),
)
