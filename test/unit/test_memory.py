"""Handing memory over by handle: one handle a storage, none again while nothing moves, nothing left behind."""

import os
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import LocalRegion
from sglang_reshard.memory.mapping import MemoryExporter
from sglang_reshard.memory.peer_memory import PeerMemory


def shard_in(memory, number, like):
    """Shard `number` as an engine rank sees it; it has the shape and dtype of `like`."""
    return memory.region(number, LocalRegion.whole(tuple(like.shape)), like.dtype)


def test_too_little_shared_memory_is_refused_before_anything_is_moved(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=1000))
    weight = torch.zeros(1000)
    with pytest.raises(Unsupported, match=r"trainer rank 3 .* 4,096 bytes .* 1,000 bytes free"):
        MemoryExporter(3).export([weight])
    assert not weight.is_shared()


def test_one_buffer_of_several_dtypes_and_offsets_is_one_handle():
    buffer = torch.zeros(64, dtype=torch.uint8)
    shards = [buffer[8:24].view(torch.float32), buffer[24:32].view(torch.bfloat16).view(2, 2), buffer[1:4]]
    handles = MemoryExporter(0).export(shards)
    assert len(handles.storages) == 1
    assert [view.offset for view in handles.shards] == [2, 12, 1]
    for i, shard in enumerate(shards):
        shard.fill_(i + 1)
    peer = PeerMemory(0, handles)
    for i, shard in enumerate(shards):
        assert torch.equal(shard_in(peer, i, shard), shard)


def test_what_has_no_memory_to_hand_over_is_refused_by_name(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(40))
    mapped = torch.empty(0).set_(torch.UntypedStorage.from_file(str(file), shared=True, nbytes=40))
    with pytest.raises(Unsupported, match=r"trainer rank 3: head is mapped from a file, .* clone\(\)"):
        MemoryExporter(3).export([torch.ones(1), mapped[2:4]], ["norm", "head"])
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(Unsupported, match="trainer rank 3: tensor number 0 no longer has memory"):
        MemoryExporter(3).export([freed])


def test_the_memory_of_a_process_that_ended_is_refused():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    handles = MemoryExporter(0).export([weight := torch.zeros(4)])
    gone = msgspec.structs.replace(handles.storages[0], pid=ended.pid)
    with pytest.raises(Unsupported, match=r"trainer rank 2 .*cannot be opened"):
        PeerMemory(2, msgspec.structs.replace(handles, storages=(gone,)))
    assert weight.is_shared()


def test_another_file_under_the_same_number_is_refused():
    handles = MemoryExporter(0).export([weight := torch.zeros(4)])
    other = msgspec.structs.replace(handles.storages[0], inode=handles.storages[0].inode + 1)
    with pytest.raises(Mismatch, match="not what that rank announced"):
        PeerMemory(2, msgspec.structs.replace(handles, storages=(other,)))
    assert weight.is_shared()


@pytest.mark.parametrize(("hard", "says"), [(4096, ""), (256, "trainer rank 1 has to keep 300 more file descriptors")])
def test_the_limit_of_open_files_is_raised_or_told(hard, says):
    """In a process of its own, as a limit that was lowered stays so."""
    code = (
        "import resource, torch\n"
        "from sglang_reshard.memory.mapping import MemoryExporter\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (128, {hard}))\n"
        "tensors = [torch.ones(1) for _ in range(300)]\n"
        "print(len(MemoryExporter(1).export(tensors).storages))"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True)
    assert ended.stdout == ("" if says else "300\n")
    assert says in ended.stderr
