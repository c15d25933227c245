"""Recorded programs of real loaders, executed from another process's memory.

The bytes of a tensor follow from its class, its number and their place in it, so that both processes can make them.
What the engine rank must hold is made by the copies of its loader from whole tensors, one after the other. A card that
has no room for the whole model holds its first tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmark.gpu import recording, sharing
from benchmark.gpu.copy_items import copied
from benchmark.gpu.item import Bench, Item
from benchmark.gpu.peer import Here
from benchmark.gpu.place import DEVICE, free_bytes, pattern, room, same_bytes, seconds_of
from benchmark.gpu.rate_items import GOAL, judge, launches
from benchmark.gpu.recording import Recording
from sglang_reshard.landings.base import Landing
from sglang_reshard.layout.regions import Region
from sglang_reshard.memory.mapping import Handles, MemoryExporter
from sglang_reshard.memory.peer_memory import PeerMemory, ShardRead
from sglang_reshard.plan import ReadPlan, TensorIndex
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.ipc import DirectReads, mapped_reads, read_targets
from sglang_reshard.routes.strategy import shard_reads
from sglang_reshard.trace.program import Copy, Program

_HOST = "host"
_LIMIT_S = 90.0
_REHEARSED_COPIES = 16
_MAP_S = 20.0  # for all handles


def part_of(found: Recording, most: int, copies: int) -> Recording:
    """Returns the recording, or the first of its copies for which `most` bytes have room on both sides.

    most    bytes for shards and storages, with what torch's allocator rounds up, and for tensors to compare with
    copies  at most
    """
    held = {spec.name: spec.spec.nbytes for spec in found.layout.tensors}
    live = {name: numel * getattr(torch, dtype).itemsize for name, (numel, dtype) in found.targets.items()}
    names, targets, nbytes, compared = set[str](), set[str](), 0, 0
    for copy in found.copies:
        new = [held[copy.source]] * (copy.source not in names) + [live[copy.target]] * (copy.target not in targets)
        grown = nbytes + sum(new), max(compared, held[copy.source] + 3 * live[copy.target])
        if grown[0] * 17 // 16 + grown[1] <= most and len(names) < copies:
            names.add(copy.source)
            targets.add(copy.target)
            nbytes, compared = grown
    return msgspec.structs.replace(
        found,
        layout=msgspec.structs.replace(found.layout, tensors=tuple(t for t in found.layout.tensors if t.name in names)),
        targets={name: of for name, of in found.targets.items() if name in targets},
        copies=tuple(c for c in found.copies if c.source in names and c.target in targets),
    )


# -- the producer: all trainer ranks


def hold(here: Here, path: str, most: int, copies: int) -> list[Handles]:
    """Allocates the shards of all trainer ranks, and exports them; see `part_of`."""
    sharing.drop(here)
    found = part_of(recording.load(Path(path)), most, copies)
    here.kept["shards"] = shards = _shards(TensorIndex.of(found.layout))
    free_bytes()  # of the tensors that shards were made of
    here.kept["exporters"] = [MemoryExporter(rank) for rank in range(len(shards))]
    return [exporter.export(of) for exporter, of in zip(here.kept["exporters"], shards, strict=True)]


def _shards(index: TensorIndex) -> list[list[torch.Tensor]]:
    """Returns the shards of each trainer rank, by tensor."""
    ranks = range(index.layout.trainer_ranks)
    shards: list[list[torch.Tensor]] = [[torch.empty(0)] * len(index.layout.tensors) for _ in ranks]
    for number, tensors in _by_class(index):
        of, whole = index.classes[number], _whole(index, number)
        for rank in ranks:
            shape = of.shard_map.min_local_shape(rank)
            if shape is None:
                empty = torch.empty(0, dtype=whole.dtype, device=DEVICE)
                for tensor in tensors:
                    shards[rank][tensor] = empty
                continue
            local = torch.empty(shape, dtype=whole.dtype, device=DEVICE)
            for shard in of.shard_map.shards_of(rank):
                of.shard_map.to_local(shard, Region.of(shard.box)).view(local)[...] = whole[shard.box.slices()]
            for tensor in tensors:
                shards[rank][tensor] = _shifted(local, tensor)
    return shards


def _by_class(index: TensorIndex) -> Iterator[tuple[int, list[int]]]:
    for number in range(len(index.classes)):
        yield number, (index.class_of == number).nonzero()[0].tolist()


def _whole(index: TensorIndex, number: int) -> torch.Tensor:
    """Returns the bytes that all tensors of a class have, before they are shifted by their own numbers."""
    of = index.classes[number]
    whole = torch.empty(of.shape, dtype=getattr(torch, of.dtype), device=DEVICE)
    pattern(number, whole)
    return whole


def _shifted(base: torch.Tensor, tensor: int) -> torch.Tensor:
    made = torch.empty(base.shape, dtype=base.dtype, device=DEVICE)
    torch.add(base.view(-1).view(torch.uint8), tensor % 251, out=made.view(-1).view(torch.uint8))
    return made


# -- the engine rank


def replay(path: Path, bench: Bench) -> None:
    producer = bench.peer("trainer ranks")
    bench.enter()
    producer.call(sharing.ready)
    whole = recording.load(path)
    most, copies = room(), bench.place.pick(len(whole.copies), _REHEARSED_COPIES)
    for within_s in (_MAP_S, math.inf):
        found = part_of(whole, most, copies)
        handles: list[Handles] = producer.call(hold, str(path), most, copies)
        index = TensorIndex.of(found.layout)
        begin = time.perf_counter()
        read_plan = found.read_plan(index, _HOST)
        planned = time.perf_counter()
        memory, part = _mapped(handles, _read(read_plan, index), within_s)
        if part >= 1:
            break
        most = int(most * part)  # so much can be mapped in time
    mapped = time.perf_counter()
    program = found.program(DEVICE)
    landing = Landing(program).converting(DEVICE, 64 << 20)
    bench.saw(
        program=f"{found.model}, {found.source} to {found.target}, engine rank {found.engine_rank}",
        layers=found.layers,
        source_bytes=index.nbytes,
        source_bytes_of_the_model=TensorIndex.of(whole.layout).nbytes,
        handles=sum(len(h.storages) for h in handles),
        shards=sum(len(h.shards) for h in handles),
        plan_seconds=planned - begin,
        map_seconds=mapped - planned,
    )
    _move(bench, found, Reads(found.engine_rank, DEVICE, index, read_plan, landing, memory), program)
    for peer_memory in memory.values():
        peer_memory.close()


def _read(plan: ReadPlan, index: TensorIndex) -> dict[int, list[ShardRead]]:
    """Returns trainer rank -> what the engine rank reads of its memory."""
    return {t: shard_reads(plan, index, np.array(plan.reads_from(t))) for t in plan.traffic()}


def _mapped(
    handles: list[Handles], read: Mapping[int, list[ShardRead]], within_s: float
) -> tuple[dict[int, PeerMemory], float]:
    """Maps what is read of trainer ranks' memory. If that takes too long, maps none, and says which part would not."""
    memory, begin = dict[int, PeerMemory](), time.perf_counter()
    for rank, of_rank in read.items():
        memory[rank] = PeerMemory(rank, handles[rank], DEVICE, of_rank)
        expected = (time.perf_counter() - begin) / len(memory) * len(read)
        if expected > within_s:
            for opened in memory.values():
                opened.close()
            return {}, within_s / expected
    return memory, 1.0


