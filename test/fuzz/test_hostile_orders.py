"""Whatever an engine rank asks for: it is refused, or it is sent just what is asked for, out of the shards."""

from collections import deque

import torch

from fuzz.arbitrary import changed, value_of
from fuzz.in_process import Mail
from fuzz.settings import fuzzed
from fuzz.states import shards_of
from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from sglang_reshard.plan import RankLocation, TensorIndex, plan_reads
from sglang_reshard.routes.p2p.ask import Links, P2pAsk, check_send_request
from sglang_reshard.routes.p2p.messages import SendRequest, send_request
from sglang_reshard.routes.p2p.trainer import P2pSender
from support.drawn import copies_of, layout_of
from support.plans import values

CPU = torch.device("cpu")


def state_of(random):
    layout = layout_of(random)
    rank = random.randrange(layout.trainer_ranks)
    return layout, rank, shards_of(layout, values(layout, random.getrandbits(32)), rank, random)


def carry_out(order, layout, shards, share):
    """Send it; what has been sent, joined, is the regions' elements in row-major order."""
    boxes: dict[tuple[int, int], deque[torch.Tensor]] = {}
    outlet = P2pSender(layout, shards, {9: order}, {9: share}, CPU)
    outlet.send(Mail(0, boxes))
    views = [region.view(shards[tensor]) for tensor, region in order.entries()]
    for view, (_, region) in zip(views, order.entries(), strict=True):
        assert tuple(view.shape) == region.count
    assert outlet.sent_bytes == sum(view.numel() * view.element_size() for view in views)
    assert sum(data.numel() for data in boxes.get((0, 9), ())) >= outlet.sent_bytes


@fuzzed
def test_changed_orders_are_refused_or_carried_out(random):
    layout, rank, shards = state_of(random)
    taken = plan_reads(
        TensorIndex.of(layout), copies_of(layout, random), RankLocation(0, 1, "a", ("a",) * layout.trainer_ranks)
    )
    order = send_request(taken, rank)
    check_send_request(order, layout, rank, 0)
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        order = changed(order, random)
    try:
        digest, blob = pack_blob(order)
        order = unpack_blob(blob, SendRequest, digest)
        check_send_request(order, layout, rank, 0)
    except Mismatch:
        return
    carry_out(order, layout, shards, random.choice((1, 16, 64, 1 << 20)))


@fuzzed
def test_arbitrary_orders_are_refused_or_carried_out(random):
    layout, rank, shards = state_of(random)
    order = value_of(SendRequest, random)
    try:
        check_send_request(order, layout, rank, 0)
    except Mismatch:
        return
    carry_out(order, layout, shards, 64)


@fuzzed
def test_arbitrary_words_to_connect_are_refused_or_make_sense(random):
    connect = value_of(P2pAsk, random)
    if random.random() < 0.7:
        trainers, engines = random.randint(1, 3), random.randint(1, 3)
        shares = tuple(tuple(random.choice((0, 16, 1000)) for _ in range(engines)) for _ in range(trainers))
        receivers = [e for e in range(engines) if any(row[e] for row in shares)]
        senders = [t for t in range(trainers) if any(shares[t])]
        groups = ((*senders, *(trainers + e for e in receivers)),) if senders else ()
        connect = P2pAsk(Links(("intake",) * engines, shares), "gloo", groups)
        for _ in range(random.randrange(3)):
            connect = changed(connect, random)
    rows = getattr(connect.links, "round_bytes", None)
    trainer_ranks = len(rows) if isinstance(rows, tuple) and random.random() < 0.9 else 1
    try:
        digest, blob = pack_blob(connect)
        connect = unpack_blob(blob, P2pAsk, digest)
        connect.check(trainer_ranks)
    except Mismatch:
        return
    links = [(t, trainer_ranks + e) for t, row in enumerate(connect.links.round_bytes) for e, n in enumerate(row) if n]
    assert all(sum({t, e} <= set(members) for members in connect.groups) == 1 for t, e in links)
    assert {m for members in connect.groups for m in members} == {rank for link in links for rank in link}
