"""Snapshots: every trainer rank writes what it holds into one checkpoint, all of it or nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.extras.snapshots.writer_files import SnapshotFiles
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.sources import describe
from support.sweep import sweep
from support.toy import checkpoint
from support.world import run_world

TRAINERS = 4
MESHES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "fsdp": ((4,), (Shard(0),)),
    "tp": ((4,), (Shard(1),)),
    "fsdp x tp": ((2, 2), (Shard(0), Shard(1))),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "whole": ((4,), (Replicate(),)),
}


def sharded(version: int, mesh: str) -> dict[str, torch.Tensor]:
    sizes, placements = MESHES[mesh]
    found = {}
    device_mesh = init_device_mesh("cpu", sizes)
    for name, tensor in checkpoint(version).items():
        placed = [p if not isinstance(p, Shard) or p.dim < tensor.dim() else Replicate() for p in placements]
        found[name] = distribute_tensor(tensor, device_mesh, placed)
    return found


def read(folder: Path) -> dict[str, torch.Tensor]:
    """As Hugging Face's loaders do, by the index."""
    of_tensor = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in of_tensor.items():
        with safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    assert {file.name for file in folder.glob("*.safetensors")} == set(of_tensor.values())
    return found


def three(trainer: Any, mesh: str, folder: str, options: dict[str, Any]) -> list[Any]:
    sender = trainer.sender()
    snapshots = Snapshots(sender, folder, **options)
    reports = [snapshots.write(sharded(v, mesh).items(), f"step-{v}") for v in (1, 2, 3)]
    return reports


@pytest.mark.parametrize("mesh", ["fsdp x tp", "hsdp", *map(sweep, ("fsdp", "tp", "whole"))])
def test_each_rank_writes_its_part(tmp_path: Path, mesh: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (model / name).write_text(name)
    others = tmp_path / "snapshots" / "somebody-elses"
    others.mkdir(parents=True)
    (others / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    options = {"file_bytes": 4000, "copy_from": str(model), "keep": 2}
    told, _ = run_world(TRAINERS, 0, three, None, mesh, str(tmp_path / "snapshots"), options)
    folder = tmp_path / "snapshots"
    names = {path.name for path in folder.iterdir()}
    assert names == {"latest", "snapshots.json", "somebody-elses", "step-2", "step-3"}
    assert (folder / "latest").resolve() == folder / "step-3"
    for version in (2, 3):
        found, expected = read(folder / f"step-{version}"), checkpoint(version)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert (folder / f"step-{version}" / "config.json").read_text() == "config.json"
    nbytes = sum(tensor.nbytes for tensor in checkpoint(1).values())
    for reports in zip(*told, strict=True):
        assert sum(report.own_bytes for report in reports) == nbytes, "what several hold is written once"
        assert {report.nbytes for report in reports} == {nbytes}
    assert len(list((folder / "step-3").glob("*.safetensors"))) > 2


def test_floats_are_cast_and_each_rank_may_list_its_own(tmp_path: Path) -> None:
    run_world(2, 0, own_tensors, None, str(tmp_path))
    found = load_file(tmp_path / "step" / "model-00001-of-00001.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "first": torch.bfloat16, "second": torch.bfloat16, "numbers": torch.int64, "nothing": torch.bfloat16
    }  # fmt: skip
    assert torch.equal(found["second"], torch.full((3, 5), 1.5).bfloat16())
    assert torch.equal(found["numbers"], torch.arange(7))


def own_tensors(trainer: Any, folder: str) -> None:
    sender = trainer.sender()
    own = [{"first": torch.ones(3)}, {"second": torch.full((3, 5), 1.5), "numbers": torch.arange(7)}][trainer.rank]
    named = {**own, "nothing": torch.empty(0, 4)}
    Snapshots(sender, folder, dtype="bfloat16").write(named.items(), "step", partial=True)


def failing(trainer: Any, folder: str) -> list[str]:
    sender = trainer.sender()
    snapshots, weights = Snapshots(sender, folder), sharded(1, "fsdp")
    told = []

    def refused(kind: type[ReshardError], name: str, **options: Any) -> None:
        with pytest.raises(kind) as error:
            snapshots.write(weights.items(), name, **options)
        told.append(str(error.value))

    snapshots.write(weights.items(), "good")
    refused(Mismatch, "good")
    refused(Mismatch, "../good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _full)
        refused(ReshardError, "full")
    with pytest.MonkeyPatch.context() as patch:
        if trainer.rank == 2:
            patch.setattr("sglang_reshard.extras.snapshots.of_sender.write_boxes", _broken)
        refused(ReshardError, "broken")
    if trainer.rank == 2:
        weights = dict(list(weights.items())[1:])
    refused(Mismatch, "apart")
    weights = sharded(1, "fsdp")
    snapshots.write(weights.items(), "later")
    return told


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _broken(*_: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    told, _ = run_world(TRAINERS, 0, failing, None, str(tmp_path))
    for exists, name, full, broken, apart in told:
        assert "already exists" in exists
        assert "cannot be the name of a snapshot" in name
        assert "trainer rank 0: OSError: [Errno 28] No space left on device" in full
        assert "trainer rank 2: OSError: [Errno 5] Input/output error" in broken
        assert "trainer ranks disagree at tensor embed.weight: its name is embed.weight on trainer rank 0" in apart
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "later", "latest", "snapshots.json"]
    assert read(tmp_path / "later").keys() == checkpoint(1).keys()


def test_files_are_aligned_and_no_larger_than_asked() -> None:
    named = {f"w{n}": torch.zeros(n, dtype=d) for n, d in enumerate((torch.int8, torch.float64, torch.bfloat16) * 5)}
    layout: SourceLayout = describe(named.items(), trainer_rank=0, global_ranks=(0,)).layout
    files = SnapshotFiles.of(layout, None, 100)
    assert sorted(spec.name for file in files.files for spec, _ in file.tensors) == sorted(named)
    for file in files.files:
        assert len(file.header) % 8 == 0
        assert file.nbytes - len(file.header) <= 100 or len(file.tensors) == 1
        assert all(at % spec.item_bytes == 0 for spec, at in file.tensors)
