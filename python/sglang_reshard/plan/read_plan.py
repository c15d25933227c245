"""Plans what one engine rank reads: the regions of trainer ranks' local tensors and their destinations, exact to the
element.

An engine rank plans for itself, from its own copies alone. The work is done once per distinct copy (same tensor class,
same region, same destination strides) and expanded to its instances by numpy, so that one rank of a model of a hundred
thousand tensors is planned in seconds. Engine ranks then share a `RankDemand` each, to plan together.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.layout.decoders import inflate
from sglang_reshard.layout.regions import Box, LocalRegion, Region
from sglang_reshard.layout.shard_map import ShardBox
from sglang_reshard.plan.tensor_index import TensorClass, TensorIndex

if TYPE_CHECKING:  # trainer ranks load no tracer
    from sglang_reshard.trace.program import Copy

_NO_GPU = RankGpuInfo()
_ITEM_BITS, _COPY_BITS = 20, 26  # of a sort key, next to 17 for the trainer rank


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The place where an engine rank runs. Hosts are equal if their processes can map each other's memory.

    engine_ranks  number of engine ranks
    device        its GPU, and those of the trainer ranks; none for trainer ranks without GPUs
    unreadable    trainer ranks on this host whose memory it cannot map
    """

    engine_rank: int
    engine_ranks: int
    host: str
    trainer_hosts: tuple[str, ...]
    device: RankGpuInfo = _NO_GPU
    trainer_devices: tuple[RankGpuInfo, ...] = ()
    unreadable: Collection[int] = ()

    def distance(self, trainer_ranks: Sequence[int]) -> int:
        """Returns 0 if one of them can be read, 1 and 2 if it can send from this host or another, 3 for neither."""
        return min(map(self._distance, trainer_ranks))

    def nearest(self, trainer_ranks: Sequence[int]) -> tuple[int, ...]:
        """Returns those at the least distance, starting at this rank's relative position."""
        least = self.distance(trainer_ranks)
        near = [t for t in trainer_ranks if self._distance(t) == least]
        begin = self.engine_rank * len(near) // self.engine_ranks
        return tuple(near[begin:] + near[:begin])

    def _distance(self, trainer_rank: int) -> int:
        local = self.trainer_hosts[trainer_rank] == self.host
        if local and trainer_rank not in self.unreadable:
            return 0
        gpu = self.device.uuid
        same_gpu = bool(gpu and self.trainer_devices) and self.trainer_devices[trainer_rank].uuid == gpu
        return 3 if same_gpu else 1 if local else 2


