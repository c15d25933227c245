"""What becomes of a reader whose trainer dies, or frees what is being read."""

from __future__ import annotations

import time

import torch

from benchmark.gpu import sharing
from benchmark.gpu.copy_items import copied
from benchmark.gpu.item import Bench, Item
from benchmark.gpu.peer import Here, PeerFailed
from benchmark.gpu.place import DEVICE, MIB, free_bytes


def killed(bench: Bench) -> None:
    size = bench.place.scaled(1024 * MIB)
    producer, consumer = bench.peer("producer"), bench.peer("consumer")
    watcher = bench.peer("watcher")
    consumer.call(sharing.ready)
    before = watcher.call(sharing.ready)
    handles = producer.call(sharing.publish, [size], 1)
    consumer.call(sharing.open_handles, handles)
    consumer.start(_read_for, size, 2.0)
    time.sleep(0.7)
    producer.kill()
    rounds = consumer.result()
    bench.saw(rounds_read=rounds)
    right = consumer.call(sharing.reads, [size], 1)
    bench.saw(memory_outlives_its_producer=right)
    consumer.call(sharing.close)
    bench.check(consumer.call(sharing.computes), "the consumer cannot use its GPU any more")
    held = before - watcher.call(sharing.free)
    bench.saw(held_after_both_have_let_go=held)
    bench.check(held < size // 2, f"{held:,} bytes are held though the producer is dead and the consumer has let go")


def _read_for(here: Here, size: int, seconds: float) -> int:
    """Copies the mapping again and again. Returns how often."""
    own = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    copies = copied([(own, sharing.bytes_of(here.kept["memory"], 0, size))])
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        copies.run()
        rounds += 1
        if rounds % 32 == 0:
            torch.cuda.synchronize(DEVICE)
    torch.cuda.synchronize(DEVICE)
    return rounds


def freed(bench: Bench) -> None:
    """CUDA promises nothing to a reader of freed memory. What happens is only looked at; the reader must live."""
    size = bench.place.scaled(256 * MIB)
    producer, consumer = bench.peer("producer"), bench.peer("consumer")
    consumer.call(sharing.ready)
    handles = producer.call(sharing.publish, [size], 1)
    consumer.call(sharing.open_handles, handles)
    before = producer.call(sharing.free)
    after = producer.call(sharing.drop)
    bench.saw(bytes_free_while_mapped=after - before)
    try:
        bench.saw(reads_the_old_bytes=consumer.call(sharing.reads, [size], 1))
    except PeerFailed as error:
        bench.saw(error=str(error).splitlines()[-1])
    producer.call(_overwrite, size)
    try:
        bench.saw(reads_the_old_bytes_after_others_were_written=consumer.call(sharing.reads, [size], 1))
    except PeerFailed as error:
        bench.saw(error=str(error).splitlines()[-1])
    consumer.call(sharing.close)
    bench.check(consumer.call(sharing.computes), "the consumer cannot use its GPU any more")


def _overwrite(here: Here, size: int) -> int:
    for _ in range(4):
        other = torch.full((size,), 7, dtype=torch.uint8, device=DEVICE)
        del other
    return free_bytes()


ITEMS = (
    Item(10, "producer killed", "a reader in mid-copy lives, and the memory is free once it has let go", killed),
    Item(10, "freed while mapped", "whatever it reads, the reader lives", freed),
)
