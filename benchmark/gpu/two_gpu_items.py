"""What needs two GPUs: peer access, and memory of a GPU that the reader does not see."""

from __future__ import annotations

import torch

from benchmark.gpu import nccl_waits, sharing
from benchmark.gpu.copy_items import copied
from benchmark.gpu.item import Bench, Item
from benchmark.gpu.nccl_items import join
from benchmark.gpu.peer import Here, everywhere
from benchmark.gpu.place import DEVICE, GIB, MIB, pattern, same_bytes, seconds_of
from sglang_reshard.memory.mapping import Handles
from sglang_reshard.protocol.session import LOOPBACK, Session


def unseen(bench: Bench) -> None:
    """Each process sees one GPU, and not the other's: the reader maps the other's memory on its own."""
    size = bench.place.pick(4 * GIB, MIB)
    producer = bench.peer("trainer rank on GPU 0", visible=("0", (0,)))
    consumer = bench.peer("engine rank on GPU 1", visible=("1", (1,)))
    near, far = producer.call(sharing.device_of), consumer.call(sharing.device_of)
    bench.saw(gpus=[near["uuid"], far["uuid"]])
    bench.check(near["uuid"] != far["uuid"], "both processes use one GPU")
    handles = producer.call(sharing.publish, [size], 1)
    free = producer.call(sharing.free)
    figures = consumer.call(_read, handles, size)
    bench.saw(**figures)
    bench.check(figures["right"], "the bytes of the other GPU were read wrong")
    context = free - producer.call(sharing.free)
    bench.saw(bytes_taken_on_the_producers_gpu=context)
    bench.check(context < 64 * MIB, f"the reader took {context:,} bytes of the other GPU: a context")


def _read(here: Here, handles: Handles, size: int) -> dict[str, float | bool]:
    sharing.open_handles(here, handles)
    there = sharing.bytes_of(here.kept["memory"], 0, size)
    own = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    copies = copied([(own, there)])
    seconds = seconds_of(copies.run, rounds=3)
    expected = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    pattern(1, expected)
    return {"right": same_bytes(own, expected), "seconds": seconds, "gb_per_s": size / seconds / 1e9}


def peer_access(bench: Bench) -> None:
    bench.enter()
    pairs = [(a, b) for a in range(torch.cuda.device_count()) for b in range(torch.cuda.device_count()) if a != b]
    access = {f"{a} to {b}": torch.cuda.can_device_access_peer(a, b) for a, b in pairs}
    bench.saw(**access)
    bench.check(all(access.values()), "some pairs of GPUs have no peer access; their ranks use p2p")


def two_ranks(bench: Bench) -> None:
    """The same as "NCCL with a GPU twice", with a GPU for each: now it must connect."""
    session = Session.host(LOOPBACK, 20.0)
    found = everywhere(nccl_waits.pair(bench), join, session.address, "two", 30.0, ranked=True)
    bench.saw(seconds=[seconds for _, seconds in found])
    bench.check(not any(error for error, _ in found), f"not connected: {found}")


ITEMS = (
    Item(20, "two GPUs: unseen memory", "memory of a GPU that is not visible is mapped on the reader's own", unseen, 2),
    Item(21, "two GPUs: peer access", "every pair can reach each other", peer_access, 2),
    Item(22, "two GPUs: NCCL", "two ranks connect in seconds", two_ranks, 2),
    Item(
        22,
        "two GPUs: NCCL with a peer stopped",
        "one thread waits for it, one aborts, a third goes on meanwhile",
        nccl_waits.stopped_peer,
        2,
    ),
    Item(22, "two GPUs: many broadcasts", "10,000 in the non-blocking mode, and none hangs", nccl_waits.many, 2),
    Item(
        22,
        "two GPUs: NCCL beside the trainer's own",
        "broadcasts and collectives of another thread end, though memory is allocated",
        nccl_waits.beside,
        2,
    ),
)