class ReadItem(NamedTuple):
    """The part of a copy that lies in one shard.

    shard         number of the shard within its tensor
    local_region  the elements in the holder's local tensor
    offset        where they go, in elements from the copy's own offset
    nbytes        in the trainer's dtype
    """

    shard: int
    local_region: LocalRegion
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reads of one engine rank, by trainer rank and then in destination order.

    Read `i` is `items[item_ids[i]]` of `copies[copy_ids[i]]`, from trainer rank `trainer_ranks[i]`.

    tensor_ids  number of each copy's source tensor in the layout
    duplicates  read -> earlier read of the same elements by this rank (nearly always empty)
    """

    copies: Sequence[Copy]
    tensor_ids: np.ndarray
    items: tuple[ReadItem, ...]
    copy_ids: np.ndarray
    item_ids: np.ndarray
    trainer_ranks: np.ndarray
    duplicates: dict[int, int]

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of each read."""
        return np.array([item.nbytes for item in self.items], np.int64)[self.item_ids]

    def shards(self, index: TensorIndex) -> np.ndarray:
        """Returns the number of each read's shard."""
        within = np.array([item.shard for item in self.items], np.int64)
        return index.first_shard[self.tensor_ids[self.copy_ids]] + within[self.item_ids]

    def least_bytes(self) -> int:
        """Returns the bytes that have to reach this rank, in the trainer's dtypes; duplicates count once."""
        nbytes = self.nbytes
        return int(nbytes.sum()) - sum(int(nbytes[read]) for read in self.duplicates)

    def traffic(self) -> dict[int, tuple[int, int]]:
        """Returns trainer rank -> (bytes, reads) from it, in ascending order."""
        nbytes = np.bincount(self.trainer_ranks, self.nbytes)  # as float64, which is exact up to 8 PiB
        reads = np.bincount(self.trainer_ranks)
        return {int(t): (int(nbytes[t]), int(reads[t])) for t in np.flatnonzero(reads)}

    def reads_from(self, trainer_rank: int) -> range:
        first, last = np.searchsorted(self.trainer_ranks, [trainer_rank, trainer_rank + 1])
        return range(int(first), int(last))

    def read(self, number: int) -> tuple[Copy, ReadItem, int]:
        """Returns a read's copy, item, and tensor number in the layout."""
        copy = int(self.copy_ids[number])
        return self.copies[copy], self.items[int(self.item_ids[number])], int(self.tensor_ids[copy])

    def only(self, tensors: np.ndarray) -> ReadPlan:
        """Returns the reads of the layout's tensors for which the mask `tensors` is set."""
        kept = tensors[self.tensor_ids[self.copy_ids]]
        number = np.cumsum(kept) - 1
        duplicates = {int(number[read]): int(number[first]) for read, first in self.duplicates.items() if kept[read]}
        copy_ids, item_ids, ranks = (column[kept] for column in (self.copy_ids, self.item_ids, self.trainer_ranks))
        return ReadPlan(self.copies, self.tensor_ids, self.items, copy_ids, item_ids, ranks, duplicates)

    def digest(self) -> str:
        """Returns a content hash of the reads from each trainer rank; destinations are not part of it."""
        found = hashlib.sha256(repr([item.local_region for item in self.items]).encode())
        for column in (self.tensor_ids[self.copy_ids], self.item_ids, self.trainer_ranks):
            found.update(np.ascontiguousarray(column).data)
        return found.hexdigest()


def plan_reads(index: TensorIndex, copies: Sequence[Copy], location: RankLocation) -> ReadPlan:
    """Plans the reads of the engine rank at `location` for its copies.

    A shard with replicas is read from trainer ranks on the engine rank's own host whose memory it can map, if there are
    any. Bytes are spread evenly over all that are equally near.
    """
    tensor_ids = np.fromiter((index.index_of[c.source] for c in copies), np.int32, len(copies))
    reads = _expand(index, copies, tensor_ids, location)
    items, copy_ids, item_ids = tuple(reads.items), reads.copy_ids, reads.item_ids
    nbytes = np.array([item.nbytes for item in items], np.int64)[item_ids]
    trainer_ranks = _balanced(nbytes, reads.holders, [location.nearest(ranks) for ranks in reads.holder_sets])
    unordered = ReadPlan(copies, tensor_ids, items, copy_ids, item_ids, trainer_ranks, {})
    for read, first in _duplicates(unordered, reads.repeated).items():
        trainer_ranks[read] = trainer_ranks[first]
    if len(copies) >> _COPY_BITS or len(items) >> _ITEM_BITS:
        raise ValueError(
            f"the plan has {len(copies)} copies and {len(items)} distinct items; at most {1 << _COPY_BITS} copies and "
            f"{1 << _ITEM_BITS} items are supported. Please report this model"
        )
    position = np.empty(len(copies), np.int64)  # of each copy, in destination order
    targets: dict[str, int] = {}
    destinations = [(targets.setdefault(c.target, len(targets)), c.offset) for c in copies]
    position[sorted(range(len(copies)), key=destinations.__getitem__)] = np.arange(len(copies))
    key = trainer_ranks.astype(np.int64) << (_COPY_BITS + _ITEM_BITS) | position[copy_ids] << _ITEM_BITS | reads.within
    order = np.argsort(key, kind="stable")
    plan = replace(unordered, copy_ids=copy_ids[order], item_ids=item_ids[order], trainer_ranks=trainer_ranks[order])
    return replace(plan, duplicates=_duplicates(plan, reads.repeated))


