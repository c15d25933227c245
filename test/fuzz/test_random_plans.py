"""Any layout, any copies, any way: every element lands where it should, and nothing beside it is touched."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import torch

from fuzz.in_process import Guarded, Mail, RoomGroups, Rooms
from fuzz.settings import fuzzed
from fuzz.states import shards_of
from sglang_reshard.landings.base import Landing
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from sglang_reshard.memory.mapping import Handles, MemoryExporter
from sglang_reshard.memory.peer_memory import PeerMemory
from sglang_reshard.plan import ClusterTopology, RankLocation, TensorIndex, plan_reads, rank_demand
from sglang_reshard.protocol.validation import check_handles, check_layout
from sglang_reshard.routes import choose_strategy
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.broadcast.engine import BroadcastEngineEnd
from sglang_reshard.routes.broadcast.plan import BroadcastStrategy
from sglang_reshard.routes.p2p.ask import check_send_request
from sglang_reshard.routes.p2p.messages import SendRequest, send_request
from sglang_reshard.routes.p2p.trainer import P2pSender
from sglang_reshard.sources import SourceLayout, TrainerState
from sglang_reshard.trace.program import Program
from support.drawn import copies_of, layout_of
from support.plans import assembled_states, values
from support.sent import receiving

CPU = torch.device("cpu")
LIVE = (torch.float32, torch.bfloat16, torch.int64)


def sent(message, kind):
    digest, blob = pack_blob(message)
    return unpack_blob(blob, kind, digest)


def expected_of(copies, dtypes, whole):
    found = Guarded(copies, dtypes)
    for copy in copies:
        copy.destination(found.targets[copy.target]).copy_(whole[copy.source][copy.region.slices()])
    return found


def tables(side):
    """Bytes of what kernels read of a side's copies."""
    return sum(copies.table_bytes for _, copies in side._rounds)


def send_orders(strategy, layout, shards, plans, boxes, room):
    for trainer_rank, own in shards.items():
        receivers = {e: int(share) for e, share in enumerate(strategy.round_bytes[trainer_rank]) if share}
        orders = {}
        for e in receivers:
            orders[e] = sent(send_request(plans[e], trainer_rank), SendRequest)
            check_send_request(orders[e], layout, trainer_rank, e)
        peers = {e: layout.trainer_ranks + e for e in receivers}
        shares = {peers[e]: share for e, share in receivers.items()}
        sender = P2pSender(layout, own, {peers[e]: orders[e] for e in orders}, shares, CPU)
        assert sender.extra_bytes <= room + tables(sender)
        sender.send(Mail(trainer_rank, boxes))


@fuzzed
def test_every_element_lands_and_nothing_else_is_written(random):
    layout = sent(layout_of(random), SourceLayout)
    check_layout(layout, layout.trainer_ranks)
    engines = random.randint(1, 3)
    asked = random.choice(("auto", "auto", "ipc", "p2p", "broadcast"))
    hosts = "a" if asked in ("ipc", "broadcast") else "ab"
    trainer_hosts = tuple(random.choice(hosts) for _ in range(layout.trainer_ranks))
    engine_hosts = [random.choice(hosts) for _ in range(engines)]
    bucket = random.choice((1, 16, 100, 1000, 1 << 20))
    whole = values(layout, random.getrandbits(32))
    shards = {t: shards_of(layout, whole, t, random) for t in range(layout.trainer_ranks)}
    before = {t: [shard.clone() for shard in own] for t, own in shards.items()}
    copies = [copies_of(layout, random) for _ in range(engines)]

    index = TensorIndex.of(layout)
    plans = [
        plan_reads(index, own, RankLocation(e, engines, engine_hosts[e], trainer_hosts)) for e, own in enumerate(copies)
    ]
    demands = [rank_demand(index, t, host) for t, host in zip(plans, engine_hosts, strict=True)]
    strategy = choose_strategy(asked, index, demands, ClusterTopology.of(demands, trainer_hosts), bucket)

    exported = {}
    for trainer_rank, own in shards.items() if strategy.name != "p2p" else ():
        exported[trainer_rank] = sent(MemoryExporter(trainer_rank).export(own), Handles)
        check_handles(exported[trainer_rank], layout, trainer_rank)
    boxes: dict[tuple[int, int], deque[torch.Tensor]] = {}
    in_place_bytes = random.choice((1, 64, 1 << 20))
    peers = max((strategy.round_bytes > 0).sum(axis=0).max(), (strategy.round_bytes > 0).sum(axis=1).max())
    room = 2 * max(bucket, 16 * peers)
    with patch("sglang_reshard.routes.p2p.links.IN_PLACE_BYTES", in_place_bytes):
        send_orders(strategy, layout, shards, plans, boxes, room)

    rooms, live, transports = Rooms(), [], []
    dtypes = [{name: random.choice(LIVE) for name in ("a", "b")} for _ in range(engines)]
    for e, own in enumerate(copies):
        live.append(Guarded(own, dtypes[e]))
        program = Program(tuple(own), live[e].targets)
        mapped = strategy.mapped_by(e, plans[e], index)
        memory = {t: PeerMemory(t, exported[t], CPU, of_rank) for t, of_rank in mapped.items()}
        reads = Reads(e, CPU, index, plans[e], Landing(program).converting(CPU, bucket), memory)
        if isinstance(strategy, BroadcastStrategy):
            end = BroadcastEngineEnd(SimpleNamespace(reads=reads), strategy)
            end.prepare(RoomGroups(rooms, e))
            transports.append(end)
        else:
            end = receiving(reads, strategy, Mail(layout.trainer_ranks + e, boxes), in_place_bytes)
            assert end.nbytes <= room + end._direct.extra_bytes + tables(end)
            transports.append(end)
    if isinstance(strategy, BroadcastStrategy) and strategy.broadcasts.groups:
        with ThreadPoolExecutor(engines) as threads:
            list(threads.map(lambda transport: transport.move(None, False), transports))
    else:
        for transport in transports:
            transport.move(None, False)

    for e, own in enumerate(copies):
        assert live[e] == expected_of(own, dtypes[e], whole), f"engine rank {e} by {strategy.name}"
        if not isinstance(strategy, BroadcastStrategy):
            traffic = transports[e].traffic
            assert traffic.received_bytes == sum(traffic.read_bytes.values()) >= plans[e].least_bytes()
            assert strategy.name != "p2p" or traffic.received_bytes == plans[e].least_bytes()
    assert not any(boxes.values()), "something was sent that nobody received"
    for trainer_rank, own in shards.items():
        for shard, kept in zip(own, before[trainer_rank], strict=True):
            assert torch.equal(shard, kept), "trainer memory was written"


@fuzzed
def test_pieces_are_the_tensor(random):
    """What the layout says of who holds what is what the tensor is, to the element."""
    layout = layout_of(random)
    check_layout(layout, layout.trainer_ranks)
    whole = values(layout, random.getrandbits(32))
    shards = [tuple(shards_of(layout, whole, t, random)) for t in range(layout.trainer_ranks)]
    found = assembled_states([TrainerState(layout, own, ()) for own in shards])
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