def _move(bench: Bench, found: Recording, reads: Reads, program: Program) -> None:
    connecting = time.perf_counter()
    numbers = mapped_reads(reads)
    reads.landing.place([], read_targets(reads.read_plan, numbers))
    copies = DirectReads(reads, numbers)

    def move() -> None:
        copies.run()
        copies.finish_from(0)

    torch.cuda.synchronize(DEVICE)
    connected = time.perf_counter()
    seconds = seconds_of(move, rounds=7)
    nbytes = sum(copies.read_bytes.values())
    bench.saw(
        bytes=nbytes,
        reads=len(reads.read_plan.copy_ids),
        connect_seconds=connected - connecting,
        seconds=seconds,
        tb_per_s_both_ways=2 * nbytes / seconds / 1e12,
        launches=launches(bench.place, move),
    )
    compared = bench.fitted("one_copy_bytes", nbytes, room() // 2)
    plain = torch.empty((2, max(1, compared)), dtype=torch.uint8, device=DEVICE)
    plain.fill_(1)
    limit = seconds_of(partial(plain[0].copy_, plain[1]), rounds=7) * nbytes / max(1, compared)
    launched = copied([(plain[0], plain[1])]).launches
    bench.saw(one_copy_seconds=limit, ratio=seconds / limit)
    judge(bench, launched, seconds / limit, GOAL, "the loader")
    del plain
    free_bytes()
    wrong = _wrong(found, reads.tensor_index, program)
    bench.saw(wrong=wrong[:10])
    bench.check(not wrong, f"{len(wrong)} of {len(program.targets)} storages have other bytes: {wrong[:3]}")


def _wrong(found: Recording, index: TensorIndex, program: Program) -> list[str]:
    """Returns the targets that do not have what the loader would have written. One is made at a time."""
    copies: dict[str, list[Copy]] = {}
    for copy in found.copies:
        copies.setdefault(copy.target, []).append(copy)
    most = max((of.spec.nbytes for of in found.layout.tensors), default=0)
    wholes: dict[int, torch.Tensor] = {}
    wrong = []
    for name, target in program.targets.items():
        expected = torch.zeros(target.shape, dtype=target.dtype, device=DEVICE)
        for copy in copies[name]:
            tensor = index.index_of[copy.source]
            number = int(index.class_of[tensor])
            if number not in wholes:
                if sum(of.nbytes for of in wholes.values()) + index.layout.tensors[tensor].spec.nbytes > most:
                    wholes.clear()
                wholes[number] = _whole(index, number)
            values = _shifted(wholes[number][copy.region.slices()].contiguous(), tensor)
            copy.destination(expected).copy_(values)
        if not same_bytes(target, expected):
            wrong.append(name)
    return wrong


ITEMS = tuple(
    Item(
        18,
        f"replay of {name}",
        f"every byte is right, within {GOAL} times a copy of the bytes",
        partial(replay, path),
        1,
        _LIMIT_S,
    )
    for name, path in recording.recorded().items()
)
