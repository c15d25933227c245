"""What other threads of a process do while one waits for NCCL: they go on, also while one aborts."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmark.gpu import sharing
from benchmark.gpu.item import Bench
from benchmark.gpu.peer import Here, Peer, everywhere
from benchmark.gpu.place import DEVICE, MIB
from sglang_reshard.control import Address
from sglang_reshard.errors import ReshardError
from sglang_reshard.protocol.session import LOOPBACK, Session
from sglang_reshard.routes.wire.communicator import Communicator, PendingOps

_STILL_S = 1.0  # a thread that ticks stands still for less than that
_TIMEOUT_S = 20.0
_LATE_S = 6.0
_BROADCASTS = 10_000


@contextlib.contextmanager
def ticking() -> Iterator[Callable[[], float]]:
    """A thread that wakes up all the time. Yields a call that returns for how many seconds it stood still at most."""
    longest, end = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not end.wait(0.005):
            now = time.monotonic()
            longest[0], last = max(longest[0], now - last), now
        longest[0] = max(longest[0], time.monotonic() - last)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    yield lambda: longest[0]
    end.set()
    thread.join()


@contextlib.contextmanager
def communicator(
    here: Here, address: Address, name: str, rank: int, size: int, timeout_s: float = _TIMEOUT_S
) -> Iterator[tuple[Communicator, dist.Store]]:
    """Yields one that is not connected, and its store."""
    session = here.kept["session"] = Session.join(address, _TIMEOUT_S)
    with session.trainer_channel(1, f"rank {rank}") as channel:
        made = here.kept[name] = _communicator(rank, size, timeout_s)
        yield made, dist.PrefixStore(name, session.store(0, _TIMEOUT_S, channel.scope))


def _communicator(rank: int, size: int, timeout_s: float) -> Communicator:
    options: dict[str, Any] = {"device": DEVICE, "timeout_s": timeout_s, "at_once": 2}
    return Communicator(range(size), peer_id=rank, trainer_ranks=0, **options)


def outcome(call: Callable[[], object]) -> tuple[str, float]:
    """Returns the error that a call raises, empty if there was none, and its seconds."""
    begin = time.perf_counter()
    try:
        call()
    except ReshardError as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - begin
    return "", time.perf_counter() - begin


def check_outcome(bench: Bench, what: str, found: tuple[str, float, float], until_s: float) -> None:
    error, seconds, still_s = found
    bench.saw(**{what: {"error": error, "seconds": seconds, "another_thread_stood_still_s": still_s}})
    bench.check(bool(error), "it ended without an error")
    bench.check(seconds < until_s + _LATE_S, f"it took {seconds:.0f} s, and was to end after {until_s:.0f} s")
    bench.check(still_s < _STILL_S, f"another thread of the process stood still for {still_s:.1f} s")


# -- one GPU


def aborted(bench: Bench) -> None:
    """One thread waits for a kernel that does not end, and another aborts."""
    session = Session.host(LOOPBACK, _TIMEOUT_S)
    waiting = bench.peer("rank that waits")
    check_outcome(bench, "wait", waiting.call(_abort_a_wait, session.address), 1.0)
    bench.check(waiting.alive, "the process was ended")
    waiting.kill()


def _abort_a_wait(here: Here, address: Address) -> tuple[str, float, float]:
    with communicator(here, address, "aborted", 0, 1) as (group, store), ticking() as still_s:
        group.connect(store)
        pending = _endless(here, group)
        threading.Timer(1.0, group.abort).start()
        error, seconds = outcome(pending.wait)
        time.sleep(2.0)  # the abort goes on
        return error, seconds, still_s()


def _endless(here: Here, group: Communicator) -> PendingOps:
    buffer = here.kept["buffer"] = torch.zeros(MIB, dtype=torch.uint8, device=DEVICE)
    if here.place.rehearsed:  # virtual GPUs have no endless kernels; a message that nobody sends does not come either
        ((_, work),) = group.perform("receive", lambda g: g.start("receive", [(0, buffer)]))
    else:
        torch.cuda.synchronize(DEVICE)
        torch.cuda._sleep(1 << 41)  # cycles: about twenty minutes
        work = group.perform("broadcast", lambda g: g.broadcast(buffer, 0))
    return PendingOps(group, "could not finish", [("could not finish", work)])


def unconnected(bench: Bench) -> None:
    """NCCL waits for a member that has come to the rendezvous, and no further."""
    session = Session.host(LOOPBACK, _TIMEOUT_S)
    for number, aborts in enumerate((True, False)):
        peer = bench.peer("rank that is aborted" if aborts else "rank with a deadline")
        found = peer.call(_connect_to_nobody, session.address, f"unconnected {number}", aborts)
        check_outcome(bench, "aborted" if aborts else "deadline", found, 2.0 if aborts else 6.0)
        bench.check(peer.alive, "the process was ended")
        peer.kill()


def _connect_to_nobody(here: Here, address: Address, name: str, aborts: bool) -> tuple[str, float, float]:
    timeout_s = _TIMEOUT_S if aborts else 6.0
    with communicator(here, address, name, 0, 2, timeout_s) as (group, store), ticking() as still_s:
        store.set("joined/1", "")
        store.set("ctas/1", "16")
        if store.add("entered", 1) == 2:
            store.set("all_entered", "")
        if aborts:
            threading.Timer(2.0, group.abort).start()
        error, seconds = outcome(lambda: group.connect(store))
        time.sleep(1.0)
        return error, seconds, still_s()


# -- two GPUs


def stopped_peer(bench: Bench) -> None:
    """One thread waits for a rank that was stopped, and another aborts."""
    session = Session.host(LOOPBACK, _TIMEOUT_S)
    waiting, stopping = ranks = pair(bench)
    everywhere(ranks, _connect, session.address, ranked=True)
    stopping.signal(signal.SIGSTOP)
    check_outcome(bench, "wait", waiting.call(_abort_a_broadcast), 1.0)
    stopping.signal(signal.SIGCONT)
    bench.check(waiting.call(sharing.computes), "the rank that waited cannot use its GPU any more")


def pair(bench: Bench) -> list[Peer]:
    """Two ranks, each of which sees a GPU of its own."""
    return [bench.peer(f"rank {number}", visible=(str(number), (number,))) for number in range(2)]


def _connect(here: Here, rank: int, address: Address) -> None:
    with communicator(here, address, "stopped peer", rank, 2) as (group, store):
        group.connect(store)


def _abort_a_broadcast(here: Here) -> tuple[str, float, float]:
    group = here.kept["stopped peer"]
    with ticking() as still_s:
        pending = group.broadcast(torch.zeros(MIB, dtype=torch.uint8, device=DEVICE), 1)
        threading.Timer(1.0, group.abort).start()
        error, seconds = outcome(pending.wait)
        time.sleep(2.0)
        return error, seconds, still_s()


def many(bench: Bench) -> None:
    """torch's default is NCCL's other mode since one of them hung at random (pytorch#153960)."""
    count = bench.place.pick(_BROADCASTS, 50)
    session = Session.host(LOOPBACK, _TIMEOUT_S)
    found = everywhere(pair(bench), _broadcast_many, session.address, count, ranked=True)
    bench.saw(broadcasts=count, seconds=[seconds for _, seconds in found])
    bench.check(not any(error for error, _ in found), f"a broadcast failed or hung: {found}")


def _broadcast_many(here: Here, rank: int, address: Address, count: int) -> tuple[str, float]:
    with communicator(here, address, "many", rank, 2) as (group, store):
        group.connect(store)
        return outcome(lambda: _broadcasts(group, count))


def _broadcasts(group: Communicator, count: int) -> None:
    """Two at a time, as in an update, of changing sizes."""
    buffers = [torch.zeros(2 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    pending: list[Any] = []
    for number in range(count):
        if len(pending) == len(buffers):
            pending.pop(0).wait()
        size = 1 << (number * 5 % 21)
        pending.append(group.broadcast(buffers[number % 2][:size], number % 2))
    for last in pending:
        last.wait()


def beside(bench: Bench) -> None:
    """Broadcasts while another thread of both processes runs collectives of its own and allocates memory."""
    count = bench.place.pick(1000, 20)
    session = Session.host(LOOPBACK, _TIMEOUT_S)
    ranks = pair(bench)
    found = everywhere(ranks, _broadcast_beside, session.address, count, ranked=True)
    bench.saw(outcomes=found, broadcasts=count)
    bench.check(not any(error for error, *_ in found), "the two waited for each other: an update would fail")
    for _, _, still_s, _ in found:
        bench.check(still_s < _STILL_S, f"another thread of the process stood still for {still_s:.1f} s")
    bench.check(all(peer.call(sharing.computes) for peer in ranks), "a rank cannot use its GPU any more")


def _broadcast_beside(here: Here, rank: int, address: Address, count: int) -> tuple[str, float, float, int]:
    """The error, seconds, how long a thread stood still, and how many collectives the other thread has run."""
    end, ran = threading.Event(), [0]
    with communicator(here, address, "beside", rank, 2) as (group, store), ticking() as still_s:
        collective, agreed = _collective_of_the_user(here, store, rank), dist.PrefixStore("rounds", store)
        group.connect(store)

        def compute() -> None:
            while _both_go_on(agreed, ran[0], rank, not end.is_set()):
                collective()
                torch.empty((ran[0] % 7 + 1) * MIB, dtype=torch.uint8, device=DEVICE)
                torch.cuda.empty_cache()  # cudaFree waits for all kernels of the GPU
                ran[0] += 1

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        error, seconds = outcome(lambda: _broadcasts(group, count))
        end.set()
        if error:
            group.abort()
        thread.join(10.0)
        return error, seconds, still_s(), ran[0]


def _both_go_on(store: dist.Store, number: int, rank: int, own: bool) -> bool:
    """Whether both threads run one more collective."""
    store.set(f"{number}/{rank}", str(int(own)))
    store.wait([f"{number}/{1 - rank}"], timedelta(seconds=_TIMEOUT_S))
    return own and store.get(f"{number}/{1 - rank}") == b"1"


def _collective_of_the_user(here: Here, store: dist.Store, rank: int) -> Callable[[], object]:
    if here.place.rehearsed:  # virtual NCCL has no all-reduce
        other = here.kept["other"] = _communicator(rank, 2, _TIMEOUT_S)
        other.connect(dist.PrefixStore("other", store))
        buffer = torch.zeros(1024, dtype=torch.uint8, device=DEVICE)
        return lambda: other.broadcast(buffer, 0).wait()
    made = dist.ProcessGroupNCCL(dist.PrefixStore("user", store), rank, 2, dist.ProcessGroupNCCL.Options())
    group: Any = here.kept.setdefault("user", made)
    summed = torch.ones(8 * MIB, device=DEVICE)

    def all_reduce() -> None:
        group.allreduce([summed]).wait()
        torch.cuda.synchronize(DEVICE)

    return all_reduce
