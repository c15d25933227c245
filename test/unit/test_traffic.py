"""Nothing gathers: every collective and every byte of an update, counted on every rank.

The counters sit on the process groups' own methods and on the session's frames, so that they see whatever
the code may call, not only what it is known to call.
"""

import collections

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sglang_reshard.control.connection import FrameReader, FrameWriter
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world

HIDDEN = 512  # 9.8 MB of weights: shards far larger than any metadata
BUCKET = 256 * 1024
METADATA = 64 * 1024  # bytes that may converge on one rank
COLLECTIVES = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "scatter", "reduce",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "send", "recv", "recv_anysource",
)  # fmt: skip


def tensor_bytes(arguments):
    """Bytes of all tensors among a call's arguments, however nested."""
    if isinstance(arguments, torch.Tensor):
        return arguments.numel() * arguments.element_size()
    if isinstance(arguments, (list, tuple)):
        return sum(map(tensor_bytes, arguments))
    return 0


class Counters:
    """Bytes by collective, and through the session. Made before the update, in every process."""

    def __init__(self):
        self.collectives = collections.Counter()
        self.store = collections.Counter()
        self.forbidden = []
        for owner in (dist.ProcessGroup, dist.ProcessGroupGloo):
            for name in COLLECTIVES:
                if hasattr(owner, name):
                    self._count(owner, name)
        for owner, name in (
            (DTensor, "full_tensor"),
            (dist, "gather_object"),
            (dist, "all_gather_object"),
            (dist, "gather"),
        ):
            setattr(owner, name, lambda *_, name=name, **__: self.forbidden.append(name))
        self._count_frames()

    def _count(self, owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            self.collectives[name] += tensor_bytes(args[1:]) + tensor_bytes(list(kwargs.values()))
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    def _count_frames(self):
        """All that goes over this process's connection to the session, either way."""
        frame_of, feed = FrameWriter.frame, FrameReader.feed

        def counted_frame(writer, message):
            frame = frame_of(writer, message)
            self.store["set"] += len(frame)
            return frame

        def counted_feed(reader, data):
            self.store["get"] += len(data)
            return feed(reader, data)

        FrameWriter.frame, FrameReader.feed = counted_frame, counted_feed


def train(trainer, transport):
    mesh = init_device_mesh("cpu", (trainer.size,), mesh_dim_names=("tp",))
    placements = {"down.weight": [Shard(1)], "norm.weight": [Replicate()]}
    state = {
        name: distribute_tensor(tensor, mesh, placements.get(name, [Shard(0)]), src_data_rank=None)
        for name, tensor in checkpoint(1, hidden=HIDDEN).items()
    }
    sender = trainer.sender(timeout_s=120, bucket_bytes=BUCKET, transport=transport)
    counters = Counters()
    report = sender.update(state.items())
    seen = report, counters.collectives, counters.store, counters.forbidden
    return seen


def serve(rank, size, requests, transport):
    model = ToyRank(rank, size, hidden=HIDDEN)
    receiver = receiver_of(model)
    counters = Counters()
    for request in requests:
        requests.answer(receiver.update(request))
    equal = not model.differing(checkpoint(1, hidden=HIDDEN))
    return equal, counters.collectives, counters.store, counters.forbidden


@pytest.mark.parametrize("transport", ["broadcast", "p2p", "ipc"])
def test_only_metadata_converges_on_any_rank(transport):
    trainers, engines = run_world(4, 16, train, serve, transport)
    report = trainers[0][0]
    shard = report.trainer_ranks[0].shard_bytes
    assert shard > 30 * METADATA, "the shards must dwarf what is allowed as metadata"
    for rank, (_, collectives, store, forbidden) in enumerate(trainers):
        assert forbidden == []
        sent = collectives.pop("send", 0) if transport == "p2p" else 0
        assert sum(collectives.values()) == 0, f"trainer rank {rank} took part in {collectives}"
        # The control server, which passes metadata between all ranks, is trainer rank 0's.
        allowed = METADATA * (20 if rank == 0 else 1)
        assert sum(store.values()) < allowed, f"trainer rank {rank} moved {store} through the session"
        if transport == "broadcast":
            assert report.trainer_ranks[rank].sent_bytes <= 1.05 * report.trainer_ranks[rank].shard_bytes
        # All that its engine ranks lack is its shard, and replicas for each; whole messages, padding included.
        assert sent <= 1.1 * report.trainer_ranks[rank].sent_bytes
    whole = sum(t.numel() * 4 for t in checkpoint(1, hidden=HIDDEN).values())
    for rank, (equal, collectives, store, forbidden) in enumerate(engines):
        assert equal
        assert forbidden == []
        collectives.pop("send", None)  # engine rank 0's answers to the others' few bytes; what counts is what converges
        assert sum(store.values()) < METADATA
        received, least = report.engine_ranks[rank].received_bytes, report.engine_ranks[rank].least_bytes
        moved = sum(collectives.values())
        if transport == "broadcast":
            assert least <= received <= 0.3 * whole
            assert report.engine_ranks[rank].peak_extra_bytes <= 2 * BUCKET + (8 << 20)
            assert moved - collectives["broadcast"] < METADATA, f"engine rank {rank} took part in {collectives}"
            assert received - least < collectives["broadcast"] + METADATA
            assert collectives["broadcast"] <= 1.5 * shard, f"engine rank {rank}: {collectives}, a shard is {shard}"
        else:
            assert received == least
            sent = least if transport == "p2p" else 0
            assert sent <= moved < 1.01 * sent + METADATA, f"engine rank {rank} took part in {collectives}"


def test_the_counters_see_a_gather():
    """Negative control: a funnel to one rank shows in the counters."""
    told, _ = run_world(2, 0, gather_to_rank_0, serve, "")
    assert told[0] > HIDDEN * HIDDEN * 4


def gather_to_rank_0(trainer, transport):
    counters = Counters()
    shard = torch.zeros(HIDDEN, HIDDEN)
    parts = [torch.zeros_like(shard) for _ in range(trainer.size)]
    dist.all_gather(parts, shard)
    return sum(counters.collectives.values())
