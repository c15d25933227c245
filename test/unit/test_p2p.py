"""Exact boxes, sent: bit-exact for any layout and any copies, in bounded buffers."""

from collections import deque
from unittest.mock import patch

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.routes.p2p.engine import P2pReceiver
from sglang_reshard.routes.p2p.messages import round_bytes, send_request
from sglang_reshard.routes.p2p.trainer import P2pSender
from support.plans import copies_of, empty_targets, loaded, meshed_layouts, read_plans, values
from support.plans import shards as cut_shards
from support.sent import CPU, reads_of
from support.sweep import examples
from support.toy import ToyRank, checkpoint
from support.toy_trainers import State
from support.world import run_world

MIB = 1 << 20


# -- both ends in one process: any layout, any copies


class Mail:
    """Stands in for `Communicators`: what is sent is kept until it is received."""

    def __init__(self, me, boxes):
        self._me, self._boxes = me, boxes

    def send(self, buffers):
        for peer, buffer in buffers:
            self._boxes.setdefault((self._me, peer), deque()).append(buffer.clone())
        return self

    def receive(self, buffers):
        return Arriving(
            [(buffer, self._boxes[(peer, self._me)].popleft()) for peer, buffer in buffers],
        )

    def wait(self):
        pass

    def close(self):
        pass


class Arriving:
    def __init__(self, pairs):
        self._pairs = pairs

    def wait(self):
        for buffer, data in self._pairs:
            buffer.copy_(data)


@settings(max_examples=examples(150))
@given(data=st.data(), bucket=st.sampled_from([1, 100, 1000, MIB]), in_place_bytes=st.sampled_from([1, 64, MIB]))
def test_any_layout_and_any_copies(data, bucket, in_place_bytes):
    with patch("sglang_reshard.routes.p2p.links.IN_PLACE_BYTES", in_place_bytes):
        send_and_receive(data, bucket)


def send_and_receive(data, bucket):
    layout = data.draw(meshed_layouts())
    copies = [data.draw(copies_of(layout)) for _ in range(data.draw(st.integers(1, 3)))]
    index, plans = read_plans(layout, copies)
    links = torch.zeros(layout.trainer_ranks, len(copies), dtype=torch.int64).numpy()
    for e, t in enumerate(plans):
        for trainer_rank, (nbytes, _) in t.traffic().items():
            links[trainer_rank, e] = nbytes
    share, whole, boxes = round_bytes(links, bucket), values(layout), {}
    most = (share > 0).sum(axis=0).max(initial=0), (share > 0).sum(axis=1).max(initial=0)
    room = 2 * max(bucket, 16 * max(most))
    for trainer_rank in range(layout.trainer_ranks):
        receivers = {e: int(s) for e, s in enumerate(share[trainer_rank]) if s}
        orders = {layout.trainer_ranks + e: send_request(plans[e], trainer_rank) for e in receivers}
        own = {layout.trainer_ranks + e: s for e, s in receivers.items()}
        p2p_sender = P2pSender(layout, cut_shards(layout, whole, trainer_rank), orders, own, CPU)
        assert p2p_sender.extra_bytes <= room
        p2p_sender.send(Mail(trainer_rank, boxes))
        assert p2p_sender.sent_bytes <= links[trainer_rank].sum()
    for e, t in enumerate(plans):
        targets = empty_targets(copies[e])
        own = {r: int(s) for r, s in enumerate(share[:, e]) if s}
        transport = P2pReceiver(reads_of(e, index, t, targets), own, Mail(layout.trainer_ranks + e, boxes))
        transport.move()
        traffic = transport.traffic
        assert traffic.received_bytes == sum(traffic.read_bytes.values()) == t.least_bytes()
        assert transport.extra_bytes <= room
        expected = loaded(copies[e], whole)
        assert all(torch.equal(targets[name], expected[name]) for name in expected)
    assert not any(boxes.values())


# -- real processes


def train(trainer, mesh_shape, kind, dtype, bucket_bytes, updates):
    sender = WeightSender.over(trainer.group, trainer.send, bucket_bytes=bucket_bytes, timeout_s=30, transport="p2p")
    state = State(mesh_shape, kind, dtype)
    transfers = []
    for version in range(1, updates + 1):
        state.become(version)
        sender.update(state.given)
        transfers.append(sender._worker._transfers[0]._prepared.command.transfer)
    sender.close()
    return transfers


def serve(rank, size, requests, mesh_shape, kind, dtype, bucket_bytes, updates):
    model = ToyRank(rank, size, dtype)
    receiver = WeightReceiver(TracedModel(model), rank, size, CPU)
    differing, sizes = [], []
    for version, request in enumerate(requests, start=1):
        requests.answer(receiver.update(request))
        stock = ToyRank(rank, size, dtype)
        stock.load_weights(checkpoint(version, dtype).items())
        live = dict(model.named_parameters())
        differing += [(version, n) for n, p in stock.named_parameters() if not torch.equal(live[n], p)]
        end, intake = receiver._executor.transfer.end, receiver._executor.transfer.target.read_plan
        assert end.traffic.received_bytes == intake.least_bytes() == sum(end.traffic.read_bytes.values())
        sizes.append(end.nbytes)
    return differing, sizes[-1]


def train_in_parts(*arguments):
    with patch("sglang_reshard.routes.p2p.links.IN_PLACE_BYTES", 64):
        return train(*arguments)


def serve_in_parts(*arguments):
    with patch("sglang_reshard.routes.p2p.links.IN_PLACE_BYTES", 64):
        return serve(*arguments)


IN_PARTS = train_in_parts, serve_in_parts


def run(mesh_shape, engines, kind, sides=(train, serve)):
    arguments = mesh_shape, kind, torch.float32, MIB, 3
    trainers = int(torch.Size(mesh_shape).numel())
    transfers, served = run_world(trainers, engines, *sides, *arguments)
    assert [differing for differing, _ in served] == [[]] * engines
    assert transfers == [[transfers[0][0]] * 3] * trainers, "what is ready stays so"
    return max(extra for _, extra in served)


def train_with_moved_memory(trainer, updates):
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport="p2p")
    keys, kept = [], []
    for version in range(1, updates + 1):
        state = State((2,), "fsdp", torch.float32)
        kept.append(state)  # so that the next one has other addresses
        state.become(version)
        sender.update(state.given)
        dist.barrier()
        keys.append(sender._worker._session.client.num_keys())
        dist.barrier()
    sender.close()
    return keys


def serve_whatever_comes(rank, size, requests, _updates):
    receiver, connected = WeightReceiver(TracedModel(ToyRank(rank, size, torch.float32)), rank, size, CPU), set()
    for request in requests:
        requests.answer(receiver.update(request))
        connected.add(receiver._executor.transfer.command.transfer)
    return len(connected)


def test_connections_that_are_made_anew_leave_no_keys_behind():
    (keys, _), connected = run_world(2, 2, train_with_moved_memory, serve_whatever_comes, 6)
    assert connected == [6, 6]
    assert keys[5] == keys[1]


def test_large_boxes_are_sent_without_a_bucket():
    """What the buckets need less is what went in place: every box of 64 bytes that is contiguous on a side."""
    whole, in_parts = (run((2, 2), 4, "fsdp_tp", sides=sides) for sides in [(train, serve), IN_PARTS])
    assert in_parts < whole
