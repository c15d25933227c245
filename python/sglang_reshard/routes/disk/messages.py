"""Describes the files of a snapshot to the engine ranks that read them."""

from __future__ import annotations

import msgspec
import numpy as np

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.protocol.session import Session

_KEY = "disk/files"  # a session is of one snapshot


class DiskFile(msgspec.Struct, frozen=True):
    """One safetensors file.

    header_bytes, header  size of the length and the table of tensors at its beginning, and their SHA-256
    sha256                of the whole file; empty where the checksums of its tensors are known
    """

    name: str
    nbytes: int
    header_bytes: int
    header: str
    sha256: str = ""


class DiskFiles(msgspec.Struct, frozen=True):
    """The files of a snapshot, and where each tensor of the layout is in them.

    folder   absolute path, the same on all hosts of the engine
    file_of  number of each tensor's file, little-endian int32
    offsets  of each tensor's first byte in its file, little-endian int64
    sums     checksum of each whole tensor, see `landings.checked`, little-endian uint64; empty if the snapshot has none
    """

    snapshot: str
    folder: str
    files: tuple[DiskFile, ...]
    file_of: bytes
    offsets: bytes
    sums: bytes = b""

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns each tensor's file number and offset in bytes."""
        return np.frombuffer(self.file_of, "<i4").astype(np.int64), np.frombuffer(self.offsets, "<i8")

    def tensor_sums(self) -> np.ndarray:
        """Returns uint64 [tensors]."""
        return np.frombuffer(self.sums, "<u8").astype(np.uint64)


def put_files(session: Session, files: DiskFiles) -> None:
    session.put(files, _KEY, hashed=False)


def get_files(session: Session, layout: SourceLayout, timeout_s: float) -> DiskFiles:
    """Returns the files of a layout's tensors. Raises Mismatch unless every tensor lies in its file."""
    found = session.get(_KEY, DiskFiles, "the list of the snapshot's files", timeout_s, hashed=False)
    count = len(layout.tensors)
    columns = len(found.file_of) // 4, len(found.offsets) // 8, len(found.sums) // 8 if found.sums else count
    if columns != (count,) * 3 or (len(found.file_of) + len(found.offsets) + len(found.sums)) % 4:
        raise Mismatch(f"the list of the files of snapshot {found.snapshot!r} does not have {count} tensors")
    numbers, offsets = found.places()
    for tensor, number, offset in zip(layout.tensors, numbers.tolist(), offsets.tolist(), strict=True):
        file = found.files[number] if 0 <= number < len(found.files) else None
        if file is None or not file.header_bytes <= offset <= file.nbytes - tensor.spec.nbytes:
            raise Mismatch(f"snapshot {found.snapshot!r}: {tensor.name} lies in none of the snapshot's files")
    return found
