"""Handles of GPU memory: how long they live, who can open them, which memory has none."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmark.gpu import sharing
from benchmark.gpu.item import Bench, Item
from benchmark.gpu.peer import Here
from benchmark.gpu.place import DEVICE, MIB, free_bytes, room
from sglang_reshard.errors import ReshardError
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.memory.mapping import Handles, MemoryExporter

_MANY_S = 25.0
_SLACK = 16 * MIB  # kernels that are loaded late, tables of the driver


def life(bench: Bench) -> None:
    size, number = bench.place.scaled(256 * MIB), 0
    slack = min(_SLACK, size // 2)
    openers = [bench.peer(f"opener {i}") for i in range(4)]
    victim = bench.peer("opener that is killed")
    bench.enter()
    for peer in (*openers, victim):
        peer.call(sharing.ready)
    sharing.ready(bench.here)
    for count in (0, 1, 2, 4):
        before, number = sharing.free(bench.here), number + 1
        handles = sharing.publish(bench.here, [size], number)
        for peer in openers[:count]:
            peer.call(sharing.open_handles, handles)
            bench.check(peer.call(sharing.reads, [size], number), f"{peer.place.name} of {count} read other bytes")
        for peer in openers[:count]:
            peer.call(sharing.close)
        held = before - sharing.drop(bench.here)
        bench.saw(**{f"held_after_{count}_openers": held})
        bench.check(held < slack, f"{held:,} bytes are held after {count} openers have let go")
    handles = sharing.publish(bench.here, [size], number)
    victim.call(sharing.open_handles, handles)
    victim.kill()
    before = sharing.free(bench.here)  # the victim's context is gone
    held = size - (sharing.drop(bench.here) - before)
    bench.saw(held_after_a_killed_opener=held)
    bench.check(held < slack, f"{held:,} bytes are held after an opener was killed")
    _identities(bench, size)


def _identities(bench: Bench, size: int) -> None:
    """Memory that is freed and allocated again: is it at the same address, with another id?"""
    seen = []
    for _ in range(4):
        memory = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        seen.append(runtime().allocation(memory.data_ptr(), DEVICE))
        del memory
        free_bytes()
    bench.saw(addresses=len({found.base for found in seen}), ids=len({found.id for found in seen}))
    bench.check(len({found.id for found in seen}) == len(seen), "an id of an allocation recurs")


def many(bench: Bench) -> None:
    wanted = [bench.place.scaled(2 * MIB + (i % 4) * 9 * MIB) + 512 * (i % 7) for i in range(400)]
    rounds = bench.place.pick(50, 5)
    opener = bench.peer("opener")
    bench.enter()
    opener.call(sharing.ready)
    sharing.ready(bench.here)
    most, totals = room() // 2, itertools.accumulate(wanted)
    sizes = wanted[: bench.fitted("storages", len(wanted), sum(total < most for total in totals))]
    exports, opens, free = [], [], []
    end = time.monotonic() + _MANY_S
    for number in range(rounds):
        if time.monotonic() > end and number > 3:
            break
        begin = time.perf_counter()
        shards = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
        bench.here.kept["shards"] = shards
        shards[-1].fill_(number)
        allocated = time.perf_counter()
        handles = sharing.export(bench.here)
        exports.append(time.perf_counter() - allocated)
        if not number:
            bench.saw(
                bytes=sum(sizes),
                handles=len(handles.storages),
                allocate_seconds=allocated - begin,
                first_export_seconds=exports[0],
            )
        opens.append(opener.call(sharing.open_handles, handles))
        last = opener.call(_first_byte_of_last, len(sizes) - 1, sizes[-1])
        bench.check(last == number, f"round {number}: read {last}")
        opener.call(sharing.close)
        del shards
        free.append(sharing.drop(bench.here))
    bench.saw(
        rounds=len(opens),
        export_seconds=sorted(exports)[len(exports) // 2],
        open_seconds=sorted(opens)[len(opens) // 2],
        first_open_seconds=opens[0],
        lost_bytes=free[1] - free[-1],
    )
    bench.check(free[1] - free[-1] < 4 * MIB, f"{free[1] - free[-1]:,} bytes were lost in {len(free) - 2} rounds")


def _first_byte_of_last(here: Here, tensor: int, size: int) -> int:
    return int(sharing.bytes_of(here.kept["memory"], tensor, size)[0])


def visibility(bench: Bench) -> None:
    size = bench.place.scaled(64 * MIB)
    probe = bench.peer("probe")
    uuid = probe.call(sharing.device_of)["uuid"]
    plain = "GPU-" + uuid.removeprefix("GPU-")
    forms: dict[str, tuple[str, tuple[int, ...]] | None] = {
        "by UUID": (plain, (0,)),
        "by index": ("0", (0,)),
        "by default": None,
    }
    peers = {form: bench.peer(f"opener that sees its GPU {form}", visible=visible) for form, visible in forms.items()}
    bench.enter()
    handles = sharing.publish(bench.here, [size], 1)
    for form, peer in peers.items():
        found = peer.call(sharing.device_of)
        bench.saw(**{form: found["visible"]})
        bench.check(found["uuid"] == uuid, f"seen {form}, the GPU is {found['uuid']}, and {uuid} to others")
        peer.call(sharing.open_handles, handles)
        bench.check(peer.call(sharing.reads, [size], 1), f"the opener that sees its GPU {form} read other bytes")


def kinds(bench: Bench) -> None:
    size = bench.place.scaled(64 * MIB)
    producers = {
        kind: bench.peer(f"producer with {kind}", allocator=kind, fresh=True)
        for kind in ("expandable_segments", "cudaMallocAsync")
    }
    producers["MemPool"] = bench.peer("producer with a MemPool")
    opener = bench.peer("opener")
    for kind in ("expandable_segments", "cudaMallocAsync"):
        refusal = producers[kind].call(_try_to_publish, size)
        bench.saw(**{kind: refusal or "exported"})
        bench.check("p2p" in refusal, f"memory of {kind} was not refused with the cure: {refusal!r}")
    if bench.place.rehearsed:
        return
    handles = producers["MemPool"].call(_publish_from_pool, size)  # cudaMalloc of its own: like any other
    opener.call(sharing.open_handles, handles)
    bench.saw(MemPool="exported")
    bench.check(opener.call(sharing.reads, [size], 3), "memory of a MemPool was read wrong")


def _try_to_publish(here: Here, size: int) -> str:
    return _refusal(lambda: sharing.publish(here, [size], 2))


def _publish_from_pool(here: Here, size: int) -> Any:
    pool = torch.cuda.MemPool()
    here.kept["pool"] = pool
    with torch.cuda.use_mem_pool(pool):
        return sharing.publish(here, [size], 3)


def resized(bench: Bench) -> None:
    """As verl's Megatron workers offload: storages are resized to nothing and back, and stay the same objects."""
    size = bench.place.scaled(64 * MIB)
    opener = bench.peer("opener")
    bench.enter()
    opener.call(sharing.ready)
    old = sharing.publish(bench.here, [size], 1)
    before = runtime().allocation(bench.here.kept["shards"][0].data_ptr(), DEVICE)
    opener.call(sharing.open_handles, old)
    bench.check(opener.call(sharing.reads, [size], 1), "the first pattern was read wrong")
    opener.call(sharing.close)
    _reallocate(bench, size)
    sharing.refill(bench.here, 2)
    after = runtime().allocation(bench.here.kept["shards"][0].data_ptr(), DEVICE)
    new = sharing.export(bench.here)
    bench.saw(same_address=before.base == after.base, same_id=before.id == after.id, same_handles=old == new)
    bench.check(before.id == after.id or old != new, "re-allocated memory was announced by the old handles")
    opener.call(sharing.open_handles, new)
    bench.check(opener.call(sharing.reads, [size], 2), "the second pattern was read wrong: old weights would serve")


