"""Whatever handles and layouts say: they are refused, or every view of them lies in the memory that was handed over."""

import os

import msgspec
import pytest
import torch

from fuzz.arbitrary import changed, value_of
from fuzz.exported import some_exported, strangers
from fuzz.settings import fuzzed
from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from sglang_reshard.layout.regions import Region
from sglang_reshard.memory.mapping import Handles, ShmStorage
from sglang_reshard.memory.peer_memory import PeerMemory
from sglang_reshard.protocol.validation import check_handles, check_layout
from sglang_reshard.sources import SourceLayout

EXPORTED = some_exported(24)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before  # what was open before may close meanwhile


@pytest.fixture(scope="module")
def others():
    with strangers() as found:
        yield found


def received(message, kind):
    digest, blob = pack_blob(message)
    return unpack_blob(blob, kind, digest)


def bits(tensor):
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def read_all(layout, handles, trainer_rank, storages):
    """Every shard that a rank holds, as a transport would read it; the bytes are those of the storage that is named."""
    peer = PeerMemory(trainer_rank, handles)
    for number, tensor in enumerate(layout.tensors):
        dtype = getattr(torch, tensor.dtype)
        held = layout.shard_map(tensor)
        for shard in held.shards_of(trainer_rank):
            at = held.to_local(shard, Region.of(shard.box))
            seen = peer.region(number, at, dtype)
            memory = seen.untyped_storage()
            reach = 1 + sum((n - 1) * s for n, s in zip(seen.shape, seen.stride(), strict=True))
            end = seen.data_ptr() + reach * dtype.itemsize
            assert memory.data_ptr() <= seen.data_ptr() < end <= memory.data_ptr() + memory.nbytes()
            view = handles.shards[number]
            offset, strides = at.memory(view.strides)
            handed = storages[handles.storages[view.storage].inode]
            own = torch.empty(0, dtype=dtype).set_(handed, view.offset + offset, at.count, strides)
            assert torch.equal(bits(seen), bits(own))


@fuzzed
def test_changed_handles_and_layouts_are_refused_or_read_in_bounds(random):
    base = random.choice(EXPORTED)
    layout, handles = base.layout, base.handles
    for _ in range(random.choice((1, 1, 2, 3))):
        if random.random() < 0.6:
            handles = changed(handles, random)
        else:
            layout = changed(layout, random)
    try:
        layout, handles = received(layout, SourceLayout), received(handles, Handles)
        check_layout(layout, base.layout.trainer_ranks)
        check_handles(handles, layout, base.trainer_rank)
        read_all(layout, handles, base.trainer_rank, base.storages())
    except ReshardError:
        pass


@fuzzed
def test_arbitrary_handles_are_refused_or_read_in_bounds(random):
    base = random.choice(EXPORTED)
    handles = value_of(Handles, random)
    if random.random() < 0.5:  # right about the memory, and about nothing else
        handles = msgspec.structs.replace(handles, storages=base.handles.storages, reason="")
    try:
        check_handles(received(handles, Handles), base.layout, base.trainer_rank)
        read_all(base.layout, handles, base.trainer_rank, base.storages())
    except ReshardError:
        pass


@fuzzed
def test_views_without_any_check_end_in_the_stretch(random):
    """The last line of defence, were the checks left out: no address outside of what is mapped."""
    base = random.choice(EXPORTED)
    peer = PeerMemory(base.trainer_rank, base.handles)
    dtype = random.choice((torch.uint8, torch.float32, torch.int64))
    ends = (0, 1, -1, 7, 4095, 4096, 1 << 20, 1 << 62, -(1 << 62), (1 << 63) - 1)
    dims = random.randrange(3)
    strides, count = (tuple(random.choice(ends) for _ in range(dims)) for _ in range(2))
    count = tuple(abs(n) % 10_000 + 1 if random.random() < 0.9 else abs(n) for n in count)
    try:
        view = peer.view(0, random.choice(ends), strides, count, dtype)
    except ReshardError:
        return
    if view.numel() <= 1 << 20:
        view.sum()


@fuzzed
def test_what_is_no_memory_of_the_trainer_is_refused_without_waiting(others, random):
    base = random.choice(EXPORTED)
    stranger = random.choice(others)
    storages = list(base.handles.storages)
    nbytes = random.choice((stranger.nbytes, storages[0].nbytes))
    storages[random.randrange(len(storages))] = ShmStorage(stranger.pid, stranger.fd, stranger.inode, nbytes)
    with pytest.raises(ReshardError, match=f"trainer rank {base.trainer_rank}"):
        PeerMemory(base.trainer_rank, Handles(tuple(storages), base.handles.shards))
