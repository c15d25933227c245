"""Who follows a folder of snapshots: reads what has changed, notices what is damaged, catches up.

What a server holds and what a folder has are ordered by their publications: a follower never puts a server back.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.errors import EngineRefused, EngineUnreachable, Mismatch, Unsupported
from sglang_reshard.extras.snapshots.delta_file import CHUNK_BYTES, apply_delta, write_delta
from sglang_reshard.extras.snapshots.folders import LocalFolder, listed
from sglang_reshard.extras.snapshots.follower import SnapshotFollower
from sglang_reshard.extras.snapshots.manifest import DELTA, MANIFEST, decode_snapshot
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.protocol.publication import next_publication
from support.following import Server
from support.snapshot_writer import weights, write, write_tensors
from support.sweep import examples
from support.toy_changes import become, sharded, weights_of
from support.world import run_world

BF16 = torch.bfloat16


def write_with_deltas(trainer: Any, folder: str, versions: range, options: dict[str, Any]) -> list[Any]:
    sender = trainer.sender()
    snapshots = Snapshots(sender, folder, delta=True, **options)
    shards, reports = sharded(versions[0], BF16), []
    for version in versions:
        become(shards, version, BF16)
        handle = snapshots.write_async(shards.items(), f"step-{version}")
        become(shards, 99, BF16)  # while it is written
        reports.append(handle.wait(60))
    return reports


def assert_loaded(loads: Server, version: int) -> None:
    expected = weights_of(version, BF16)
    assert loads.version == f"step-{version}"
    assert loads.loaded[-1].keys() == expected.keys()
    assert all(torch.equal(loads.loaded[-1][name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four snapshots of five that were written, with deltas, and the same by fsspec."""
    folder = tmp_path_factory.mktemp("run")
    options = {"file_bytes": 40_000, "keep": 4, "upload": f"file://{folder}/store"}
    (told, _), _ = run_world(2, 0, write_with_deltas, None, str(folder), range(1, 6), options)
    assert told[0].delta_bytes is None
    whole = told[0].nbytes
    assert all(0 < report.delta_bytes < whole / 8 for report in told[1:])
    return folder


@pytest.mark.parametrize("where", ["", "store"])
def test_one_that_is_behind_by_three_reads_what_has_changed(run: Path, tmp_path: Path, where: str) -> None:
    url, loads = f"file://{run}/{where}", Server()
    follower = SnapshotFollower(url, loads, tmp_path / "cache")
    assert follower.poll() == "step-5"
    whole = follower.read_bytes
    behind(run, tmp_path / "cache")
    loads.version, loads.publication = "step-2", 0
    assert follower.poll() == "step-5"
    assert_loaded(loads, 5)
    assert 0 < follower.read_bytes < whole / 4

    # Of another base than its manifest says: everything is read.
    copy = behind(run, tmp_path / "cache")
    flip(next(copy.glob("*.safetensors")))
    loads.version, loads.publication = "", 0
    assert follower.poll() == "step-5"
    assert_loaded(loads, 5)
    assert follower.read_bytes >= whole


