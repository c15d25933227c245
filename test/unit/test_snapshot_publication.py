"""Who writes snapshots: whatever fails at whatever step, the list and the folder agree; times of files mean nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_reshard.errors import DeadlineExceeded, Mismatch, ReshardError
from sglang_reshard.extras.snapshots.folders import LocalFolder, listed
from sglang_reshard.protocol import publication
from support.failing_files import FailingFiles
from support.snapshot_writer import assert_consistent, is_whole, write

FILES = FailingFiles()


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
    base = {name: json.loads((tmp_path / name / "snapshot.json").read_text())["base"] for name in names(tmp_path)}
    for name in base:
        chain = [name]
        while chain[-1] in base and base[chain[-1]]:
            chain.append(base[chain[-1]])
            assert len(set(chain)) == len(chain), chain
    write(tmp_path, 400)
    assert json.loads((tmp_path / "step-400" / "snapshot.json").read_text())["base"] == "step-200"
    assert_consistent(tmp_path)


def test_what_is_kept_needs_nothing_that_was_deleted(tmp_path: Path) -> None:
    for version in range(1, 7):
        write(tmp_path, version, keep=1 + version % 3)
        assert all(is_whole(tmp_path / name) for name in names(tmp_path))
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
