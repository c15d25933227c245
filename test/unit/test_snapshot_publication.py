"""Who writes snapshots: whatever fails at whatever step, the list and the folder agree; times of files mean nothing."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
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

from sglang_reshard.errors import DeadlineExceeded, Mismatch, ReshardError
from sglang_reshard.extras.snapshots import upload
from sglang_reshard.extras.snapshots.folders import LocalFolder, listed
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.extras.snapshots.writer_files import SnapshotFiles
from sglang_reshard.extras.snapshots.writer_folder import SnapshotFolder, write_atomically
from sglang_reshard.protocol import publication
from support.failing_files import FailingFiles
from support.snapshot_writer import assert_consistent, is_whole, write
from support.world import run_world

FILES = FailingFiles()
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power does not fail in these tests."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def names(folder: Path) -> tuple[str, ...]:
    found = listed(LocalFolder(folder))
    return () if found is None else found.names


def publications(folder: Path) -> tuple[int, ...]:
    found = listed(LocalFolder(folder))
    assert found is not None
    return found.publications


def seen(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("dead", [False, True], ids=["once", "from then on"])
def test_whatever_step_fails_the_list_and_the_folder_agree(tmp_path: Path, dead: bool) -> None:
    """All n: a writer of a third snapshot, which deletes the first, fails at its nth operation on files."""
    at, struck, model = 0, True, tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    before = tmp_path / "before"
    for version in (1, 2):
        write(before, version, keep=2)
    while struck:
        at += 1
        folder = tmp_path / f"run-{at}"
        shutil.copytree(before, folder, symlinks=True)
        raised = None
        with FILES.armed(folder, at, dead=dead):
            try:
                write(folder, 3, keep=2, copy_from=model)
            except ReshardError as error:
                raised = error
            struck = FILES.struck
        assert_consistent(folder)
        expected = ("step-1", "step-2") if raised is not None else ("step-2", "step-3")
        assert names(folder) == expected or (dead and struck and names(folder) == ("step-2", "step-3")), at
        if raised is not None and names(folder) == expected:
            write(folder, 3, keep=2)  # the name is free
        write(folder, 4, keep=2)
        assert_consistent(folder)
        assert seen(folder) == {"step-3", "step-4", "snapshots.json", "latest"}, at
        assert os.readlink(folder / "latest") == "step-4"
        shutil.rmtree(folder)
    assert at > 60, "operations were counted"


def test_keep_and_latest_go_by_the_order_of_publication(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write(tmp_path, version, keep=3)
        ahead = time.time() + 3600 + version
        os.utime(tmp_path / f"step-{version}", (ahead, ahead))  # by another host's clock
    write(tmp_path, 4, keep=3)
    assert names(tmp_path) == ("step-2", "step-3", "step-4")
    assert os.readlink(tmp_path / "latest") == "step-4"
    (tmp_path / "step-2" / "notes.txt").write_text("eval: 0.7")  # its folder is the newest, by time
    write(tmp_path, 5, keep=3)
    assert names(tmp_path) == ("step-3", "step-4", "step-5")
    assert_consistent(tmp_path)
    assert seen(tmp_path) == {"step-3", "step-4", "step-5", "snapshots.json", "latest"}


def test_publications_rise_though_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    monkeypatch.setattr(publication.time, "time_ns", lambda: 1_000_000)
    monkeypatch.setattr(publication, "_last", 0)  # of another process
    write(tmp_path, 2)
    write(tmp_path, 3)
    found = publications(tmp_path)
    assert names(tmp_path) == ("step-1", "step-2", "step-3")
    assert found[0] < found[1] < found[2]
    assert publication.next_publication() > found[2], "a direct update after it is later"


def test_a_version_that_is_written_again_makes_no_circle_of_bases(tmp_path: Path) -> None:
    for version in (100, 200, 300):
        write(tmp_path, version)
    shutil.rmtree(tmp_path / "step-200")
    write(tmp_path, 7, name="step-200")
    assert names(tmp_path) == ("step-100", "step-300", "step-200")
    for name in names(tmp_path):
        listed = json.loads((tmp_path / name / "snapshot.json").read_text())
        assert listed["base_publication"] < listed["publication"]
    write(tmp_path, 400)
    assert json.loads((tmp_path / "step-400" / "snapshot.json").read_text())["base"] == "step-200"
    assert_consistent(tmp_path)


@pytest.mark.parametrize("index", ["[1]", '{"metadata": null}', "{", "\udcff", '{"metadata": {"written_by": 5}}'])
def test_a_bad_index_of_a_neighbour_is_none_of_the_writers_business(tmp_path: Path, index: str) -> None:
    write(tmp_path, 1)
    neighbour = tmp_path / "odd"
    neighbour.mkdir()
    (neighbour / "model.safetensors.index.json").write_bytes(index.encode(errors="surrogateescape"))
    (neighbour / "snapshot.json").write_bytes(index.encode(errors="surrogateescape"))
    write(tmp_path, 2, keep=1)
    (tmp_path / "snapshots.json").unlink()
    write(tmp_path, 3, keep=1)
    assert names(tmp_path) == ("step-3",)
    assert neighbour.is_dir()


@pytest.mark.parametrize(
    "spoiled", ['{"names":["step-1","../../x"]', '{"names":["../x"]}', "", "[]", '{"names":["step-1","step-1"]}', None]
)
def test_a_damaged_list_is_made_again_of_the_manifests(tmp_path: Path, spoiled: str | None) -> None:
    for version in (1, 2, 10):
        write(tmp_path, version)
    (tmp_path / "snapshots.json").unlink()
    if spoiled is not None:
        (tmp_path / "snapshots.json").write_text(spoiled)
    report = write(tmp_path, 11, keep=3)
    assert names(tmp_path) == ("step-2", "step-10", "step-11")
    assert report.delta_bytes is not None, "of step-10"
    assert_consistent(tmp_path)


def test_a_list_cannot_have_what_is_no_snapshot_deleted(tmp_path: Path, told: Any) -> None:
    write(tmp_path, 1)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "outside").symlink_to(tmp_path)
    found = json.loads((tmp_path / "snapshots.json").read_text())
    found["names"] = ["model", "outside", *found["names"]]
    found["publications"] = [1, 2, *found["publications"]]
    (tmp_path / "snapshots.json").write_text(json.dumps(found))
    write(tmp_path, 2, keep=1)
    assert seen(tmp_path) == {"model", "outside", "snapshots.json", "latest", "step-2"}
    assert (model / "config.json").exists()


@pytest.mark.parametrize(
    "name",
    ["..", ".", "latest", "a/b", "/etc", ".x", "", "a\nb", "a\0b", "a\\b", "*", "x[1]", "x" * 256, "snapshots.json"],
)
def test_names_that_are_no_single_component_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Mismatch, match="cannot be the name of a snapshot"):
        write(tmp_path, 1, name=name)
    assert seen(tmp_path) == set()


def test_a_snapshot_of_a_snapshots_files_has_its_own(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    assert (tmp_path / "step-2" / "model-00001-of-00001.safetensors.delta").exists()
    write(tmp_path / "other", 3, copy_from=tmp_path / "step-2")
    assert {path.name for path in (tmp_path / "other" / "step-3").iterdir()} == {
        "model-00001-of-00001.safetensors", "model.safetensors.index.json", "snapshot.json"
    }  # fmt: skip
    assert is_whole(tmp_path / "other" / "step-3")


def test_links_in_a_folder_that_others_write_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("of somebody")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".snapshots.json.partial").symlink_to(precious)
    write(folder, 1)
    assert precious.read_text() == "of somebody"
    base = folder / "step-1" / "model-00001-of-00001.safetensors"
    content = base.read_bytes()
    base.unlink()
    base.symlink_to(precious)
    precious.write_bytes(content)
    report = write(folder, 2)
    assert report.delta_bytes is None, "a link is no base"


def test_writers_of_one_folder_wait_for_each_other(tmp_path: Path) -> None:
    write(tmp_path, 1)
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded, match="another writer has held"):
            write(tmp_path, 2, timeout_s=0.2)
    finally:
        os.close(other)
    write(tmp_path, 2)
    assert names(tmp_path) == ("step-1", "step-2")


# -- two trainers write one snapshot: one of them wins, and what is published is whole


@pytest.fixture(params=[True, False], ids=["locks", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system locks folders."""
    if not request.param:

        def refuse(_descriptor: int, _operation: int) -> None:
            raise OSError(errno.EBADF, "folders cannot be locked")  # as NFS does

        monkeypatch.setattr(fcntl, "flock", refuse)
    return bool(request.param)


