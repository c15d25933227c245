"""GPU memory by allocation: one handle for each, noticed when it is another one, opened and closed once."""

import pytest
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.gpu.runtime import rank_device, trainer_device
from sglang_reshard.memory.gpu_memory import MARK_WORDS
from sglang_reshard.memory.mapping import Handles, MemoryExporter
from sglang_reshard.memory.peer_memory import PeerMemory, unreadable_reason
from sglang_reshard.protocol.session import Session
from sglang_reshard.trainer.publisher import ShardPublisher
from support.gpu_runtime import GPU, shard_in

CPU, UUID = torch.device("cpu"), "GPU-of-the-trainer"


def some_shards(gpu):
    """Five in two allocations, as torch's allocator cuts them, with gaps; and one without elements."""
    first, second = gpu.allocate(2048), gpu.allocate(1024)
    shards = [
        first[512:560].view(torch.float32).view(3, 4),
        second[0:64].view(torch.bfloat16).view(4, 8).t(),
        first[1024:1040],
        first[0:64].view(torch.int64)[2:6],
        torch.empty(0, 7),
        second[512:576].view(torch.float32),
    ]
    for number, shard in enumerate(shards):
        shard.copy_(torch.arange(shard.numel()).view(shard.shape) + number)
    return shards


def test_every_allocation_is_one_handle_and_asked_for_once(gpu):
    shards = some_shards(gpu)
    exporter = MemoryExporter(0)
    handles = exporter.export(shards)
    assert [(s.nbytes, s.device_uuid) for s in handles.storages] == [(2048, UUID), (1024, UUID)]
    assert [(v.storage, v.offset) for v in handles.shards] == [(0, 128), (1, 0), (0, 1024), (0, 2), (-1, 0), (1, 128)]
    assert (gpu.count("allocation"), gpu.count("export")) == (3, 3)  # with that of the mark
    assert exporter.export(shards) == handles
    assert (gpu.count("allocation"), gpu.count("export")) == (6, 3)


def test_shards_are_read_through_mappings_of_the_engines_own_device(gpu):
    shards = some_shards(gpu)
    peer = PeerMemory(0, MemoryExporter(0).export(shards), GPU)
    for number, shard in enumerate(shards):
        if shard.numel():
            assert torch.equal(shard_in(peer, number, shard), shard)
    shards[0].fill_(9)
    assert shard_in(peer, 0, shards[0]).eq(9).all()
    assert [c[0] for c in gpu.calls if c[-1] == GPU] == ["open", "open"]
    peer.close()
    assert sorted(gpu.opened.values()) == [0, 0]


def test_what_was_opened_is_closed_if_the_rest_cannot_be(gpu):
    shards = some_shards(gpu)
    handles = MemoryExporter(0).export(shards)
    gpu.free(shards[1])
    with pytest.raises(Unsupported, match=r"trainer rank 7 on GPU GPU-of-the-trainer cannot be mapped for cuda:3"):
        PeerMemory(7, handles, GPU)
    assert not +gpu.opened


def test_an_engine_rank_without_a_gpu_cannot_map_gpu_memory(gpu):
    handles = MemoryExporter(0).export(some_shards(gpu))
    with pytest.raises(Unsupported, match=r"cannot be mapped by an engine rank on cpu; use transport='p2p'"):
        PeerMemory(0, handles, CPU)


def test_memory_without_handles_is_published_with_the_reason(gpu):
    """Even transport="p2p" failed by the export: expandable segments, cudaMallocAsync, pools of virtual memory."""
    shard = some_shards(gpu)[0]
    gpu.without_handles = "its GPU memory has no CUDA IPC handle"
    handles = MemoryExporter(5).export([shard], ["lm_head"])
    assert handles == Handles((), (), "trainer rank 5: lm_head: its GPU memory has no CUDA IPC handle")
    publisher = ShardPublisher(Session.host(), 0, (0,))
    first = publisher.publish([("lm_head", shard)])
    assert publisher.publish([("lm_head", shard)]) is first
    assert publisher.shards([("lm_head", shard)])[0].data_ptr() == shard.data_ptr()  # to be sent
    with pytest.raises(Unsupported, match="lm_head: its GPU memory has no CUDA IPC handle"):
        PeerMemory(5, handles, GPU)
    assert unreadable_reason(handles, 5, GPU) == handles.reason


