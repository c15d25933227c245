"""Who follows a folder of snapshots: reads what has changed, notices what is damaged, catches up."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.extras.snapshots.delta_file import CHUNK_BYTES, apply_delta, write_delta
from sglang_reshard.extras.snapshots.follower import SnapshotFollower
from sglang_reshard.extras.snapshots.manifest import DELTA, MANIFEST, decode_snapshot
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from support.following import Server
from support.sweep import examples
from support.toy_changes import become, sharded, weights_of
from support.world import run_world

BF16 = torch.bfloat16


def write(trainer: Any, folder: str, versions: range, options: dict[str, Any]) -> list[Any]:
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30)
    snapshots = Snapshots(sender, folder, delta=True, **options)
    weights, reports = sharded(versions[0], BF16), []
    for version in versions:
        become(weights, version, BF16)
        handle = snapshots.write_async(weights.items(), f"step-{version}")
        become(weights, 99, BF16)  # while it is written
        reports.append(handle.wait(60))
    sender.close()
    return reports


def nobody(*_: Any) -> None:
    """An engine rank that no update comes to."""


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
    (told, _), _ = run_world(2, 0, write, nobody, str(folder), range(1, 6), options)
    assert told[0].delta_bytes is None
    whole = told[0].nbytes
    assert all(0 < report.delta_bytes < whole / 8 for report in told[1:])
    return folder


def test_the_newest_is_loaded_and_only_once(run: Path) -> None:
    loads = Server()
    follower = SnapshotFollower(run, loads)
    assert follower.poll() == "step-5"
    assert_loaded(loads, 5)
    assert follower.poll() is None
    assert len(loads.loaded) == 1


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
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    loads.version, loads.publication = "", 0
    assert follower.poll() == "step-5"
    assert_loaded(loads, 5)
    assert follower.read_bytes >= whole


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
    copy = behind_in(run, tmp_path / "cache")
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


def behind_in(run: Path, cache: Path) -> Path:
    SnapshotFollower(run, Server(), cache)
    return behind(run, cache)


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
    for path in run.rglob("*"):
        if path.is_file() and "latest" not in path.parts and "store" not in path.parts:
            (copy / path.relative_to(run)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(run)).write_bytes(path.read_bytes())
    weights = next((copy / "step-5").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for cache in (None, tmp_path / "cache"):
        loads = Server()
        follower = SnapshotFollower(copy, loads, cache)
        assert follower.poll() == "step-4"
        assert_loaded(loads, 4)
        told = "up.weight" if cache is None else f"{weights.name} does not have the SHA-256"
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
