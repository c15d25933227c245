"""Describes a snapshot and the list of them, as JSON files beside the weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from sglang_reshard.errors import Mismatch

MANIFEST, LIST = "snapshot.json", "snapshots.json"
MAX_MANIFEST_BYTES = 1 << 24  # of a file of JSON: 100,000 files take 14 MB
DELTA = ".delta"  # suffix of what has changed of a file since the snapshot before
_PART = 1 << 24  # bytes that are read at once
T = TypeVar("T")


class SnapshotFile(msgspec.Struct, frozen=True):
    """One file of a snapshot.

    sha256       of its content
    delta_bytes  of the file beside it that has what has changed since `Snapshot.base`; None if there is none
    """

    nbytes: int
    sha256: str
    delta_bytes: int | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot: its files by name, and the snapshot before, of which there may be deltas."""

    name: str
    files: dict[str, SnapshotFile]
    base: str = ""


class SnapshotList(msgspec.Struct, frozen=True):
    """The names of the snapshots in a folder, the newest last."""

    names: tuple[str, ...] = ()


def encode(message: Snapshot | SnapshotList) -> bytes:
    return msgspec.json.format(msgspec.json.encode(message), indent=1) + b"\n"


def decode(data: bytes, kind: type[T], where: str) -> T:
    """Raises Mismatch, naming where it was read, for what is no such file."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Mismatch(f"{where} is not of a snapshot of sglang-reshard: {error}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that is either the old one or the new one, and is on disk then."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(partial, path)


def sha256_of(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as opened:
        while part := opened.read(_PART):
            found.update(part)
    return found.hexdigest()
