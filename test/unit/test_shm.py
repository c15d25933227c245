"""Many files as one tensor: what is written to them is seen, nothing stays open, and nobody can write back."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.memory.shm import map_files


def files(folder, sizes):
    found = []
    for i, size in enumerate(sizes):
        path = folder / f"file {i}"
        path.write_bytes(bytes([i + 1]) * size)
        found.append((str(path), size))
    return found


def mapped(given):
    """As one tensor, and where each begins."""
    return map_files([size for _, size in given], lambda number: os.open(given[number][0], os.O_RDONLY))


def mapped_files(folder):
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_each_file_begins_at_a_page_and_is_seen_whole(tmp_path):
    sizes = [1, 4096, 5000, 12288]
    tensor, begins = mapped(files(tmp_path, sizes))
    assert begins == [0, 4096, 8192, 16384]
    for i, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        assert tensor[begin : begin + size].eq(i + 1).all()


def test_the_last_view_keeps_the_mappings_and_no_descriptor_is_kept(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    tensor, _ = mapped(files(tmp_path, [5000] * 10))
    assert len(os.listdir("/proc/self/fd")) == before
    assert mapped_files(tmp_path) == 10
    view = torch.empty(0, dtype=torch.bfloat16).set_(tensor.untyped_storage(), 4, (3, 2), (2, 1))
    del tensor
    gc.collect()
    assert mapped_files(tmp_path) == 10
    assert view.view(torch.uint8).eq(1).all()
    del view
    gc.collect()
    assert mapped_files(tmp_path) == 0


def test_a_file_that_is_smaller_than_it_is_said_to_be_is_not_mapped(tmp_path):
    """To read beyond its end would end the process."""
    (path, _), *rest = files(tmp_path, [4096, 100])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Mismatch, match=r"fewer than 4,097 bytes"):
        mapped([*rest, (path, 4097)])
    gc.collect()
    assert mapped_files(tmp_path) == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_writing_is_not_possible(tmp_path):
    given = files(tmp_path, [64])
    code = (
        "import os, sys; from sglang_reshard.memory.shm import map_files\n"
        "tensor, _ = map_files([64], lambda _: os.open(sys.argv[1], os.O_RDONLY))\n"
        "assert tensor[0] == 1; tensor[0] = 2"
    )
    ended = subprocess.run([sys.executable, "-c", code, given[0][0]], timeout=60, check=False)
    assert ended.returncode == -signal.SIGSEGV
    assert Path(given[0][0]).read_bytes() == b"\x01" * 64
