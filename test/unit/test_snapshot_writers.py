"""Two trainers write one snapshot: one of them wins, the other one gets an error, and what is published is whole.

A writer is stopped while it reads its files back, and another one of the same name begins.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
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

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import DeadlineExceeded, Mismatch
from sglang_reshard.extras.snapshots import upload
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


# -- in a store, which locks nothing


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(upload, "_POLL_S", 0.02)
    monkeypatch.setattr(upload, "_RENEW_S", 0.05)
    return f"memory://{tmp_path.name}"


def in_store(url: str) -> dict[str, bytes]:
    files, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}


def assert_whole_in_store(url: str, *names: str) -> None:
    found = in_store(url)
    assert json.loads(found.pop("snapshots.json"))["names"] == list(names)
    assert {path.partition("/")[0] for path in found} == set(names), "nothing else is left"
    for name in names:
        files = json.loads(found[f"{name}/snapshot.json"])["files"]
        for file, said in files.items():
            assert hashlib.sha256(found[f"{name}/{file}"]).hexdigest() == said["sha256"]


@contextmanager
def uploading(folder: Path, version: int, name: str, url: str, patch: pytest.MonkeyPatch) -> Iterator[Future[Any]]:
    """Within it a writer has uploaded a part of its files. It goes on at the end."""
    reached, go_on, put = threading.Event(), threading.Event(), upload.SnapshotStore.put

    def pausing(self: Any, folder: Path, of: str, files: Any) -> None:
        first, *others = files
        put(self, folder, of, [first])
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            assert go_on.wait(DEADLINE_S)
        put(self, folder, of, others)

    patch.setattr(upload.SnapshotStore, "put", pausing)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, folder, version, name=name, upload=url)
        try:
            assert reached.wait(DEADLINE_S)
            yield writing
        finally:
            go_on.set()


def test_one_of_two_uploads_of_a_name_wins(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pytest.raises(DeadlineExceeded, match=r"another trainer has written to .* find it by its claim")
    with uploading(tmp_path / "a", 1, "best", url, monkeypatch) as writing, refused:
        write(tmp_path / "b", 2, name="best", upload=url, timeout_s=0.3)
    writing.result(DEADLINE_S)
    assert_whole_in_store(url, "best")
    with pytest.raises(Mismatch, match="best already exists"):
        write(tmp_path / "c", 3, name="best", upload=url)
    assert_whole_in_store(url, "best")


def test_uploads_of_two_trainers_take_turns(tmp_path: Path, url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        turns = [
            pool.submit(lambda who: [write(tmp_path / who, n, name=f"{who}-{n}", upload=url) for n in range(3)], who)
            for who in "ab"
        ]
        for turn in turns:
            turn.result(DEADLINE_S)
    names = json.loads(in_store(url)["snapshots.json"])["names"]
    assert sorted(names) == ["a-0", "a-1", "a-2", "b-0", "b-1", "b-2"]
    assert_whole_in_store(url, *names)


def test_an_upload_that_died_is_in_nobodys_way(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_DEAD_S", 0.3)
    with uploading(tmp_path / "a", 1, "slow", url, monkeypatch) as writing:
        files, _root = fsspec.core.url_to_fs(url)
        with pytest.raises(DeadlineExceeded):  # it renews its claim
            write(tmp_path / "b", 2, upload=url, timeout_s=1.0)
        monkeypatch.setattr(type(files), "exists", lambda *_: False)  # it renews its claim no more
        write(tmp_path / "c", 2, upload=url)
    with pytest.raises(Mismatch, match="slow is not published: this trainer did not write for"):
        writing.result(DEADLINE_S)
    assert json.loads(in_store(url)["snapshots.json"])["names"] == ["step-2"]