class _Reads(NamedTuple):
    """Reads before trainer ranks are chosen.

    within    position of each read's item within its copy
    holders   number of each read's set of trainer ranks in `holder_sets`
    repeated  tensors with a region that is copied more than once
    """

    items: list[ReadItem]
    copy_ids: np.ndarray
    item_ids: np.ndarray
    within: np.ndarray
    holders: np.ndarray
    holder_sets: list[tuple[int, ...]]
    repeated: set[int]


def _expand(index: TensorIndex, copies: Sequence[Copy], tensor_ids: np.ndarray, location: RankLocation) -> _Reads:
    """Groups equal copies, cuts each group into items once, and repeats them for its copies."""
    groups: dict[tuple[int, Region, tuple[int, ...]], list[int]] = {}
    for number, (tensor_class, copy) in enumerate(zip(index.class_of[tensor_ids].tolist(), copies, strict=True)):
        groups.setdefault((tensor_class, copy.region, copy.strides), []).append(number)
    items: list[ReadItem] = []
    holder_sets: dict[tuple[int, ...], int] = {}
    cuts: dict[tuple[int, Region], list[tuple[ReadItem, tuple[int, ...], int]]] = {}
    tensors_of: dict[tuple[int, Region], list[np.ndarray]] = {}
    columns: list[tuple[np.ndarray, ...]] = [(np.empty(0, np.int32),) * 4]
    for (tensor_class, region, strides), numbers in groups.items():
        key = tensor_class, region
        if key not in cuts:
            cuts[key] = list(_cut(index.classes[tensor_class], region, location, holder_sets))
        made = []
        for item, skipped, holders in cuts[key]:
            offset = sum(n * s for n, s in zip(skipped, strides, strict=True))
            made.append((item._replace(offset=offset), holders))
        made.sort(key=lambda pair: pair[0].offset)
        item_ids = np.arange(len(items), len(items) + len(made), dtype=np.int32)
        items += [item for item, _ in made]
        copy_ids, within = np.array(numbers, np.int32), np.arange(len(made), dtype=np.int32)
        of_holders = np.array([holders for _, holders in made], np.int32)
        tensors_of.setdefault(key, []).append(tensor_ids[copy_ids])
        repeated_columns = (np.tile(column, len(copy_ids)) for column in (item_ids, within, of_holders))
        columns.append((np.repeat(copy_ids, len(made)), *repeated_columns))
    repeated: set[int] = set()
    for tensors in map(np.concatenate, tensors_of.values()):
        unique, count = np.unique(tensors, return_counts=True)
        repeated.update(unique[count > 1].tolist())
    copy_ids, item_ids, within, of_holders = (np.concatenate(column) for column in zip(*columns, strict=True))
    return _Reads(items, copy_ids, item_ids, within, of_holders, list(holder_sets), repeated)


def _cut(
    tensor_class: TensorClass, region: Region, location: RankLocation, holder_sets: dict[tuple[int, ...], int]
) -> Iterator[tuple[ReadItem, tuple[int, ...], int]]:
    """Yields (item, steps skipped, set of holders) for each shard that `region` overlaps."""
    chosen: dict[Box, tuple[int, ShardBox]] = {}  # one shard per box, the nearest if several have the same box
    for number, shard in enumerate(tensor_class.shard_map.shards):
        known = chosen.get(shard.box)
        if known is None or location.distance(shard.ranks) < location.distance(known[1].ranks):
            chosen[shard.box] = number, shard
    for number, shard in chosen.values():
        if common := region.intersect(shard.box):
            inside, skipped = common
            holders = holder_sets.setdefault(shard.ranks, len(holder_sets))
            nbytes = inside.numel * tensor_class.item_bytes
            yield ReadItem(number, tensor_class.shard_map.to_local(shard, inside), 0, nbytes), skipped, holders


