"""Recorded programs of real loaders, executed from another process's memory.

The bytes of a tensor follow from its class, its number and their place in it, so that both processes can make them.
What the engine rank must hold is made by the copies of its loader from whole tensors, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch

from benchmark.gpu import recording
from benchmark.gpu.copy_items import GOAL, launches
from benchmark.gpu.item import Bench, Item
from benchmark.gpu.peer import Here
from benchmark.gpu.place import DEVICE, MIB, Place, pattern, same_bytes, seconds_of
from benchmark.gpu.recording import Recording
from sglang_reshard.landings.base import Landing
from sglang_reshard.landings.converting import converting
from sglang_reshard.layout.regions import Region
from sglang_reshard.memory.mapping import Handles, MemoryExporter, PeerMemory
from sglang_reshard.plan import TensorIndex
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.p2p.engine import P2pReceiver
from sglang_reshard.trace.program import Program

_HOST = "host"


_REHEARSED_BYTES, _REHEARSED_COPIES = 24 * MIB, 12


def part_of(found: Recording, place: Place) -> Recording:
    """Returns the recording; for a rehearsal the first copies that need few bytes on both sides."""
    if not place.rehearsed:
        return found
    sizes = {spec.name: spec.spec.nbytes for spec in found.layout.tensors}
    names, targets, nbytes = set[str](), set[str](), 0
    for copy in found.copies:
        numel, dtype = found.targets[copy.target]
        new = (0 if copy.source in names else sizes[copy.source]) + (
            0 if copy.target in targets else numel * getattr(torch, dtype).itemsize
        )
        if nbytes + new <= _REHEARSED_BYTES and len(names) < _REHEARSED_COPIES:
            names.add(copy.source)
            targets.add(copy.target)
            nbytes += new
    return msgspec.structs.replace(
        found,
        layout=msgspec.structs.replace(found.layout, tensors=tuple(t for t in found.layout.tensors if t.name in names)),
        targets={name: of for name, of in found.targets.items() if name in targets},
        copies=tuple(c for c in found.copies if c.source in names and c.target in targets),
    )


# -- the producer: all trainer ranks


def hold(here: Here, path: str) -> list[Handles]:
    """Allocates the shards of all trainer ranks, and exports them."""
    found = part_of(recording.load(Path(path)), here.place)
    index = TensorIndex.of(found.layout)
    ranks = range(found.layout.trainer_ranks)
    shards: list[list[torch.Tensor]] = [[torch.empty(0)] * len(found.layout.tensors) for _ in ranks]
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
    torch.cuda.synchronize(DEVICE)
    here.kept["shards"] = shards
    here.kept["exporters"] = [MemoryExporter(rank) for rank in ranks]
    return [exporter.export(of) for exporter, of in zip(here.kept["exporters"], shards, strict=True)]


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
    producer.start(hold, str(path))
    found = part_of(recording.load(path), bench.place)
    index = TensorIndex.of(found.layout)
    handles: list[Handles] = producer.result(timeout_s=50)
    bench.saw(
        program=f"{found.model}, {found.source} to {found.target}, engine rank {found.engine_rank}",
        layers=found.layers,
        source_bytes=index.nbytes,
        handles=sum(len(h.storages) for h in handles),
        shards=sum(len(h.shards) for h in handles),
    )
    begin = time.perf_counter()
    read_plan = found.read_plan(index, _HOST)
    planned = time.perf_counter()
    memory = {rank: PeerMemory(rank, handles[rank], DEVICE) for rank in read_plan.traffic()}
    mapped = time.perf_counter()
    bench.saw(reads=len(read_plan.copy_ids), plan_seconds=planned - begin, map_seconds=mapped - planned)
    program = found.program(DEVICE)
    reads = Reads(found.engine_rank, DEVICE, index, read_plan, converting(Landing(program), DEVICE, 64 << 20), memory)
    connecting = time.perf_counter()
    transport = P2pReceiver(reads, {}, None)  # which reads all from mapped memory
    torch.cuda.synchronize(DEVICE)
    connected = time.perf_counter()
    seconds = seconds_of(transport.move, rounds=7)
    nbytes = transport.traffic.received_bytes
    plain = torch.empty((2, max(1, nbytes)), dtype=torch.uint8, device=DEVICE)
    plain.fill_(1)
    limit = seconds_of(partial(plain[0].copy_, plain[1]), rounds=7)
    bench.saw(
        bytes=nbytes,
        connect_seconds=connected - connecting,
        seconds=seconds,
        one_copy_seconds=limit,
        ratio=seconds / limit,
        tb_per_s_both_ways=2 * nbytes / seconds / 1e12,
        launches=launches(bench.place, transport.move),
    )
    del plain
    if not bench.place.rehearsed:
        bench.check(seconds / limit <= GOAL, f"{seconds / limit:.2f} times a copy of its bytes; the goal is {GOAL}")
    wrong = _wrong(found, index, program)
    bench.saw(wrong=wrong[:10])
    bench.check(not wrong, f"{len(wrong)} of {len(program.targets)} storages have other bytes: {wrong[:3]}")
    del transport, reads
    for peer_memory in memory.values():
        peer_memory.close()


def _wrong(found: Recording, index: TensorIndex, program: Program) -> list[str]:
    """Returns the targets that do not have what the loader would have written."""
    expected = found.program(DEVICE)
    wholes: dict[int, torch.Tensor] = {}
    copies = sorted(found.copies, key=lambda c: int(index.class_of[index.index_of[c.source]]))
    for copy in copies:
        tensor = index.index_of[copy.source]
        number = int(index.class_of[tensor])
        if number not in wholes:
            wholes = {number: _whole(index, number)}  # one at a time: some are large
        values = _shifted(wholes[number][copy.region.slices()].contiguous(), tensor)
        copy.destination(expected.targets[copy.target]).copy_(values)
    return [name for name, target in program.targets.items() if not same_bytes(target, expected.targets[name])]


ITEMS = tuple(
    Item(
        18, f"replay of {name}", f"every byte is right, within {GOAL} times a copy of the bytes", partial(replay, path)
    )
    for name, path in recording.recorded().items()
)
