"""Handles of memory that a trainer rank does not have are refused, before and while it is mapped."""

import os

import pytest
import torch
from msgspec.structs import replace

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from sglang_reshard.memory.gpu_memory import GpuAllocation, Mark
from sglang_reshard.memory.mapping import Handles, MemoryExporter, ShardView, ShmStorage
from sglang_reshard.memory.peer_memory import PeerMemory
from sglang_reshard.protocol.validation import check_handles
from sglang_reshard.sources import Mesh, Placement, SourceLayout, SourceTensor
from support.stated import BIG, GOOD, rows, stated


@pytest.fixture(scope="module")
def shards():
    """Trainer rank 0's: half of two matrices in one buffer, and a whole vector."""
    flat = torch.arange(16, dtype=torch.bfloat16)
    return [flat[:6].view(2, 3), flat[6:12].view(3, 2).t(), torch.ones(5, dtype=torch.bfloat16)]


@pytest.fixture(scope="module")
def handles(shards):
    found = MemoryExporter(0).export(shards)
    check_handles(found, GOOD, 0)
    return found


def received(handles):
    return unpack_blob(pack_blob(handles)[1], Handles)


def with_view(number, **changes):
    def change(handles):
        shards = list(handles.shards)
        shards[number] = replace(shards[number], **changes)
        return replace(handles, shards=tuple(shards))

    return change


def with_storage(number, **changes):
    def change(handles):
        storages = list(handles.storages)
        storages[number] = replace(storages[number], **changes)
        return replace(handles, storages=tuple(storages))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_view(1, storage=2), "trainer rank 0: the shard of t1 .* there are 2 storages"),
        (with_view(1, storage=-1), "the shard of t1 .* there are 2 storages"),
        (with_view(1, storage=-2), r"`int` >= -1 - at `\$.shards\[\d\]\[0\]`"),
        (with_view(0, offset=-1), r"`int` >= 0 - at `\$.shards\[\d\]\[1\]`"),
        (with_view(0, offset=11), "the shard of t0 .* reaches to byte 34 of 32"),
        (with_view(0, offset=BIG), "the shard of t0"),
        (with_view(0, strides=(14, 1)), "the shard of t0 .* reaches to byte 34 of 32"),
        (with_view(0, strides=(-3, 1)), r"`int` >= 0 - at `\$.shards\[\d\]\[2\]"),
        (with_view(0, strides=(3,)), "the shard of t0 .* strides do not fit"),
        (with_view(0, strides=(BIG, BIG)), "the shard of t0"),
        (with_view(2, strides=(2,)), "the shard of t2"),
        (lambda h: replace(h, shards=h.shards[:2]), "2 shards, but its layout has 3 tensors"),
        (lambda h: replace(h, shards=(*h.shards, h.shards[0])), "4 shards, but its layout has 3 tensors"),
        (lambda h: replace(h, storages=h.storages[:1]), "the shard of t2"),
        (with_storage(1, nbytes=8), "the shard of t2 .* reaches to byte 10 of 8"),
        (with_storage(1, nbytes=0), r"at `\$.storages\[\d\].nbytes`"),
        (with_storage(1, nbytes=BIG), r"at `\$.storages\[\d\].nbytes`"),
        (with_storage(1, pid=0), r"at `\$.storages\[\d\].pid`"),
        (with_storage(1, fd=-1), r"at `\$.storages\[\d\].fd`"),
        (with_storage(1, fd=1 << 31), r"at `\$.storages\[\d\].fd`"),
        (with_storage(1, inode=-1), r"at `\$.storages\[\d\].inode`"),
    ],
)
def test_handles_of_other_memory_than_there_is_are_refused(handles, change, says):
    with pytest.raises(Mismatch, match=says):
        check_handles(received(change(handles)), GOOD, 0)


def test_stated_holdings_reach_as_far_as_their_pieces_lie():
    layout = stated(rows((0, 2, (0,), 0), (2, 4, (1,), 3)))
    storages = (ShmStorage(1, 0, 1, 40),)
    check_handles(Handles(storages, (ShardView(0, 0, (2, 1)),)), layout, 1)
    with pytest.raises(Mismatch, match=r"a shard of \(5, 2\)"):
        check_handles(Handles(storages, (ShardView(0, 1, (2, 1)),)), layout, 1)


GPU = GpuAllocation("GPU-1", b"h" * 64, 1 << 20, 7)
FLAT = SourceLayout(1, (Mesh((1,), (0,)),), ((Placement(0),),), (SourceTensor("w", (8,), "float32", 0, 0),))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"nbytes": 31}, "the shard of w"),
        ({"nbytes": -1}, r"at `\$.storages\[\d\].nbytes`"),
        ({"nbytes": BIG}, r"at `\$.storages\[\d\].nbytes`"),
        ({"handle": b""}, "of length >= 64"),
        ({"handle": b"h" * 63}, "of length >= 64"),
        ({"handle": b"h" * 66}, "of length <= 64"),
        ({"device_uuid": ""}, r"at `\$.storages\[\d\].device_uuid`"),
        ({"device_uuid": "x" * 5000}, r"at `\$.storages\[\d\].device_uuid`"),
    ],
)
def test_handles_of_gpu_memory_that_cannot_be_are_refused(changes, says):
    handles = Handles((replace(GPU, **changes),), (ShardView(0, 0, (1,)),))
    if not says:
        check_handles(received(handles), FLAT, 0)
        return
    with pytest.raises(Mismatch, match=says):
        check_handles(received(handles), FLAT, 0)


def test_a_mark_lies_in_its_allocation():
    check_handles(received(Handles((), (), marks=(Mark(GPU, GPU.nbytes - 4096, 1),))), replace(FLAT, tensors=()), 0)
    for mark in (Mark(GPU, GPU.nbytes - 4088, 1), Mark(GPU, -8, 1), Mark(GPU, 4, 1), Mark(GPU, 0, -1)):
        with pytest.raises(Mismatch, match="mark"):
            check_handles(received(Handles((), (), marks=(mark,))), replace(FLAT, tensors=()), 0)


def test_a_rank_says_why_it_has_no_handles_and_has_none_then(handles):
    check_handles(Handles((), (), "trainer rank 0: no room"), GOOD, 0)
    for beside in (replace(handles, reason="none"), Handles((), handles.shards, "none")):
        with pytest.raises(Mismatch, match="a reason why it has no handles"):
            check_handles(beside, GOOD, 0)
    with pytest.raises(Mismatch, match=r"of length <= 4096 - at `\$.reason`"):
        received(Handles((), (), "x" * 5000))
    with pytest.raises(Unsupported, match="no room"):
        PeerMemory(0, Handles((), (), "trainer rank 0: no room"))


# -- what is opened


def storage_of(descriptor, nbytes=None):
    status = os.fstat(descriptor)
    return ShmStorage(os.getpid(), descriptor, status.st_ino, status.st_size if nbytes is None else nbytes)


def test_shared_memory_of_another_size_is_not_mapped():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4096)
    PeerMemory(4, Handles((storage_of(descriptor),), ()))
    for nbytes in (4095, 4097, 1 << 30):
        with pytest.raises(Mismatch, match=rf"trainer rank 4 .* 4,096 bytes, expected .* {nbytes:,} bytes"):
            PeerMemory(4, Handles((storage_of(descriptor, nbytes),), ()))
    os.close(descriptor)
    with pytest.raises(Unsupported, match="cannot be opened"):
        PeerMemory(4, Handles((ShmStorage(os.getpid(), descriptor, 1, 1),), ()))
