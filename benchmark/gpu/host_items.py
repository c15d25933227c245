"""Streams, and host memory that kernels read: what staged landing and offloaded trainers rest on."""

from __future__ import annotations

import threading
import time
from functools import partial

import psutil
import torch

from benchmark.gpu import sharing
from benchmark.gpu.copy_items import copied
from benchmark.gpu.item import Bench, Item, Skip
from benchmark.gpu.peer import Here
from benchmark.gpu.place import DEVICE, GIB, MIB, pattern, room, same_bytes, seconds_of
from benchmark.gpu.rate_items import judge
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.memory.mapping import Handles, MemoryExporter

_STREAMS_S = 25.0


def streams(bench: Bench) -> None:
    """A thread copies in its own stream what the default one has just begun to write; then the default one goes on."""
    bench.enter()
    numel, rounds = bench.place.scaled(8 * MIB), bench.place.pick(1000, 10)
    source, shadow, live = (torch.zeros(numel, dtype=torch.int32, device=DEVICE) for _ in range(3))
    slow = torch.zeros(numel * 4, dtype=torch.float32, device=DEVICE)
    wrong = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    landing, commit = copied([(shadow, source)]), copied([(live, shadow)])
    failed: list[str] = []

    def land() -> None:
        try:
            with runtime().own_stream(DEVICE):
                landing.run()
                scratch = torch.empty(numel, dtype=torch.int32, device=DEVICE)  # freed under its kernel, if it may be
                scratch.fill_(-1)
                del scratch
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")

    begin = time.perf_counter()
    for number in range(1, rounds + 1):
        slow.add_(1.0)  # so that the source is still being written when the thread begins
        source.fill_(number)
        thread = threading.Thread(target=land)
        thread.start()
        thread.join()
        commit.run()
        wrong.add_((live != number).sum())
        if time.perf_counter() - begin > _STREAMS_S:
            break
    torch.cuda.synchronize(DEVICE)
    bench.saw(rounds=number, wrong_elements=int(wrong), seconds=time.perf_counter() - begin)
    bench.check(not failed, f"{failed[:1]}")
    bench.check(int(wrong) == 0, f"{int(wrong):,} elements were not those of their round")


# -- 17: offloaded shards


def arena(bench: Bench) -> None:
    producer = bench.peer("trainer that has offloaded")
    bench.enter()
    producer.call(sharing.ready)
    in_shared_memory = psutil.disk_usage("/dev/shm").free // 2
    in_memory = psutil.virtual_memory().available // 8  # pinned here and twice there, and the arena
    wanted = bench.place.scaled(4 * GIB)
    size = bench.fitted("bytes", wanted, min(in_shared_memory, in_memory, room() // 4) // MIB * MIB)
    if not size:
        raise Skip("/dev/shm is too small; docker: --shm-size")
    handles, seconds, pinned = producer.call(offload, size, 1, not bench.place.rehearsed)
    bench.saw(pinned=pinned, first_export_seconds=seconds)
    bench.check(not handles.reason, f"offloaded shards have no handles: {handles.reason}")
    begin = time.perf_counter()
    memory = sharing.mapped(handles)
    bench.saw(map_and_register_seconds=time.perf_counter() - begin)
    there = sharing.bytes_of(memory, 0, size)
    bench.saw(mapped_on=str(there.device), reachable=runtime().reachable_by_kernels(there, DEVICE))
    own = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    expected = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    copies = copied([(own, there)])
    copies.run()
    pattern(1, expected)
    bench.check(same_bytes(own, expected), "the first bytes were read wrong")
    again, seconds, _ = producer.call(offload, size, 2, not bench.place.rehearsed)
    bench.saw(export_seconds=seconds, export_gb_per_s=size / seconds / 1e9)
    bench.check(again == handles, "the handles changed, so that all is mapped and registered again")
    kernel = seconds_of(copies.run, rounds=3)
    pattern(2, expected)
    bench.check(same_bytes(own, expected), "the second bytes were read wrong")
    copy = seconds_of(partial(own.copy_, there), rounds=3)
    figures = {"kernel": kernel, "torch_copy_of_mapping": copy}
    if not bench.place.rehearsed:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        figures["torch_copy_of_pinned"] = seconds_of(partial(own.copy_, host, non_blocking=True), rounds=3)
        judge(bench, copies.launches, kernel / figures["torch_copy_of_pinned"], 2.0, "beside cudaMemcpy")
    bench.saw(**{f"{name}_gb_per_s": size / seconds / 1e9 for name, seconds in figures.items()})
    del there, copies
    torch.cuda.synchronize(DEVICE)
    memory.close()


def offload(here: Here, size: int, number: int, pin: bool) -> tuple[Handles, float, bool]:
    """Puts shards of a version in other host memory than the last one's, and exports them."""
    shard = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    on_gpu = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    pattern(number, on_gpu)
    shard.copy_(on_gpu)
    here.kept["offloaded"] = shard
    exporter = here.kept.setdefault("exporter", MemoryExporter(sharing.PRODUCER))
    torch.cuda.synchronize(DEVICE)
    begin = time.perf_counter()
    exporter.begin_update()
    handles = exporter.export([shard])
    return handles, time.perf_counter() - begin, runtime().is_pinned(shard)


ITEMS = (
    Item(
        16,
        "streams",
        "up to 1,000 rounds of a stream beside the default one, each with the bytes of its round",
        streams,
    ),
    Item(17, "host arena", "offloaded shards are read by kernels from the same mapping, as fast as cudaMemcpy", arena),
)
