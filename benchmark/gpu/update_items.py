"""Whole updates: two trainer ranks and two engine ranks on one GPU."""

from __future__ import annotations

import time
from typing import Any

from benchmark.gpu.item import Bench, Item
from benchmark.gpu.peer import Here
from benchmark.gpu.place import MIB, room
from benchmark.gpu.world import Model, World

_SLACK = 8 * MIB
_UPDATES = 2  # of each way in a turn; the second one has nothing to plan
_LEAK_S = 35.0  # however fast the host's CPUs are
_FEWEST = 10  # updates, from which something lost would show
_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "verified": {"verify": "full"},
    "staged": {"staged": True},
    "unmapped": {"unmap_after": True},
}


def end_to_end(bench: Bench) -> None:
    hidden, most = bench.place.pick((4096, 12), (304, 2))
    layer = 3 * hidden * hidden * 16  # float32 here, bfloat16 there, live, staged and compared, and what is in between
    layers = bench.fitted("layers", most, bench.peer("watcher").call(_room) // layer)
    world = World(bench, Model(layers, hidden, trained="float32"))
    version, free = 0, list[int]()
    bench.saw(served_bytes=world.model.nbytes)
    with world.session() as engines:
        for way, options in (*_WAYS.items(), *_WAYS.items()):  # what is loaded late, is loaded in the first turn
            seen = []
            for _ in range(_UPDATES):
                version += 1
                world.become(version)
                seen.append(world.update(version, **options))
                free.append(world.free_bytes())
            last = seen[-1]
            bench.saw(
                **{
                    way: {
                        "transport": last["transport"],
                        "first_seconds": seen[0]["seconds"],
                        "seconds": last["seconds"],
                        "phases": last["phases"],
                        "peak_extra": max(s["peak_extra"] for s in seen),
                    }
                }
            )
            bench.check(last["transport"] == "ipc", f"{way}: went by {last['transport']}: {last['reason']}")
            excess = last["received"] - last["least"]
            bench.check(excess == 0, f"{way}: {excess:,} bytes more than needed were received")
    _check(bench, engines)
    half = len(free) // 2
    lost = free[half - 1] - free[-1]  # in the second turn
    bench.check(lost < _SLACK, f"{lost:,} bytes were lost in {half} updates")
    bench.saw(allocator_peak=max(engine["allocator_peak"] for engine in engines), free=free)


def _room(here: Here) -> int:
    return room()


def leak(bench: Bench) -> None:
    """Shards are freed and allocated anew before each update, as a trainer that offloads does."""
    hidden, layers = bench.place.pick((1024, 8), (16, 1))
    updates = bench.place.pick(1000, 12)
    world = World(bench, Model(layers, hidden))
    end = time.monotonic() + _LEAK_S
    seconds, free = list[float](), list[int]()
    with world.session(check_every=updates // 10 or 1) as engines:
        for version in range(1, updates + 1):
            world.become(version, anew=True)
            seconds.append(world.update(version, unmap_after=True)["seconds"])
            free.append(world.free_bytes())
            if time.monotonic() > end:
                break
    _check(bench, engines)
    lost = free[len(free) // 5] - free[-1]
    bench.saw(updates=len(seconds), median_seconds=sorted(seconds)[len(seconds) // 2], lost_bytes=lost)
    bench.check(lost < _SLACK, f"{lost:,} bytes were lost in {len(seconds)} updates")
    bench.check(len(seconds) >= _FEWEST, f"only {len(seconds)} updates in {_LEAK_S:.0f} s")


def _check(bench: Bench, engines: list[dict[str, Any]]) -> None:
    for rank, engine in enumerate(engines):
        bench.check(not engine["failed"], f"engine rank {rank} refused: {engine['failed'][:1]}")
        bench.check(not engine["wrong"], f"engine rank {rank} has other bits: {engine['wrong'][:3]}")


ITEMS = (
    Item(
        9, "end to end", "plain, verified, staged and unmapped updates: bit-exact, by ipc, with flat memory", end_to_end
    ),
    Item(19, "leak", "up to 1,000 updates with other memory in each lose nothing", leak),
)
