"""Folders of snapshots that somebody hostile has written: nothing leaves them, and a follower goes on."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from sglang_reshard.cli import follow
from sglang_reshard.errors import EngineUnreachable, Mismatch
from sglang_reshard.extras.snapshots import cache as cache_module
from sglang_reshard.extras.snapshots import follower as follower_module
from sglang_reshard.extras.snapshots.delta_file import CHUNK_BYTES, apply_delta
from sglang_reshard.extras.snapshots.follower import SnapshotFollower
from support.following import Server
from support.snapshot_writer import weights, write

WEIGHTS = "model-00001-of-00001.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for version in (1, 2, 3):
        write(tmp_path / "run", version)
    return tmp_path / "run"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def describe(path: Path) -> None:
    """Makes the manifest beside a file agree with it, but for the checksums of its tensors."""
    data = path.read_bytes()
    of = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(path.parent / "snapshot.json", lambda m: m["files"].setdefault(path.name, {}).update(of))


def assert_falls_back(run: Path, cache: Path | None, reason: str) -> SnapshotFollower:
    """The newest is passed over for a reason that names a file, and the one before is loaded as it was written."""
    server = Server()
    follower = SnapshotFollower(run, server, cache)
    assert follower.poll() == "step-2"
    assert all(torch.equal(server.loaded[-1][name], tensor) for name, tensor in weights(2).items())
    assert reason in str(follower.refused["step-3"])
    assert str(run) in str(follower.refused["step-3"])
    return follower


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["{outside}", "../victim", "../../victim", "a/b", "a\0b", "", "..", "snapshot.json"])
def test_file_names_do_not_leave_the_folder(run: Path, tmp_path: Path, name: str, cached: bool) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    listed = name.format(outside=victim)
    edit(
        run / "step-3" / "snapshot.json",
        lambda m: m["files"].__setitem__(listed, {"nbytes": 8, "sha256": hashlib.sha256(b"precious").hexdigest()}),
    )
    assert_falls_back(run, tmp_path / "cache" if cached else None, "cannot be the name of a file")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["/etc", "../../../etc", "step-2", "."])
def test_a_manifest_is_of_the_folder_that_it_is_in(run: Path, name: str) -> None:
    edit(run / "step-3" / "snapshot.json", lambda m: m.update(name=name))
    assert_falls_back(run, None, "step-3/snapshot.json")


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("what", ["link", "link to a good one", "fifo", "folder", "device", "folder's link"])
def test_only_regular_files_of_the_folder_are_read(run: Path, tmp_path: Path, what: str, cached: bool) -> None:
    secret = tmp_path / "secret.safetensors"
    shutil.copyfile(run / "step-1" / WEIGHTS, secret)
    path = run / "step-3" / WEIGHTS
    if what == "folder's link":
        os.rename(run / "step-3", tmp_path / "elsewhere")
        (run / "step-3").symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
    match what:
        case "link":
            path.symlink_to(secret)
            describe(path)
        case "link to a good one":
            path.symlink_to(run / "step-2" / WEIGHTS)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
    reason = "Not a directory" if what == "folder's link" else "not a file"
    assert_falls_back(run, tmp_path / "cache" if cached else None, reason)


def test_weights_of_another_kind_are_refused(run: Path) -> None:
    (run / "step-3" / "pytorch_model.bin").write_bytes(b"pickled")
    describe(run / "step-3" / "pytorch_model.bin")
    assert_falls_back(run, None, "weights of a snapshot must be safetensors")
    edit(run / "step-3" / "snapshot.json", lambda m: m.update(files={}))
    assert_falls_back(run, None, "lists no safetensors")


def test_weights_without_checksums_are_refused(run: Path) -> None:
    edit(run / "step-3" / "snapshot.json", lambda m: m["files"][WEIGHTS].pop("table"))
    assert_falls_back(run, None, "lists no checksums of the tensors in model-00001")


def test_notes_and_folders_of_users_are_no_harm(run: Path, tmp_path: Path) -> None:
    (run / "step-3" / "notes.txt").write_text("eval: 0.7")
    (run / "step-3" / "plots").mkdir()
    server = Server()
    assert SnapshotFollower(run, server).poll() == "step-3"
    cache = tmp_path / "cache"
    follower = SnapshotFollower(run, Server(), cache)
    (cache / "sub").mkdir()
    assert follower.poll() == "step-3"
    write(run, 4)
    assert follower.poll() == "step-4"
    assert (cache / "sub").is_dir()


def header(table: Any, data: int = 16, length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def tensor(dtype: Any = "F32", shape: Any = (4,), begin: Any = 0, end: Any = 16) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "empty": (b"", "claims a header of 0 bytes"),
    "no header": (header(b""), "claims a header of 0 bytes"),
    "header of 2^60": (header({}, length=2**60), "claims a header of"),
    "header past the end": (header({"a": tensor()}, length=2000), "claims a header of"),
    "no JSON": (header(b"{" * 100), "damaged header"),
    "nested": (header(b"[" * 100_000), "damaged header"),
    "no table": (header([]), "damaged header"),
    "metadata": (header({"__metadata__": {"a": None}, "a": tensor()}), "damaged header"),
    "dtype": (header({"a": tensor("F33")}), "the dtype 'F33'"),
    "dtype of 10^6": (header({"a": tensor("F" * 10**6)}), "the dtype 'FFF"),
    "negative": (header({"a": tensor(shape=(-4,))}), "damaged header"),
    "overflow": (header({"a": tensor(shape=(2**32, 2**32))}), "does not fit bytes"),
    "overflow to 16": (header({"a": tensor(shape=(2**50, 2**14 + 1))}), "does not fit bytes"),
    "many dimensions": (header({"a": tensor(shape=(1,) * 10_000)}), "damaged header"),
    "float": (header({"a": tensor(shape=(4.5,))}), "damaged header"),
    "overlap": (header({"a": tensor(), "b": tensor(begin=8, end=24)}, 24), "does not fit bytes 8 to 24"),
    "hole": (header({"a": tensor(begin=16, end=32)}, 32), "does not fit bytes 16 to 32"),
    "leaves the file": (header({"a": tensor(shape=(8,), end=32)}), "its tensors end at"),
    "more than the table": (header({"a": tensor()}, 17), "its tensors end at"),
    "backwards": (header({"a": tensor(begin=16, end=0)}), "does not fit bytes"),
    "too many": (header({f"{n}": tensor(shape=(0,), end=0) for n in range(30_001)}, 0), "has 30001 tensors"),
}


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.parametrize("cached", [False, True])
def test_tables_of_tensors_are_checked_before_a_server_sees_them(
    run: Path, tmp_path: Path, case: str, cached: bool
) -> None:
    content, reason = HEADERS[case]
    (run / "step-3" / WEIGHTS).write_bytes(content)
    describe(run / "step-3" / WEIGHTS)
    assert_falls_back(run, tmp_path / "cache" if cached else None, reason)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("snapshots.json", b'{"names":[' + b'"a",' * 1_500_000 + b'"z"]}'),
        ("snapshots.json", b'{"names":["a"],"x":' + b"[" * 200_000),
        ("step-3/snapshot.json", b'{"name":"step-3","files":{"a":"' + b" " * (17 << 20) + b'"}}'),
        ("step-3/snapshot.json", b'{"name":' + b"[" * 1_000_000),
    ],
)
def test_manifests_are_read_up_to_a_bound(run: Path, file: str, content: bytes) -> None:
    (run / file).write_bytes(content)
    follower = SnapshotFollower(run, Server())
    tracemalloc.start()
    try:
        follower.poll()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [str(run) in str(error) for error in follower.refused.values()] == [True]
    assert most < 64 << 20


def test_sizes_are_compared_before_anything_is_read(run: Path, tmp_path: Path) -> None:
    huge = run / "step-3" / WEIGHTS
    cache = tmp_path / "cache"
    server = Server()
    SnapshotFollower(run, server, cache).poll()
    server.version, server.publication = "", 0
    shutil.rmtree(next(cache.glob("copy-*")))
    with open(huge, "r+b") as opened:
        opened.truncate(1 << 43)  # no block of it is on the disk
    edit(run / "step-3" / "snapshot.json", lambda m: m["files"][WEIGHTS].update(nbytes=1 << 43))
    follower = SnapshotFollower(run, server, cache)
    assert follower.poll() == "step-2"
    assert "bytes free" in str(follower.refused["step-3"])
    edit(run / "step-3" / "snapshot.json", lambda m: m["files"][WEIGHTS].update(nbytes=1 << 60))
    assert_falls_back(run, None, "Expected `int` <= ")


@pytest.mark.parametrize("base", [{"base": "step-3"}, {"base": "step-2", "base_publication": 1 << 51}])
def test_a_base_that_is_not_earlier_is_refused(run: Path, tmp_path: Path, base: dict[str, Any]) -> None:
    """So bases form no circle."""
    edit(run / "step-3" / "snapshot.json", lambda m: m.update(base))
    follower = assert_falls_back(run, tmp_path / "cache", "is not an earlier snapshot")
    write(run, 4)
    assert follower.poll() == "step-4"


def test_a_bad_list_is_told_once_and_followed_again_when_it_is_good(run: Path, told: Any) -> None:
    good = (run / "snapshots.json").read_bytes()
    server = Server()
    follower = SnapshotFollower(run, server)
    for bad in (b"", b"[", b"\xff\xfe", b'{"names":5}', b'{"names":["../x"]}', b'{"names":["a"],"publications":[1,2]}'):
        told.clear()
        (run / "snapshots.json").write_bytes(bad)
        for _ in range(3):
            assert follower.poll() is None
        assert len(told.records) == 1
        assert str(run / "snapshots.json") in told.records[0].getMessage()
    assert not server.asked
    (run / "snapshots.json").write_bytes(good)
    assert follower.poll() == "step-3"
    assert not follower.refused


def test_a_snapshot_that_is_made_good_is_loaded_after_a_pause(
    run: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (run / "step-3" / WEIGHTS).read_bytes()
    (run / "step-3" / WEIGHTS).write_bytes(content[:-100])  # as it is still being copied here
    follower = assert_falls_back(run, None, "bytes, but its manifest lists")
    (run / "step-3" / WEIGHTS).write_bytes(content)
    assert follower.poll() is None, "it is not read in every look"
    now = follower_module.time.monotonic()
    monkeypatch.setattr(follower_module.time, "monotonic", lambda: now + 11)
    assert follower.poll() == "step-3"
    assert len(told.records) == 1


def test_what_vanishes_while_it_is_read_is_passed_over(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(*_: Any) -> None:
        shutil.rmtree(run / "step-3", ignore_errors=True)

    monkeypatch.setattr(cache_module, "check_kinds", vanish)
    assert_falls_back(run, tmp_path / "cache", "is missing")


def test_a_cache_of_links_is_not_written_through(run: Path, tmp_path: Path) -> None:
    cache, precious = tmp_path / "cache", tmp_path / "precious"
    precious.write_bytes(b"of somebody")
    follower = SnapshotFollower(run, Server(), cache)
    (cache / WEIGHTS).symlink_to(precious)
    (cache / "snapshot.json").write_text("{")
    assert follower.poll() == "step-3"
    assert precious.read_bytes() == b"of somebody"
    assert not (cache / WEIGHTS).is_symlink()


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_bytes": 8}, {"chunk_bytes": 0}, {"chunk_bytes": -1}, {"chunk_bytes": 2**62}, {"unit_bytes": 3},
        {"unit_bytes": 0}, {"nbytes": -1}, {"nbytes": 2**63 - 1}, {"nbytes": 393_017}, {"unit_bytes": 8},
    ],
)  # fmt: skip
def test_a_delta_takes_memory_for_a_chunk_only(tmp_path: Path, fields: dict[str, int]) -> None:
    base = tmp_path / "base"
    base.write_bytes(bytes(393_016))
    text = json.dumps({"unit_bytes": 2, "nbytes": 393_016, "chunk_bytes": CHUNK_BYTES, **fields}).encode()
    delta = io.BytesIO(len(text).to_bytes(8, "little") + text + bytes(8))
    tracemalloc.start()
    try:
        with pytest.raises(Mismatch, match="damaged, or belongs to another file"):
            apply_delta(delta, base)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("spoil", [lambda d: d[:-5] + b"\xff" + d[-4:], lambda d: d[: len(d) // 2], lambda d: b""])
def test_a_damaged_delta_costs_a_whole_read(run: Path, tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    cache, server = tmp_path / "cache", Server()
    follower = SnapshotFollower(run, server, cache)
    assert follower.poll() == "step-3"
    whole = follower.read_bytes
    write(run, 4)
    delta = run / "step-4" / f"{WEIGHTS}.delta"
    delta.write_bytes(spoil(delta.read_bytes()))
    assert follower.poll() == "step-4"
    assert follower.read_bytes >= whole
    assert all(torch.equal(server.loaded[-1][name], tensor) for name, tensor in weights(4).items())


def test_a_store_is_followed_by_the_same_rules(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    for version in (1, 2, 3):
        write(tmp_path / "run", version, upload=url, keep=2)
    files = fsspec.filesystem("memory")
    assert {path["name"].rpartition("/")[2] for path in files.ls(f"/{tmp_path.name}")} == {
        "step-2", "step-3", "snapshots.json"
    }  # fmt: skip
    files.pipe_file(f"/{tmp_path.name}/step-3/{WEIGHTS}", b"damaged")
    server = Server()
    follower = SnapshotFollower(url, server, tmp_path / "cache")
    assert follower.poll() == "step-2"
    assert "has 7 bytes" in str(follower.refused["step-3"])
    files.pipe_file(f"/{tmp_path.name}/snapshots.json", b'{"names": ["*", "../.."]')
    assert follower.poll() is None
    write(tmp_path / "run", 4, upload=url, keep=2)
    assert follower.poll() == "step-4"
    assert all(torch.equal(server.loaded[-1][name], tensor) for name, tensor in weights(4).items())


def test_the_command_goes_on_and_says_once_what_the_server_fails_with(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter(range(3))

    def sleep(_: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(follow.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        follow.run(str(run), "http://127.0.0.1:1", None, (None, None), 5.0, once=False)
    assert capsys.readouterr().err.count("did not answer") == 1
    with pytest.raises(EngineUnreachable):
        follow.run(str(run), "http://127.0.0.1:1", None, (None, None), 5.0, once=True)
