"""Names and paths that a user may choose for snapshots: none is taken for another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.extras.snapshots.follower import SnapshotFollower
from sglang_reshard.extras.snapshots.manifest import MANIFEST
from support.following import Server
from support.snapshot_writer import is_whole, weights, write, write_tensors


def test_a_folder_with_two_colons_is_not_the_one_that_its_name_begins_with(tmp_path: Path) -> None:
    """fsspec cuts a text at "::", and takes what is before for the folder."""
    write(tmp_path / "run", 1)
    write(tmp_path / "run::v2", 2)
    server = Server()
    assert SnapshotFollower(str(tmp_path / "run::v2"), server).poll() == "step-2"
    write(tmp_path / "here", 3, upload=str(tmp_path / "store::v2"))
    assert (tmp_path / "store::v2" / "step-3" / MANIFEST).is_file()
    assert not (tmp_path / "store").exists()
    for url in (f"file://{tmp_path}/run::v2", "memory://run::v2", "s3://bucket/run::v2/more"):
        with pytest.raises(Unsupported, match="has a name with '::'"):
            SnapshotFollower(url, server, tmp_path / "cache")


@pytest.mark.parametrize("name", ["run[1]", "run?", "run*"])
def test_an_upload_deletes_nothing_of_another_folder_that_its_url_matches_as_a_pattern(
    tmp_path: Path, name: str
) -> None:
    other = f"/{tmp_path.name}/run1"
    for version in (1, 2):
        write(tmp_path / "other", version, upload=f"memory:/{other}")
    for version in (1, 2):
        with pytest.raises(Unsupported, match=r"cannot be uploaded to .* would delete snapshots"):
            write(tmp_path / "run", version, upload=f"memory://{tmp_path.name}/{name}", keep=1)
    assert not (tmp_path / "run").exists(), "it is refused before anything is written"
    files = fsspec.filesystem("memory")
    assert files.exists(f"{other}/step-1/{MANIFEST}")
    assert files.exists(f"{other}/step-2/{MANIFEST}")


def test_a_tensor_is_not_written_in_place_of_the_metadata(tmp_path: Path) -> None:
    tensors = {**weights(1), "__metadata__": torch.zeros(2)}
    with pytest.raises(Unsupported, match="cannot be named __metadata__"):
        write_tensors(tmp_path / "run", "step-1", tensors)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("version", ["default", "step-1"], ids=["SGLang's first one", "an adapter's, or set by hand"])
def test_a_weight_version_of_other_weights_is_no_snapshot(tmp_path: Path, version: str) -> None:
    write(tmp_path, 1, name=version)
    server = Server()
    server.version = version
    follower = SnapshotFollower(tmp_path, server)
    assert follower.poll() == version
    assert follower.poll() is None
    assert len(server.loaded) == 1


def test_copies_of_snapshots_without_numbers_are_apart(tmp_path: Path) -> None:
    """As 0.1.0 has written them. A server may still read the first one."""
    run, cache = tmp_path / "run", tmp_path / "cache"
    follower = SnapshotFollower(run, Server(), cache)
    for version in (1, 2):
        write(run, version, delta=False)
        edit(run / f"step-{version}" / MANIFEST, publication=0)
    copies = []
    for names in (["step-1"], ["step-1", "step-2"]):
        (run / "snapshots.json").write_text(json.dumps({"names": names}))
        before = set(cache.glob("copy-*"))
        assert follower.poll() == names[-1]
        copies += set(cache.glob("copy-*")) - before
    assert [json.loads((copy / MANIFEST).read_text())["name"] for copy in copies] == ["step-1", "step-2"]
    assert all(map(is_whole, copies))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
