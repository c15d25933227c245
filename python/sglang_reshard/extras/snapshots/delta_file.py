"""Writes and applies the difference of two files of equal size, as a separate file.

header    JSON: unit_bytes, nbytes of either file, and of a chunk
table     int32 [chunks, 2]: how each chunk is encoded, see `routes.delta.encoding`
payloads  the index and the values of each chunk, one after the other

Files of others are read and written in chunks and not mapped: one that another process truncates is an error, and no
SIGBUS.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.decoders import from_json
from sglang_reshard.routes.delta.checks import is_sound, read_encodings
from sglang_reshard.routes.delta.encoding import ALIGN_BYTES, UNITS, Encoded, Kind, apply, encode, index_room

CHUNK_BYTES = 4 << 20
_LENGTH_BYTES = 8
_HEADER_BYTES = 1 << 12  # at most
_ROW_BYTES = 8
_CHUNKS = CHUNK_BYTES >> 6, CHUNK_BYTES << 4  # bytes of a chunk that are read, from and to

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    unit_bytes: int
    nbytes: _Bytes
    chunk_bytes: Annotated[int, msgspec.Meta(ge=_CHUNKS[0], le=_CHUNKS[1], multiple_of=ALIGN_BYTES)] = CHUNK_BYTES

    def chunks(self) -> list[int]:
        """Returns the bytes of each chunk."""
        return [min(self.chunk_bytes, self.nbytes - begin) for begin in range(0, self.nbytes, self.chunk_bytes)]


def write_delta(base: Path, new: Path, out: Path, unit_bytes: int, most: int) -> int | None:
    """Writes to `out` how `new` differs from `base`; returns its bytes, or None, without a file, if these are more.

    unit_bytes  1, 2 or 4: of an element
    most        bytes of the file at most
    """
    nbytes = new.stat().st_size
    try:
        found = base.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
        return None
    while nbytes % unit_bytes:
        unit_bytes //= 2
    header = _Header(unit_bytes, nbytes)
    described = msgspec.json.encode(header)
    described += b" " * (-len(described) % ALIGN_BYTES)
    sizes = header.chunks()
    written = _LENGTH_BYTES + len(described) + _ROW_BYTES * len(sizes)
    before, after = (torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2))
    index, values = (torch.empty(n, dtype=torch.uint8) for n in (index_room(CHUNK_BYTES), CHUNK_BYTES + ALIGN_BYTES))
    table: list[Encoded] = []
    with open(out, "wb") as opened, open(base, "rb") as old, open(new, "rb") as changed:
        opened.seek(written)
        for size in sizes:
            for file, part in ((old, before), (changed, after)):
                if file.readinto(part[:size].numpy().data) != size:
                    written = most + 1  # one of them was truncated: there is no delta
            if written > most:
                break
            encoded = encode(after[:size], before[:size], unit_bytes, index, values)
            assert encoded is not None, "a chunk fits into a chunk"
            units = size // unit_bytes
            written += encoded.payload_bytes(units, unit_bytes)
            if written > most:
                break
            opened.write(index[: encoded.index_bytes(units)].numpy().data)
            opened.write(values[: encoded.value_bytes(units, unit_bytes)].numpy().data)
            table.append(encoded)
        opened.seek(0)
        opened.write(len(described).to_bytes(_LENGTH_BYTES, "little") + described)
        opened.write(np.array(table, "<i4").tobytes())
    if written > most:
        out.unlink()
        return None
    return written


def apply_delta(delta: BinaryIO, path: Path) -> None:
    """Applies a delta to a file, the base, in place. Each chunk's changes are checked before they are written.

    Raises Mismatch for a delta that is damaged, or not of such a file. Earlier chunks may have been written in that
    case.
    """
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b") as content:
        header, encoded = _read_header(delta, os.fstat(content.fileno()).st_size, path)

        def read(source: Any, nbytes: int) -> torch.Tensor:
            found = torch.empty(nbytes, dtype=torch.uint8)
            if source.readinto(found.numpy().data) != nbytes:
                raise _invalid(path, f"{'the file' if source is content else 'it'} was truncated")
            return found

        for number, (how, size) in enumerate(zip(encoded, header.chunks(), strict=True)):
            if how.kind is Kind.SAME:
                content.seek(size, os.SEEK_CUR)
                continue
            units = size // header.unit_bytes
            index = read(delta, how.index_bytes(units))
            values = read(delta, how.value_bytes(units, header.unit_bytes))
            if not is_sound(how, units, index):
                raise _invalid(path, f"the positions of the changes of chunk {number} are invalid")
            chunk = read(content, size)
            apply(how, index, values, header.unit_bytes, chunk)
            content.seek(-size, os.SEEK_CUR)
            content.write(chunk.numpy().data)
        if delta.read(1):
            raise _invalid(path, "it has data after the changes")


def _read_header(delta: BinaryIO, nbytes: int, path: Path) -> tuple[_Header, Sequence[Encoded]]:
    """Returns the header of a delta of a file of `nbytes`, and how its chunks are encoded. Every field is checked."""
    length = int.from_bytes(delta.read(_LENGTH_BYTES), "little")
    if length > _HEADER_BYTES:
        raise _invalid(path, f"its header claims an invalid length of {length:,} bytes")
    try:
        header = from_json(delta.read(length), _Header)
    except msgspec.MsgspecError as error:
        raise _invalid(path, f"its header cannot be read: {error}") from error
    if header.nbytes != nbytes or not nbytes:
        raise _invalid(path, f"it applies to a file of {header.nbytes:,} bytes, but this file has {nbytes:,}")
    if header.unit_bytes not in UNITS or nbytes % header.unit_bytes:
        raise _invalid(path, f"its units of {header.unit_bytes} bytes do not divide {nbytes:,} bytes")
    sizes = header.chunks()
    data = delta.read(_ROW_BYTES * len(sizes))
    if len(data) != _ROW_BYTES * len(sizes):
        raise _invalid(path, f"its table does not list {len(sizes):,} chunks")
    rows = np.frombuffer(data, "<i4").reshape(-1, 2)
    units = [size // header.unit_bytes for size in sizes]
    return header, read_encodings(rows, units, lambda number, why: _invalid(path, f"chunk {number}: {why}"))


def _invalid(path: Path, why: str) -> Mismatch:
    return Mismatch(f"the delta of {path.name} is damaged, or belongs to another file: {why}")