@pytest.mark.parametrize("broken", [0, MARK_WORDS - 1])
def test_memory_that_reads_as_other_bytes_cannot_be_mapped(gpu, broken):
    """Behind PCIe ACS or an IOMMU reads from GPU to GPU may end, and bring what nobody wrote."""
    handles = MemoryExporter(0).export(some_shards(gpu))
    assert unreadable_reason(handles, 0, GPU) == ""
    gpu.pages[0].view(torch.int64)[broken] ^= 1
    reason = unreadable_reason(handles, 0, GPU)
    assert reason.startswith("the memory of trainer rank 0 on GPU GPU-of-the-trainer is mapped for cuda:3 and reads as")
    assert "NCCL_P2P_DISABLE=1" in reason


def test_where_there_is_no_memory_for_a_mark_a_handle_is_tried(gpu, monkeypatch):
    shards = some_shards(gpu)

    def no_room(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(gpu, "filled", no_room)
    handles = MemoryExporter(0).export(shards)
    assert handles.marks == ()
    assert unreadable_reason(handles, 0, GPU) == ""
    assert gpu.count("open") == 1


# -- memory that is not what it was


@pytest.mark.parametrize("counted", [True, False])
def test_allocations_are_asked_for_only_once_torchs_allocator_has_freed_any_or_does_not_count(gpu, counted):
    """There are thousands, and each takes four calls of the driver, in every update."""
    gpu.freed = 0 if counted else None
    memory, other = gpu.allocate(64), gpu.allocate(64)
    exporter = MemoryExporter(0)
    exporter.export([memory])
    asked = []
    for change in (lambda: None, lambda: gpu.free(other), lambda: None):
        change()
        before = gpu.count("allocation")
        assert exporter.is_current()
        asked.append(gpu.count("allocation") - before)
    assert asked == ([0, 2, 0] if counted else [2, 2, 2])
    gpu.reallocate(memory)
    assert not exporter.is_current()


# -- what must have ended before memory is read


def test_every_gpu_that_a_shard_is_on_is_waited_for_in_every_update(gpu, monkeypatch):
    """`torch.cuda.synchronize()` waits for the thread's current GPU only."""
    tensors = [("a", gpu.allocate(8)), ("b", gpu.allocate(8))]
    addresses = [tensor.data_ptr() for _, tensor in tensors]
    devices = {address: torch.device("cuda", number) for number, address in enumerate(addresses)}
    monkeypatch.setattr(torch.Tensor, "device", property(lambda t: devices.get(t.data_ptr(), CPU)), raising=False)
    publisher = ShardPublisher(Session.host(), 0, (0,))
    for _ in range(2):
        publisher.publish(tensors)
    waits = [call for call in gpu.calls if call[0] == "synchronize"]
    assert waits == [("synchronize", "cuda:0", "cuda:1")] * 2
    assert gpu.calls.index(waits[0]) < gpu.calls.index(next(c for c in gpu.calls if c[0] == "export"))


# -- what ranks announce of their GPUs


def test_a_rank_announces_its_gpu_and_what_nccl_s_members_must_agree_on(gpu, monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # need not agree
    expected = {"version": "2.99", "NCCL_CUMEM_ENABLE": "0"}
    assert rank_device(GPU) == RankGpuInfo(UUID, (UUID,), "native", expected)
    assert rank_device(None) == rank_device(CPU) == RankGpuInfo()


def test_a_trainer_rank_with_offloaded_shards_has_the_gpu_that_its_process_uses(gpu):
    assert trainer_device([torch.ones(1)]) == GPU
    assert trainer_device([torch.ones(1), gpu.allocate(4)]) == CPU, "its shards'"
    gpu._uses_gpu = False
    assert trainer_device([torch.ones(1)]) is None
