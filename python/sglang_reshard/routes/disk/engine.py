"""An engine rank's end of disk: reads exactly the elements that it lacks from a snapshot's files, and compares them.

No tensor becomes live before all engine ranks have compared the tensors that all of them have read. Tensors that arrive
apart from the live weights are compared there. Otherwise a rank reads its boxes twice: once to compare them, before any
rank may write, and once into the live weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import torch

from sglang_reshard import tasks
from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.landings.checked.whole_model import with_kept
from sglang_reshard.layout.regions import Box, Region, aligned, split
from sglang_reshard.observability.report import Traffic
from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.routes.base import EngineEnd, EngineSide, Meeting
from sglang_reshard.routes.disk.messages import get_files
from sglang_reshard.routes.disk.reader import OpenFiles, Run
from sglang_reshard.routes.disk.sums import RankSums, Verdict, compare
from sglang_reshard.routes.nixl.remote_shards import RemoteShard
from sglang_reshard.routes.p2p.links import destination_reads, destination_views, targets_by_round
from sglang_reshard.routes.p2p.messages import send_request
from sglang_reshard.routes.read_link import ReadLink, ReadMessage
from sglang_reshard.routes.strategy import REQUESTED, Strategy, demanded_bytes
from sglang_reshard.routes.wire.rounds import BUCKETS, Wait, run_rounds
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.geometry import contiguous_strides

T = TypeVar("T")
_SOURCE = 0  # the trainer rank that holds all tensors
_THREADS = 4  # that read at a time
_SUMS, _VERDICT = "disk/sums", "disk/verdict"  # keys of the session, which is of one update
_ANSWER_S = 10.0  # that engine rank 0 may take to compare


def plan(_index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int) -> Strategy:
    _, unread = demanded_bytes(demands, topology)
    return Strategy("disk", REQUESTED, np.minimum(aligned(unread), bucket_bytes), compares=True)


@dataclass(frozen=True, slots=True)
class _Round:
    """Boxes that are read at once. rows: of the checksums that `sums` computes, the numbers of the reads"""

    runs: Sequence[Run]
    copies: CopyList
    sums: RegionBatch
    rows: np.ndarray


class DiskEngineEnd(EngineEnd):
    """Reads all that this rank lacks. It is used for one update: the next snapshot has other files."""

    def __init__(self, side: EngineSide, strategy: Strategy) -> None:
        self._reads, self._ranks = side.reads, len(side.read_plans)
        self._message_bytes = int(strategy.round_bytes[_SOURCE, side.engine_rank])
        self._rounds: list[_Round] = []
        self._regions: list[tuple[int, Region]] = []  # tensor number and region of each read
        self._compared: np.ndarray | None = None  # the checksum of each read, once all ranks have compared them

    def connect(self, meeting: Meeting) -> None:
        reads = self._reads
        self._meeting, self._files = meeting, get_files(meeting.session, reads.timeout_s)
        plan = reads.read_plan
        link = self._cut()
        needed = {self._files.file_of[tensor] for tensor in link.tensor_of}
        self.connections = self._opened = OpenFiles(self._files, needed)
        if reads.program.arrivals:
            reads.landing.place(targets_by_round({_SOURCE: link.link}, plan), (), ahead=BUCKETS - 1)
            link = self._cut()  # into the memory that weights are converted from
        self._prepare(link)
        if not reads.landing.holds_back:
            self._compare(self._read(live=False))

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        """Raises Mismatch, naming the tensors, if they are not what the snapshot's manifest lists."""
        found = self._read(live=True)
        if self._reads.landing.holds_back:
            self._compare(found)
        else:
            assert self._compared is not None
            if len(wrong := np.flatnonzero(found != self._compared)):
                raise self._differing([self._regions[row][0] for row in wrong.tolist()])
        self._opened.check_unchanged()
        self._opened.close()

    def _cut(self) -> ReadLink:
        """Returns what this rank reads, in messages. All of it has its place in a bucket."""
        reads, layout, files = self._reads, self._reads.tensor_index.layout, self._files

        def shard(tensor: int) -> RemoteShard:
            strides = contiguous_strides(layout.tensors[tensor].shape)
            return RemoteShard("", files.file_of[tensor], files.offsets[tensor], strides)

        views = destination_views(reads.program, reads.read_plan, _SOURCE)
        request = send_request(reads.read_plan, _SOURCE)
        return ReadLink.cut(
            "the snapshot", layout, request, shard, views, self._message_bytes, device=None, descriptor_bytes=0
        )

    def _prepare(self, link: ReadLink) -> None:
        """Makes buckets, views, runs and lists of copies."""
        plan, pinned = self._reads.read_plan, runtime().is_gpu(self._reads.device)
        for numbers in destination_reads(plan, _SOURCE):
            copy, _, tensor = plan.read(numbers[0])
            self._regions.append((tensor, copy.region))
        self.traffic = Traffic.of({_SOURCE: link.read_bytes} if link.read_bytes else {})
        count = min(BUCKETS, len(link.messages))
        buckets = [torch.empty(link.bucket_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        self._rounds = [self._round(link, m, buckets[n % BUCKETS]) for n, m in enumerate(link.messages)]
        self.nbytes = sum(bucket.numel() for bucket in buckets) + sum(r.copies.table_bytes for r in self._rounds)

    def _round(self, link: ReadLink, message: ReadMessage, bucket: torch.Tensor) -> _Round:
        runs: list[Run] = []
        rows: list[int] = []
        copies, sums = CopyList(), RegionBatch()
        data = bucket.numpy()
        for part in message.parts:
            link.add_copies(copies, part, bucket)
            tensor, region = self._regions[part.slice.item]
            of = self._reads.tensor_index.tensor_class(tensor)
            if part.slice.box is not None:
                region = region.part(part.slice.box)
            nbytes = part.runs.total_bytes
            spec = RegionSpec.bits(of.shape, region, of.item_bytes)
            read = bucket[part.offset : part.offset + nbytes].view(spec.dtype)
            sums.add(spec, read.as_strided(part.count, part.runs.strides), len(rows))
            rows.append(part.slice.item)
            for number, offset in enumerate(part.runs.offsets.tolist()):
                begin = part.offset + number * part.runs.nbytes
                runs.append(Run(part.shard.gpu, part.address + offset, data[begin : begin + part.runs.nbytes]))
        copies.build()
        return _Round(runs, copies, sums, np.array(rows, np.int64))

    def _read(self, *, live: bool) -> np.ndarray:
        """Reads all boxes, to where they belong if `live`. Returns uint64, the checksum of each read."""
        found, landing = np.zeros(len(self._regions), np.uint64), self._reads.landing

        def start(number: int) -> Wait:
            reads = [pool.submit(self._opened.read_all, runs) for runs in _shares(self._rounds[number].runs)]
            return lambda: [read.result() for read in reads]

        def ended(number: int) -> None:
            of = self._rounds[number]
            np.add.at(found, of.rows, of.sums.checksums(len(of.rows), Selection.full()))
            if live:
                of.copies.run()
                runtime().synchronize([self._reads.device])  # the bucket is filled again in no stream's order
                landing.arrived(number)

        with ThreadPoolExecutor(_THREADS, f"{tasks.PREFIX} disk") as pool:
            run_rounds(len(self._rounds), start, ended)
        return found

    def _compare(self, sums: np.ndarray) -> None:
        """Compares what all engine ranks have read with the snapshot's manifest. Collective over engine ranks.

        Raises Mismatch, naming the tensors.
        """
        self._compared = sums
        verdict = self._verdict(dict(zip(self._regions, sums.tolist(), strict=True)))
        if verdict.wrong:
            raise self._differing(verdict.wrong)
        own, expected = {tensor for tensor, _ in self._regions}, self._files.sums
        if wrong := [t for t in verdict.open if t in own and self._whole(t) != expected[t]]:
            raise self._differing(wrong)
        self.traffic = msgspec.structs.replace(self.traffic, digest=with_kept(verdict.digest, self._meeting.kept))

    def _verdict(self, sums: Mapping[tuple[int, Region], int]) -> Verdict:
        """Returns what engine rank 0 finds when it compares the checksums of all. So each rank sends its own once."""
        reads, session = self._reads, self._meeting.session

        def get(key: str, kind: type[T], what: str, timeout_s: float) -> T:
            return session.get(key, kind, what, timeout_s, hashed=False, scope=self._meeting.scope)

        session.put(RankSums.of(sums, self._casts()), f"{_SUMS}/{reads.engine_rank}", hashed=False)
        if reads.engine_rank == 0:
            of_ranks = [
                get(f"{_SUMS}/{rank}", RankSums, f"the checksums of engine rank {rank}", reads.timeout_s)
                for rank in range(self._ranks)
            ]
            found = compare(reads.tensor_index, np.array(self._files.sums, np.uint64), of_ranks)
            session.put(found, _VERDICT, hashed=False)
        return get(_VERDICT, Verdict, "engine rank 0's comparison of checksums", reads.timeout_s + _ANSWER_S)

    def _whole(self, tensor: int) -> int:
        """Returns the checksum of a whole tensor, which this rank reads for that."""
        of, total = self._reads.tensor_index.tensor_class(tensor), 0  # of few tensors: scales of blocks, for example
        begin, file = self._files.offsets[tensor], self._files.file_of[tensor]
        for box in split(Box.whole(of.shape), max(1, self._message_bytes // of.item_bytes)):
            buffer = np.empty(box.numel * of.item_bytes, np.uint8)
            self._opened.read(Run(file, begin, buffer))
            batch, spec = RegionBatch(), RegionSpec.bits(of.shape, Region.of(box), of.item_bytes)
            batch.add(spec, torch.from_numpy(buffer).view(spec.dtype), 0)
            total += int(batch.checksums(1, Selection.full())[0])
            begin += len(buffer)
        return total % (1 << 64)

    def _casts(self) -> bool:
        """Returns whether the live weights have other dtypes than the files."""
        plan, program = self._reads.read_plan, self._reads.program
        classes = self._reads.tensor_index
        return any(
            str(program.targets[copy.target].dtype) != f"torch.{classes.tensor_class(int(tensor)).dtype}"
            for copy, tensor in zip(plan.copies, plan.tensor_ids, strict=True)
        )

    def _differing(self, tensors: Sequence[int]) -> Mismatch:
        names = [self._reads.tensor_index.layout.tensors[tensor].name for tensor in tensors]
        return Mismatch(
            f"snapshot {self._files.snapshot} in {self._files.folder} is damaged: these tensors do not have the "
            f"checksums that its manifest lists: {some_names(names)}. Write a new snapshot"
        )


engine_end = DiskEngineEnd


def _shares(runs: Sequence[Run]) -> Iterator[Sequence[Run]]:
    """Yields the runs in parts for several threads, of about equal bytes."""
    ends = np.cumsum([len(run.buffer) for run in runs])  # a round has at least one
    cuts = np.searchsorted(ends, [ends[-1] * part // _THREADS for part in range(1, _THREADS)]).tolist()
    return (runs[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(runs)]) if begin < end)
