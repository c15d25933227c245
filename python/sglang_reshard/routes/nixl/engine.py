"""An engine rank's end of nixl: reads exactly the elements that it lacks out of registered memory, on any host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_reshard.observability.report import Traffic
from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, Prepare
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes.base import EngineEnd, EngineSide, Meeting
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.nixl.remote_shards import get_remote_shards, trainer_name
from sglang_reshard.routes.nixl.streams import Stream, read_streams, trainer_streams
from sglang_reshard.routes.nixl.trainer import NixlTrainerEnd
from sglang_reshard.routes.p2p.ask import Links
from sglang_reshard.routes.p2p.messages import round_bytes
from sglang_reshard.routes.strategy import REQUESTED, Strategy, demanded_bytes


def plan(_index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int) -> Strategy:
    read, unread = demanded_bytes(demands, topology)
    return Strategy("nixl", REQUESTED, round_bytes(read + unread, bucket_bytes))


class NixlEngineEnd(EngineEnd):
    """Reads all that this rank lacks. Trainer ranks register their shards once, and take no further part.

    links        of all ranks; trainer ranks that nothing is read from register nothing
    round_bytes  trainer rank -> bytes that are read from it at once
    streams      trainer rank -> what reads all of it
    """

    holds_pages = True

    def __init__(self, side: EngineSide, strategy: Strategy) -> None:
        self.side = side
        self.links = Links.of(side.read_plans, strategy.round_bytes)
        self.round_bytes = strategy.senders(side.engine_rank)
        self.streams: Mapping[int, Stream] = {}

    def ask(self, session: Session) -> Prepare | None:
        return self.side.prepare("nixl", self.links) if self.links.any() else None

    def connect(self, meeting: Meeting) -> None:
        self.open(meeting)
        reads = self.side.reads
        self.streams = trainer_streams(self.reader, reads, reads.read_plan, self.round_bytes)
        self.nbytes = sum(stream.extra_bytes for stream in self.streams.values())
        received = sum(stream.read_bytes for stream in self.streams.values())
        self.traffic = Traffic(received, {t: sum(stream.payload_bytes) for t, stream in self.streams.items()})

    def open(self, meeting: Meeting) -> None:
        """Learns where the trainer ranks have registered their shards, and makes no views and buffers yet."""
        self.connections = self.reader = NixlReader(self.side.engine_rank)
        tensors = len(self.side.reads.tensor_index.layout.tensors)
        found = {
            t: get_remote_shards(meeting.session, self.side.request.engine, t, tensors, self.side.reads.timeout_s)
            for t in self.round_bytes
        }
        self.reader.connect({trainer_name(t): shards for t, shards in found.items()})

    def move(self, request: DistributedUpdateWeightsReq, taken: bool) -> None:
        """Raises PeerDisconnected and DeadlineExceeded for trainer ranks."""
        read_streams(self.side.reads, list(self.streams.values()))


engine_end, trainer_end = NixlEngineEnd, NixlTrainerEnd