def _balanced(nbytes: np.ndarray, holders: np.ndarray, nearest: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Returns the trainer rank of each read, so that the nearest ranks of a set of holders provide equal bytes."""
    trainer_ranks = np.array([ranks[0] for ranks in nearest] or [0], np.int32)[holders]
    for number, ranks in enumerate(nearest):
        if len(ranks) == 1:
            continue
        own = np.flatnonzero(holders == number)
        upto = np.cumsum(nbytes[own])
        middle = upto - nbytes[own] / 2
        trainer_ranks[own] = np.array(ranks, np.int32)[(middle * len(ranks) // max(1, upto[-1])).astype(np.int64)]
    return trainer_ranks


def _duplicates(plan: ReadPlan, repeated: set[int]) -> dict[int, int]:
    """Returns read -> the first read of the same elements."""
    if not repeated:
        return {}
    first: dict[tuple[int, int, Region], int] = {}
    tensors = plan.tensor_ids[plan.copy_ids]
    reads = np.flatnonzero(np.isin(tensors, list(repeated))).tolist()
    keys = [(int(tensors[read]), *plan.items[plan.item_ids[read]][:2]) for read in reads]
    return {read: first[key] for read, key in zip(reads, keys, strict=True) if first.setdefault(key, read) != read}


class RankDemand(msgspec.Struct, frozen=True):
    """The needs of one engine rank, small enough to be gathered from all of them.

    shards       compressed bits: bit i is set if the rank needs elements of shard i
    least_bytes  bytes that have to reach it, in the trainer's dtypes
    host         where it runs; memory can only be read on the same host
    traffic      trainer rank -> (bytes, reads) from it, in an exact transfer
    digest       content hash of the read plan
    device       its GPU
    unreadable   trainer rank on its host -> why it cannot map that one's memory
    """

    shards: bytes
    least_bytes: int
    host: str
    traffic: dict[int, tuple[int, int]]
    digest: str
    device: RankGpuInfo = RankGpuInfo()
    unreadable: dict[int, str] = {}


def rank_demand(
    index: TensorIndex,
    plan: ReadPlan,
    host: str,
    device: RankGpuInfo = _NO_GPU,
    unreadable: Mapping[int, str] = MappingProxyType({}),
) -> RankDemand:
    """Returns the demand of an engine rank with this read plan; see `RankDemand` for the rest."""
    needed = np.zeros(index.num_shards, bool)
    needed[plan.shards(index)] = True
    bits = zlib.compress(np.packbits(needed, bitorder="little").tobytes(), 1)
    return RankDemand(bits, plan.least_bytes(), host, plan.traffic(), plan.digest(), device, dict(unreadable))


def demanded_shards(index: TensorIndex, demands: Sequence[RankDemand]) -> np.ndarray:
    """Returns which engine rank needs which shard, bool [engine ranks, shards]."""
    nbytes = -(-index.num_shards // 8)
    rows = [
        np.frombuffer(inflate(d.shards, nbytes, f"the demand of engine rank {e}"), np.uint8)
        for e, d in enumerate(demands)
    ]
    if any(len(row) != nbytes for row in rows):
        raise Mismatch("the demands of the engine ranks belong to another layout. This is a bug; please report it")
    return np.unpackbits(np.stack(rows), axis=1, count=index.num_shards, bitorder="little").astype(bool)


def unread_tensors(index: TensorIndex, demands: Sequence[RankDemand]) -> tuple[str, ...]:
    """Returns the names of tensors that no engine rank needs; tensors without elements are not counted."""
    upto = np.concatenate([[0], np.cumsum(demanded_shards(index, demands).any(axis=0))])
    unread = np.flatnonzero(upto[index.first_shard[1:]] == upto[index.first_shard[:-1]]).tolist()
    tensors = index.layout.tensors
    return tuple(tensors[i].name for i in unread if tensors[i].spec.numel)
