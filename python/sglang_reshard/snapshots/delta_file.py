"""Writes what has changed between two files of the same size, and applies it to the earlier one.

header    JSON: unit_bytes, nbytes of either file, and of a chunk
table     int32 [chunks, 2]: how each chunk is encoded, see `delta.encoding`
payloads  one after the other

Files are read and written in chunks and not mapped: one that another process truncates is an error, and no SIGBUS.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
import torch

from sglang_reshard.delta.encoding import ALIGN_BYTES, BLOCK, Encoded, Kind, apply, encode
from sglang_reshard.errors import Mismatch

CHUNK_BYTES = 4 << 20
_LENGTH_BYTES = 8
_HEADER_BYTES = 1 << 12  # at most
_ROW_BYTES = 8

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _Header(msgspec.Struct, frozen=True):
    unit_bytes: int
    nbytes: _Bytes
    chunk_bytes: int = CHUNK_BYTES

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // self.chunk_bytes)


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
    written = _LENGTH_BYTES + len(described) + _ROW_BYTES * header.chunks
    room, before, after = (torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(3))
    table: list[Encoded] = []
    with open(out, "wb") as opened, open(base, "rb", buffering=0) as old, open(new, "rb", buffering=0) as changed:
        opened.seek(written)
        for begin in range(0, nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, nbytes - begin)
            for file, part in ((old, before), (changed, after)):
                if _read_into(file, part[:size]) != size:
                    written = most + 1  # one of them was truncated: there is no delta
            if written > most:
                break
            encoded = encode(after[:size], before[:size], unit_bytes, room)
            assert encoded is not None, "a chunk fits into a chunk"
            payload = encoded.payload_bytes(size // unit_bytes, unit_bytes)
            written += payload
            if written > most:
                break
            opened.write(room[:payload].numpy().data)
            table.append(encoded)
        opened.seek(0)
        opened.write(len(described).to_bytes(_LENGTH_BYTES, "little") + described)
        opened.write(np.array(table, "<i4").tobytes())
    if written > most:
        out.unlink()
        return None
    return written


def apply_delta(delta: BinaryIO, path: Path) -> None:
    """Overwrites a file, the base, by what has changed. Raises Mismatch for a delta that is not of such a file."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "r+b", buffering=0) as content:
        header = _read_header(delta, os.fstat(descriptor).st_size, path)
        table = delta.read(_ROW_BYTES * header.chunks)
        if len(table) != _ROW_BYTES * header.chunks:
            raise _invalid(path)
        chunk = torch.empty(min(CHUNK_BYTES, header.nbytes), dtype=torch.uint8)
        for number, (kind, changed) in enumerate(np.frombuffer(table, "<i4").reshape(-1, 2).tolist()):
            begin = number * header.chunk_bytes
            message = chunk[: min(header.chunk_bytes, header.nbytes - begin)]
            units = len(message) // header.unit_bytes
            if not 0 <= kind < len(Kind) or not 0 <= changed <= units:
                raise _invalid(path)
            encoded = Encoded(Kind(kind), changed)
            payload = bytearray(delta.read(encoded.payload_bytes(units, header.unit_bytes)))
            if len(payload) != encoded.payload_bytes(units, header.unit_bytes):
                raise _invalid(path)
            if not payload:
                continue
            if not _is_sound(encoded, payload, units):
                raise _invalid(path)
            content.seek(begin)
            if _read_into(content, message) != len(message):
                raise _invalid(path)
            apply(encoded, torch.frombuffer(payload, dtype=torch.uint8), header.unit_bytes, message)
            content.seek(begin)
            _write_all(content, message)


def _read_header(delta: BinaryIO, nbytes: int, path: Path) -> _Header:
    length = int.from_bytes(delta.read(_LENGTH_BYTES), "little")
    if length > _HEADER_BYTES:
        raise _invalid(path)
    try:
        header = msgspec.json.decode(delta.read(length), type=_Header)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise _invalid(path) from error
    if (header.nbytes, header.chunk_bytes) != (nbytes, CHUNK_BYTES):
        raise _invalid(path)
    if header.unit_bytes not in (1, 2, 4) or nbytes % header.unit_bytes:
        raise _invalid(path)
    return header


def _is_sound(encoded: Encoded, payload: bytearray, units: int) -> bool:
    """Returns whether all positions are within the chunk, and as many as there are values."""
    if encoded.kind is Kind.MASK:
        bits = np.frombuffer(payload, np.uint8, -(-units // 8))
        return int(np.unpackbits(bits, count=units, bitorder="little").sum()) == encoded.changed
    if encoded.kind is Kind.POSITIONS:
        counts = np.frombuffer(payload, "<i4", -(-units // BLOCK))
        if counts.min() < 0 or counts.sum(dtype=np.int64) != encoded.changed:
            return False
        after_counts = -(-counts.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        positions = np.frombuffer(payload, "<u2", encoded.changed, after_counts)
        last = positions[encoded.changed - int(counts[-1]) :]  # the other blocks are full: no 16 bits lead out of them
        return not len(last) or int(last.max()) < units - (len(counts) - 1) * BLOCK
    return True


def _read_into(opened: BinaryIO, room: torch.Tensor) -> int:
    """Fills `room` from a file; returns how many bytes there were."""
    view, filled = room.numpy().data, 0
    while filled < len(view) and (count := opened.readinto(view[filled:])):  # type: ignore[attr-defined]
        filled += count
    return filled


def _write_all(opened: BinaryIO, content: torch.Tensor) -> None:
    view = content.numpy().data
    while view:
        view = view[opened.write(view) :]


def _invalid(path: Path) -> Mismatch:
    return Mismatch(f"what has changed of {path.name} is damaged, or of another file")