@contextmanager
def midway(
    patch: pytest.MonkeyPatch, owner: type, method: str, pausing: Callable[..., Any], *args: Any, **options: Any
) -> Iterator[Future[Any]]:
    """Within it another thread writes, and pauses in a method. It goes on at the end."""
    reached, go_on, stock = threading.Event(), threading.Event(), getattr(owner, method)

    def pause() -> None:
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            assert go_on.wait(DEADLINE_S)

    patch.setattr(owner, method, lambda *given: pausing(stock, pause, *given))
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, *args, **options)
        try:
            assert reached.wait(DEADLINE_S)
            yield writing
        finally:
            go_on.set()


def halfway(folder: Path, version: int, name: str, patch: pytest.MonkeyPatch) -> Any:
    """Within it a writer has written its files, and not yet published them."""

    def pausing(stock: Any, pause: Any, *args: Any) -> Any:
        pause()
        return stock(*args)

    return midway(patch, SnapshotFiles, "described", pausing, folder, version, name=name)


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
    sender = trainer.sender()
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


def uploading(folder: Path, version: int, name: str, url: str, patch: pytest.MonkeyPatch) -> Any:
    """Within it a writer has uploaded a part of its files."""

    def pausing(stock: Any, pause: Any, store: Any, folder: Path, of: str, files: Any) -> None:
        first, *others = files
        stock(store, folder, of, [first])
        pause()
        stock(store, folder, of, others)

    return midway(patch, upload.SnapshotStore, "put", pausing, folder, version, name=name, upload=url)


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
