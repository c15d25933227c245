"""Exact boxes, sent: what is ready to send is used again, released with the shards, and leaves nothing open."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from support.sent import CPU, open_here
from support.toy import ToyRank, checkpoint
from support.toy_trainers import State, sharded
from support.world import run_world

MIB = 1 << 20


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


def train_released(trainer):
    """What is kept ready keeps the shards' memory, until it is released."""
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=10, transport="p2p")
    state = checkpoint(1)
    sender.update(state.items())
    alive = torch.multiprocessing.reductions.StorageWeakRef(state["up.weight"].untyped_storage())
    state["up.weight"] = state["up.weight"].clone()
    kept = not alive.expired()
    sender.release()
    freed = alive.expired()
    sender.update(state.items())
    route = sender._worker._transfers[0]._prepared.command.transfer
    state["up.weight"] = state["up.weight"].clone()
    sender.update(state.items())
    moved = sender._worker._transfers[0]._prepared.command.transfer
    sender.close()
    return kept, freed, route, moved


def serve_all(rank, size, requests):
    receiver = WeightReceiver(TracedModel(ToyRank(rank, size)), rank, size, CPU)
    for request in requests:
        requests.answer(receiver.update(request))


def test_shards_that_are_released_or_replaced_are_made_ready_again():
    told, _ = run_world(1, 1, train_released, serve_all)
    ((kept, freed, route, moved),) = told
    assert kept
    assert freed
    assert (route.split("/")[0], moved.split("/")[0]) == ("2", "3")


def train_for_long(trainer, updates):
    """Every other update makes all ready again."""
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=10, transport="p2p")
    state = dict(sharded(1, (2,), "tp", torch.float32))
    counts = []
    for update in range(updates):
        if update % 2:
            sender.release()
        sender.update(state.items())
        counts.append((open_here(), sender._session.client.num_keys()))
    sender.close()
    return counts


def serve_for_long(rank, size, requests, updates):
    receiver = WeightReceiver(TracedModel(ToyRank(rank, size)), rank, size, CPU)
    counts = []
    for request in requests:
        requests.answer(receiver.update(request))
        counts.append(open_here())
    return counts


def test_many_updates_leave_nothing_open_and_nothing_said():
    trained, served = run_world(2, 2, train_for_long, serve_for_long, 24)
    # Threads that end take a while on a busy host, so the end is where the count is least. A leak of one an update
    # is six more there than it ever was in the first half.
    for counts in [*served, *([c for c, _ in counts] for counts in trained)]:
        assert min(counts[18:]) <= max(counts[:12])
    for counts in trained:
        keys = [k for _, k in counts]
        assert keys[23] - keys[11] <= 6 * 4  # gloo leaves one for each member of each group
