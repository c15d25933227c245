"""Offloaded shards: copied in every update to where they were, read through one mapping, registered with CUDA once."""

import os
from types import SimpleNamespace

import torch

from sglang_reshard.layout.regions import LocalRegion
from sglang_reshard.memory import peer_memory as memory_module
from sglang_reshard.memory.host_arena import HostArena
from sglang_reshard.memory.mapping import MemoryExporter
from sglang_reshard.memory.peer_memory import PeerMemory, ShardRead
from sglang_reshard.protocol.session import Session
from sglang_reshard.trainer.publisher import ShardPublisher
from support.gpu_runtime import GPU, one_process_runtime, shard_in


def some_shards(value=0):
    flat = torch.arange(24.0) + value
    fused = torch.arange(6, dtype=torch.bfloat16).view(3, 2).t() + value
    return [flat[:12].view(3, 4), fused, torch.empty(0, 5), torch.ones(5, dtype=torch.uint8) + value, fused, flat[12:]]


def test_offloaded_shards_are_copied_and_stay_as_they_are(gpu):
    shards = some_shards()
    exporter = MemoryExporter(0)
    handles = exporter.export(shards)
    assert len(handles.storages) == 1
    assert not any(shard.is_shared() for shard in shards)
    peer = PeerMemory(0, handles, GPU)
    for number, shard in enumerate(shards):
        if shard.numel():
            assert torch.equal(shard_in(peer, number, shard), shard)
            assert shard_in(peer, number, shard).device.type == "cpu"
            assert shard_in(peer, number, shard).data_ptr() % 64 == 0
    assert handles.shards[1] == handles.shards[4]  # the same memory is copied once
    peer.close()


def named(shards):
    return [(f"t{i}", shard) for i, shard in enumerate(shards)]


def test_senders_to_several_engines_share_one_arena_and_copy_once_in_an_update(gpu, monkeypatch):
    copies = []
    refresh = HostArena.refresh_again
    monkeypatch.setattr(HostArena, "refresh_again", lambda arena: (copies.append(arena), refresh(arena)))
    exporter, shards = MemoryExporter(0), some_shards()
    publishers = [ShardPublisher(Session.host(), 0, (0,), exporter) for _ in range(3)]
    for update in range(2):
        exporter.begin_update()
        shards[0].fill_(update)
        published = [publisher.publish(named(shards)) for publisher in publishers]
        peer = PeerMemory(0, publishers[2]._handles, GPU)
        assert shard_in(peer, 0, shards[0]).eq(update).all()
        peer.close()
        assert len({p.handles for p in published}) == 1
    assert len(copies) == 2
    publishers[0].close()
    assert exporter.export(shards) == publishers[1]._handles
    exporter.close()


def test_too_little_shared_memory_leaves_p2p(gpu, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=100))
    handles = MemoryExporter(3).export([torch.ones(100)])
    assert handles.storages == ()
    assert handles.reason.startswith("trainer rank 3 has to move 448 bytes of shards into shared memory, but /dev/shm")


def test_pinned_shards_are_copied_whoever_has_them_and_the_others_are_moved_in_place():
    """Moved in place they would be pageable from then on."""
    with one_process_runtime(uses_gpu=False) as runtime:
        pinned, pageable = torch.ones(3), torch.ones(4)
        runtime.pinned = {pinned.data_ptr()}
        exporter = MemoryExporter(0)
        handles = exporter.export([pinned, pageable])
        assert (pinned.is_shared(), pageable.is_shared()) == (False, True)
        peer = PeerMemory(0, handles, torch.device("cpu"))
        assert torch.equal(shard_in(peer, 1, pageable), pageable)
        assert torch.equal(shard_in(peer, 0, pinned), pinned)
        assert not runtime.registered
        peer.close()


def test_only_pages_that_are_read_are_registered(gpu):
    """An arena has all shards of a trainer rank; an engine rank reads a part of them."""
    size = 1 << 18
    shards = [torch.full((size,), float(number)) for number in range(6)]  # of 1 MiB
    exporter = MemoryExporter(0)
    handles = exporter.export(shards)
    rows = LocalRegion((1024,), (1024,), (1,)), LocalRegion((5000,), (1,), (1,))
    peer = PeerMemory(0, handles, GPU, [ShardRead(1, rows[0], 4), ShardRead(4, rows[1], 4), ShardRead(1, rows[0], 4)])
    base = shard_in(peer, 0, shards[0]).data_ptr()
    assert {a - base: n for a, n in gpu.registered.items()} == {(1 << 20) + 4096: 4096, (4 << 20) + 16384: 4096}
    assert peer.region(1, rows[0], torch.float32).eq(1).all()
    assert peer.covers([ShardRead(1, LocalRegion((1030,), (5,), (1,)), 4)])
    assert not peer.covers([ShardRead(1, LocalRegion((0,), (5,), (1,)), 4)])
    peer.close()
    assert not gpu.registered
    every_other = [ShardRead(number, rows[1], 4) for number in (0, 2, 4)]
    in_the_first = [ShardRead(0, LocalRegion((element,), (1,), (1,)), 4) for element in (0, 9000)]
    near = PeerMemory(0, handles, GPU, every_other + in_the_first)
    assert sorted(gpu.registered.values()) == [4096, 4096, 36864], "pages that are near are one range"
    near.close()


def test_all_pages_are_registered_or_none(gpu, monkeypatch):
    """A copy may reach over several ranges, and is made by a kernel if the first can be reached."""
    shards = [torch.ones(1 << 18) for _ in range(3)]
    exporter = MemoryExporter(0)
    handles = exporter.export(shards)
    real, asked = gpu.register_host, []

    def second_fails(address, nbytes, device):
        asked.append(address)
        return len(asked) != 2 and real(address, nbytes, device)

    monkeypatch.setattr(gpu, "register_host", second_fails)
    peer = PeerMemory(0, handles, GPU, [ShardRead(n, LocalRegion((0,), (8,), (1,)), 4) for n in (0, 2)])
    assert len(asked) == 2
    assert not gpu.registered
    assert shard_in(peer, 2, shards[2]).eq(1).all()
    peer.close()


def test_where_the_host_cannot_register_memory_it_is_read_all_the_same(gpu, told):
    memory_module._warn_unregistered.cache_clear()
    gpu.can_register = False
    exporter = MemoryExporter(0)
    handles = exporter.export([torch.arange(3.0)])
    for _ in range(2):
        peer = PeerMemory(0, handles, GPU)
        assert shard_in(peer, 0, torch.empty(3)).tolist() == [0, 1, 2]
        peer.close()
    assert len([r for r in told.records if "cannot be registered with CUDA" in r.message]) == 1


def test_nothing_is_copied_before_the_way_to_the_host_has_ended(gpu, monkeypatch):
    """`tensor.to("cpu", non_blocking=True)` returns before the values are there."""
    shard = torch.zeros(3)

    def arrive(devices):
        assert GPU in devices
        shard.fill_(6)

    monkeypatch.setattr(gpu, "synchronize", arrive)
    publisher = ShardPublisher(Session.host(), 0, (0,))
    publisher.publish([("w", shard)])
    peer = PeerMemory(0, publisher._handles, GPU)
    assert shard_in(peer, 0, shard).tolist() == [6.0] * 3
    peer.close()
    publisher.close()