def _reallocate(bench: Bench, size: int) -> None:
    if bench.place.rehearsed:  # virtual memory cannot be resized
        sharing.drop(bench.here)
        bench.here.kept["shards"] = [torch.empty(size, dtype=torch.uint8, device=DEVICE)]
        return
    storage = bench.here.kept["shards"][0].untyped_storage()
    storage.resize_(0)
    free_bytes()
    storage.resize_(size)


def without_handles(bench: Bench) -> None:
    """Memory that has no handle of this process's is refused by name, and what has one still works."""
    size = bench.place.scaled(64 * MIB)
    opener = bench.peer("opener")
    bench.enter()
    handles = sharing.publish(bench.here, [size], 1)
    refusal = opener.call(_export_mapped, handles, size)
    bench.saw(mapped_from_another_process=refusal)
    bench.check(bool(refusal), "memory that belongs to another process was exported")
    if not bench.place.rehearsed:
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        storage = runtime().storage(pinned.data_ptr(), size, DEVICE)
        seen = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(storage, 0, (size,), (1,))
        refusal = _refused([seen])
        bench.saw(pinned_host_memory_on_the_gpu=refusal)
        bench.check(bool(refusal), "pinned host memory was exported as GPU memory")
        del seen
        empty = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        empty.untyped_storage().resize_(0)
        refusal = _refused([empty])
        bench.saw(freed=refusal)
        bench.check(bool(refusal), "a storage without memory was exported")
    torch.cuda.synchronize(DEVICE)
    bench.check(opener.call(sharing.reads, [size], 1), "the mapping was lost")


def _export_mapped(here: Here, handles: Any, size: int) -> str:
    sharing.open_handles(here, handles)
    return _refused([sharing.bytes_of(here.kept["memory"], 0, size)])


def _refused(shards: list[torch.Tensor]) -> str:
    return _refusal(lambda: MemoryExporter(1).export(shards))


def _refusal(export: Callable[[], Handles]) -> str:
    """Returns why an export is refused; empty if it is not."""
    try:
        handles = export()
    except ReshardError as error:
        return str(error)
    return str(handles.reason)


ITEMS = (
    Item(1, "handle life", "memory is free again after 0, 1, 2 and 4 openers, and a killed one; ids never recur", life),
    Item(2, "many storages", "400 storages are exported and mapped in milliseconds; 50 rounds lose nothing", many),
    Item(3, "visibility", "a handle opens whichever way its GPU is visible, and the UUID is the same", visibility),
    Item(4, "kinds of memory", "expandable segments and cudaMallocAsync are refused with the cure", kinds),
    Item(5, "resized storages", "memory that is freed and allocated in place is announced anew and read anew", resized),
    Item(14, "memory without handles", "what cannot be exported is refused by reason", without_handles),
)  # fmt: skip
