"""Two trainers write one snapshot: one of them wins, the other one gets an error, and what is published is whole.

A writer is stopped while it reads its files back, and another one of the same name begins.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.snapshots.manifest import write_atomically
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.extras.snapshots.writer_files import SnapshotFiles
from sglang_reshard.extras.snapshots.writer_folder import SnapshotFolder
from support.snapshot_writer import assert_consistent, is_whole, write
from support.world import run_world

DEADLINE_S = 30.0


@pytest.fixture(params=[True, False], ids=["locks", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system locks folders."""
    if not request.param:

        def refuse(_descriptor: int, _operation: int) -> None:
            raise OSError(errno.EBADF, "folders cannot be locked")  # as NFS does

        monkeypatch.setattr(fcntl, "flock", refuse)
    return bool(request.param)


@contextmanager
def halfway(folder: Path, version: int, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[Any]]:
    """Within it a writer has written its files, and not yet published them. It goes on at the end."""
    reached, go_on, described = threading.Event(), threading.Event(), SnapshotFiles.described

    def pausing(self: SnapshotFiles, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            assert go_on.wait(DEADLINE_S)
        return described(self, *args)

    monkeypatch.setattr(SnapshotFiles, "described", pausing)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, folder, version, name=name)
        try:
            assert reached.wait(DEADLINE_S)
            yield writing
        finally:
            go_on.set()


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_one_of_two_writers_of_a_name_wins(tmp_path: Path, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with halfway(tmp_path, 1, "best", monkeypatch) as writing:
        if locks:
            with pytest.raises(Mismatch, match=r"another trainer is writing .*/best, in .*; give each"):
                write(tmp_path, 2, name="best")
        else:
            write(tmp_path, 2, name="best")  # it ends first
    if locks:
        writing.result(DEADLINE_S)
    else:
        with pytest.raises(Mismatch, match="best already exists"):
            writing.result(DEADLINE_S)
    assert is_whole(tmp_path / "best")
    assert_consistent(tmp_path)
    assert hidden(tmp_path) == []


def test_a_writer_deletes_no_files_of_a_live_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has the name as unsettled, so every writer deletes what is left of it."""
    write(tmp_path, 1, name="best")
    with halfway(tmp_path, 2, "other", monkeypatch) as writing:
        found = (tmp_path / "snapshots.json").read_text().replace('"unsettled": []', '"unsettled": ["other"]')
        (tmp_path / "snapshots.json").write_text(found)
        write(tmp_path, 3)
    writing.result(DEADLINE_S)
    assert_consistent(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"best", "other", "step-3", "latest", "snapshots.json"}


def _begin(folder: Path, begun: Any) -> None:
    target = SnapshotFolder(folder, "best", 5.0)
    (target.partial / "model-00001-of-00001.safetensors").write_bytes(b"half")
    begun.set()
    threading.Event().wait(DEADLINE_S)


def test_a_writer_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    process = context.Process(target=_begin, args=(tmp_path, begun))
    process.start()
    try:
        assert begun.wait(DEADLINE_S)
        with pytest.raises(Mismatch, match="another trainer is writing"):
            write(tmp_path, 1, name="best")
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE_S)
    write(tmp_path, 1, name="best")
    assert is_whole(tmp_path / "best")
    assert hidden(tmp_path) == []


def test_a_writer_that_comes_back_finds_no_folder_of_another_one(tmp_path: Path) -> None:
    """A trainer rank that was stopped for long opens its files by name: nobody else may have that name by then."""
    first = SnapshotFolder(tmp_path, "best", 5.0)
    first.close()
    second = SnapshotFolder(tmp_path, "best", 5.0)
    second.close()
    assert first.partial != second.partial
    assert hidden(tmp_path) == []


def test_a_child_that_was_forked_keeps_no_lock(tmp_path: Path) -> None:
    target = SnapshotFolder(tmp_path, "best", 5.0)
    with target._locked():
        child = multiprocessing.get_context("fork").Process(target=threading.Event().wait, args=(DEADLINE_S,))
        child.start()
    try:
        target.close()
        write(tmp_path, 1, name="best", timeout_s=0.5)
    finally:
        child.kill()
        child.join(DEADLINE_S)


def test_a_file_that_several_replace_is_always_whole(tmp_path: Path) -> None:
    path = tmp_path / "list"
    contents = [bytes([65 + writer]) * 200_000 for writer in range(4)]
    path.write_bytes(contents[0])
    with ThreadPoolExecutor(4) as pool:
        writers = [
            pool.submit(lambda data: [write_atomically(path, data) for _ in range(20)], data) for data in contents
        ]
        while not all(writer.done() for writer in writers):
            assert path.read_bytes() in contents
        for writer in writers:
            writer.result(DEADLINE_S)
    assert [found.name for found in tmp_path.iterdir()] == ["list"]


def _write_two(trainer: Any, folder: Path) -> None:
    """Each trainer rank writes two snapshots at once, in another order than the other rank."""
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    mesh = init_device_mesh("cpu", (2,))
    given = {
        f"of-{value}": {"w": distribute_tensor(torch.full((4, 4), float(value)), mesh, [Shard(0)])} for value in (1, 2)
    }
    with ThreadPoolExecutor(2) as pool:
        written = []
        for name in sorted(given, reverse=bool(trainer.rank)):
            written.append(pool.submit(Snapshots(sender, folder).write, given[name].items(), name))
            time.sleep(0.3)
        for one in written:
            one.result(DEADLINE_S)
    sender.close()


def test_ranks_that_write_two_snapshots_at_once_do_not_mix_them(tmp_path: Path) -> None:
    run_world(2, 0, _write_two, lambda *_: None, tmp_path, deadline_s=60)
    for value in (1, 2):
        found = load_file(tmp_path / f"of-{value}" / "model-00001-of-00001.safetensors")
        assert torch.equal(found["w"], torch.full((4, 4), float(value)))
