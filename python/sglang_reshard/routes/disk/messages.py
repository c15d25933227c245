"""Describes the files of a snapshot to the engine ranks that read them."""

from __future__ import annotations

import msgspec

from sglang_reshard.protocol.session import Session

_KEY = "disk/files"  # a session is of one snapshot


class DiskFile(msgspec.Struct, frozen=True):
    """One safetensors file.

    header_bytes, header  size of the length and the table of tensors at its beginning, and their SHA-256
    """

    name: str
    nbytes: int
    header_bytes: int
    header: str


class DiskFiles(msgspec.Struct, frozen=True):
    """The files of a snapshot, and where each tensor of the layout is in them.

    folder   absolute path, the same on all hosts of the engine
    file_of  number of each tensor's file
    offsets  of each tensor's first byte in its file
    sums     checksum of each whole tensor, see `landings.checked`
    """

    snapshot: str
    folder: str
    files: tuple[DiskFile, ...]
    file_of: tuple[int, ...]
    offsets: tuple[int, ...]
    sums: tuple[int, ...]


def put_files(session: Session, files: DiskFiles) -> None:
    session.put(files, _KEY, hashed=False)


def get_files(session: Session, timeout_s: float) -> DiskFiles:
    """Returns what the server has listed, once it has found every tensor of the layout in a file."""
    return session.get(_KEY, DiskFiles, "the list of the snapshot's files", timeout_s, hashed=False)
