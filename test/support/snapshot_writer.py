"""A snapshot writer of one trainer rank, in this process, and what a folder has to be like after it."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_reshard.extras.snapshots.folders import LocalFolder, listed
from sglang_reshard.extras.snapshots.of_sender import SnapshotOptions, SnapshotReport, SnapshotWriter


class Alone:
    """The sender of one trainer rank, and its session."""

    ranks = 0, (0,)

    def __init__(self, timeout_s: float) -> None:
        self.session, self.timeout_s = self, timeout_s

    def put(self, _layout: Any) -> str:
        return ""

    def exchange(self, _name: str, own: bytes, _s: float, _explain: Any) -> list[bytes]:
        return [own]


@functools.cache
def weights(version: int) -> dict[str, torch.Tensor]:
    """Returns tensors, not to be written to; versions differ from each other in one element of a hundred."""
    w = torch.linspace(-1, 1, 4_000).bfloat16()
    w[::101] += version
    return {"w": w, "bias": torch.full((7,), float(version))}


def write(folder: Path, version: int, *, timeout_s: float = 5.0, **options: Any) -> SnapshotReport:
    """Writes snapshot `step-VERSION`."""
    name = options.pop("name", f"step-{version}")
    return write_tensors(folder, name, weights(version), timeout_s=timeout_s, **{"delta": True, **options})


def write_tensors(
    folder: Path, name: str, tensors: dict[str, torch.Tensor], *, timeout_s: float = 5.0, **options: Any
) -> SnapshotReport:
    sender: Any = Alone(timeout_s)
    return SnapshotWriter(sender, folder, SnapshotOptions(name, **options)).write(tensors.items())


def is_whole(path: Path) -> bool:
    """Returns whether every file is what the manifest says, and the tensors are those of one version."""
    files = json.loads((path / "snapshot.json").read_text())["files"]
    for name, file in files.items():
        data = (path / name).read_bytes()
        if (len(data), hashlib.sha256(data).hexdigest()) != (file["nbytes"], file["sha256"]):
            return False
    found = load_file(path / "model-00001-of-00001.safetensors")
    return all(torch.equal(tensor, weights(int(found["bias"][0]))[name]) for name, tensor in found.items())


def assert_consistent(folder: Path) -> None:
    """Each snapshot of the list is there and whole, and each folder is in the list, as published or as unsettled."""
    found = listed(LocalFolder(folder))
    there = {p.name for p in folder.iterdir() if p.is_dir() and not p.is_symlink() and not p.name.startswith(".")}
    names = set(found.names) if found is not None else set()
    assert names <= there, "an entry without a snapshot"
    assert there <= names | set(found.unsettled if found is not None else ()), "a snapshot that is in no list"
    assert all(is_whole(folder / name) for name in names)
    if os.path.lexists(folder / "latest"):
        assert (folder / "latest").exists(), "latest leads nowhere"