def flip(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


def behind(run: Path, cache: Path) -> Path:
    """Puts a copy of step-2 in place of the copies in a cache."""
    for copy in cache.glob("copy-*"):
        shutil.rmtree(copy)
    found = decode_snapshot((run / "step-2" / MANIFEST).read_bytes(), "")
    copy = cache / f"copy-{found.publication}"
    copy.mkdir()
    for name in (*found.files, MANIFEST):
        shutil.copyfile(run / "step-2" / name, copy / name)
    return copy


@pytest.mark.parametrize("change", ["delta", "whole"])
def test_a_copy_is_never_changed_and_a_new_one_takes_its_place(run: Path, tmp_path: Path, change: str) -> None:
    """A server may still read the copy of a load whose answer was lost."""
    SnapshotFollower(run, Server(), tmp_path / "cache")
    copy = behind(run, tmp_path / "cache")
    opened = [open(path, "rb") for path in sorted(copy.glob("*.safetensors"))]  # noqa: SIM115
    if change == "whole":
        edit = json.loads((copy / MANIFEST).read_text())
        (copy / MANIFEST).write_text(json.dumps(edit | {"publication": 1}))
    loads = Server()
    assert SnapshotFollower(run, loads, tmp_path / "cache").poll() == "step-5"
    assert_loaded(loads, 5)
    assert [f.read() for f in opened] == [path.read_bytes() for path in sorted((run / "step-2").glob("*.safetensors"))]
    for file in opened:
        file.close()


def test_a_file_that_is_new_in_a_snapshot_is_read_and_the_others_by_their_deltas(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    write(tmp_path / "run", 1)
    loads = Server()
    follower = SnapshotFollower(tmp_path / "run", loads, tmp_path / "cache")
    assert follower.poll() == "step-1"
    whole = follower.read_bytes
    write(tmp_path / "run", 2)
    write(tmp_path / "run", 3, copy_from=model)
    assert follower.poll() == "step-3"
    assert all(torch.equal(loads.loaded[-1][name], tensor) for name, tensor in weights(3).items())
    assert [path.read_text() for path in (tmp_path / "cache").glob("copy-*/config.json")] == ["{}"]
    assert 0 < follower.read_bytes < whole / 2


def test_one_of_two_followers_has_a_cache(run: Path, tmp_path: Path) -> None:
    first = SnapshotFollower(run, Server(), tmp_path / "cache")
    with pytest.raises(Mismatch, match="another follower uses the cache"):
        SnapshotFollower(run, Server(), tmp_path / "cache")
    assert first.poll() == "step-5"
    del first
    assert SnapshotFollower(run, Server(), tmp_path / "cache").poll() == "step-5"


def test_a_server_is_given_absolute_paths(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    for cache in (None, Path("cache")):
        assert SnapshotFollower(run.name, Server(), cache).poll() == "step-5"


def test_a_damaged_snapshot_is_not_loaded(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    file = flip(next((copy / "step-5").glob("*.safetensors")))
    for cache in (None, tmp_path / "cache"):
        loads = Server()
        follower = SnapshotFollower(copy, loads, cache)
        assert follower.poll() == "step-4"
        assert_loaded(loads, 4)
        told = "up.weight" if cache is None else f"{file.name} does not have the SHA-256"
        assert told in str(follower.refused["step-5"])


def test_a_folder_with_files_of_others_is_no_cache(run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("of somebody")
    loads = Server()
    with pytest.raises(Mismatch, match="holds files that do not belong to a snapshot cache"):
        SnapshotFollower(run, loads, tmp_path).poll()
    assert (tmp_path / "thesis").read_text() == "of somebody"
    assert loads.loaded == []


def test_a_store_needs_a_cache() -> None:
    with pytest.raises(Unsupported, match="pass a cache"):
        SnapshotFollower("memory://run", RemoteEngine("http://127.0.0.1:1"))


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    assert SnapshotFollower(tmp_path, Server()).poll() is None


# -- the order of publications


def publication(folder: Path, name: str) -> int:
    found = listed(LocalFolder(folder))
    assert found is not None
    return dict(zip(found.names, found.publications, strict=True))[name]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def follower(tmp_path: Path, server: Server) -> SnapshotFollower:
    """Its server has the only snapshot, step-1."""
    write(tmp_path, 1)
    found = SnapshotFollower(tmp_path, server)
    assert found.poll() == "step-1"
    return found


@pytest.mark.parametrize("again", [False, True], ids=["the same follower", "a new one"])
def test_a_direct_update_is_not_undone(
    tmp_path: Path, server: Server, follower: SnapshotFollower, told: Any, again: bool
) -> None:
    server.version, server.publication = "step-5", next_publication()  # as an update by the trainer
    if again:
        follower = SnapshotFollower(tmp_path, server)
    for _ in range(3):
        assert follower.poll() is None
    assert server.version == "step-5"
    said = [record.getMessage() for record in told.records]
    assert len(said) == 1, "it is told once"
    assert "holds version 'step-5', which is not older than snapshot 'step-1'" in said[0]
    write(tmp_path, 6)
    assert follower.poll() == "step-6"


def test_going_back_is_allowed_where_that_is_asked_for(tmp_path: Path, server: Server) -> None:
    write(tmp_path, 4)
    server.version, server.publication = "step-5", next_publication()
    follower = SnapshotFollower(tmp_path, server, allow_rollback=True)
    assert follower.poll() == "step-4"
    assert server.publication == publication(tmp_path, "step-4")
    assert follower.poll() is None, "it has that one"


@pytest.mark.parametrize(
    ("changes", "loaded"),
    [
        ({"version": "by hand"}, None),
        ({"version": "default", "publication": 0}, "step-1"),
        ({"torn": "half of update 8"}, "step-1"),
    ],
    ids=["the user's own request", "started again", "torn"],
)
def test_a_server_that_lost_its_snapshot_gets_it_again_and_each_gets_a_later_one(
    tmp_path: Path, server: Server, follower: SnapshotFollower, changes: dict[str, Any], loaded: str | None
) -> None:
    vars(server).update(changes)
    assert follower.poll() == loaded
    assert not server.torn
    write(tmp_path, 2)
    assert follower.poll() == "step-2"


def test_a_damaged_newest_snapshot_does_not_put_the_server_back(
    tmp_path: Path, server: Server, follower: SnapshotFollower
) -> None:
    write(tmp_path, 2)
    assert follower.poll() == "step-2"
    write(tmp_path, 3)
    (tmp_path / "step-3" / "model-00001-of-00001.safetensors").unlink()
    assert follower.poll() is None
    assert server.version == "step-2"
    assert "is missing" in str(follower.refused["step-3"])


def test_a_server_that_cannot_be_reached_is_no_fault_of_the_snapshot(tmp_path: Path, server: Server) -> None:
    write(tmp_path, 1)
    follower = SnapshotFollower(tmp_path, server)
    server.fails = EngineUnreachable("nobody there")
    with pytest.raises(EngineUnreachable):
        follower.poll()
    server.fails = None
    assert not follower.refused
    assert follower.poll() == "step-1"


def test_a_snapshot_that_the_server_refuses_is_passed_over(tmp_path: Path, server: Server) -> None:
    write(tmp_path, 1)
    follower = SnapshotFollower(tmp_path, server)
    server.fails = EngineRefused("SGLang cannot load it: no such parameter")
    assert follower.poll() is None
    assert follower.poll() is None
    assert server.asked == 1, "it is not asked in every look"
    server.fails = None
    write(tmp_path, 2)
    assert follower.poll() == "step-2"


# -- names and paths that a user may choose


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


# -- deltas


@settings(max_examples=examples(20), deadline=None)
@given(
    nbytes=st.sampled_from([1, 7, 8, 1000, CHUNK_BYTES - 2, CHUNK_BYTES + 6]),
    share=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    seed=st.integers(0, 1000),
    unit_bytes=st.sampled_from([1, 2, 4]),
)
def test_a_delta_of_a_file_is_lossless(
    tmp_path_factory: pytest.TempPathFactory, nbytes: int, share: float, seed: int, unit_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    draw = random.Random(seed)
    base = bytearray(draw.randbytes(nbytes))
    new = bytearray(base)
    for _ in range(round(min(share * nbytes, 20_000))):
        new[draw.randrange(nbytes)] ^= draw.randrange(1, 256)
    one, other, delta = folder / "base", folder / "new", folder / f"new{DELTA}"
    one.write_bytes(base)
    other.write_bytes(new)
    written = write_delta(one, other, delta, unit_bytes, 10 * nbytes + 1000)
    assert written == delta.stat().st_size
    with open(delta, "rb") as opened:
        apply_delta(opened, one)
    assert one.read_bytes() == new
    assert write_delta(one, other, delta, unit_bytes, 10) is None
    assert not delta.exists()


def test_a_chunk_that_has_not_changed_is_left_alone(tmp_path: Path) -> None:
    base, new, delta = (tmp_path / name for name in ("base", "new", "delta"))
    base.write_bytes(b"a" * CHUNK_BYTES + b"b" * 80)
    new.write_bytes(b"a" * CHUNK_BYTES + b"b" * 79 + b"x")
    assert write_delta(base, new, delta, 1, 1000) is not None
    with open(delta, "rb") as opened:
        apply_delta(opened, base)
    assert base.read_bytes() == new.read_bytes()
