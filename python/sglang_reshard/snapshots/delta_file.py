"""Writes what has changed between two files of the same size, and applies it to the earlier one.

header    JSON: unit_bytes, nbytes of either file, and of a chunk
table     int32 [chunks, 2]: how each chunk is encoded, see `delta.encoding`
payloads  one after the other
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from sglang_reshard.delta.encoding import ALIGN_BYTES, Encoded, Kind, apply, encode
from sglang_reshard.errors import Mismatch

CHUNK_BYTES = 4 << 20
_LENGTH_BYTES = 8


class _Header(msgspec.Struct, frozen=True):
    unit_bytes: int
    nbytes: int
    chunk_bytes: int = CHUNK_BYTES

    def chunks(self) -> list[int]:
        """Returns the bytes of each chunk."""
        return [min(self.chunk_bytes, self.nbytes - begin) for begin in range(0, self.nbytes, self.chunk_bytes)]


def write_delta(base: Path, new: Path, out: Path, unit_bytes: int, most: int) -> int | None:
    """Writes to `out` how `new` differs from `base`; returns its bytes, or None, without a file, if these are more.

    unit_bytes  1, 2 or 4: of an element
    most        bytes of the file at most
    """
    nbytes = new.stat().st_size
    if not base.exists() or base.stat().st_size != nbytes:
        return None
    while nbytes % unit_bytes:
        unit_bytes //= 2
    header = _Header(unit_bytes, nbytes)
    before, after = (torch.from_file(str(path), size=nbytes, dtype=torch.uint8) for path in (base, new))
    described = msgspec.json.encode(header)
    described += b" " * (-len(described) % ALIGN_BYTES)
    sizes = header.chunks()
    written = _LENGTH_BYTES + len(described) + 8 * len(sizes)
    room = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    table: list[Encoded] = []
    with open(out, "wb") as opened:
        opened.seek(written)
        for number, size in enumerate(sizes):
            begin = number * CHUNK_BYTES
            encoded = encode(after[begin : begin + size], before[begin : begin + size], unit_bytes, room)
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
    length = int.from_bytes(delta.read(_LENGTH_BYTES), "little")
    if length > CHUNK_BYTES:
        raise _invalid(path)
    try:
        header = msgspec.json.decode(delta.read(length), type=_Header)
    except msgspec.MsgspecError as error:
        raise _invalid(path) from error
    if header.nbytes != path.stat().st_size or header.unit_bytes not in (1, 2, 4) or header.chunk_bytes < 8:
        raise _invalid(path)
    sizes = header.chunks()
    rows = np.frombuffer(delta.read(8 * len(sizes)), "<i4").reshape(-1, 2).tolist()
    if len(rows) != len(sizes):
        raise _invalid(path)
    content = torch.from_file(str(path), shared=True, size=header.nbytes, dtype=torch.uint8)
    for number, (size, (kind, changed)) in enumerate(zip(sizes, rows, strict=True)):
        units = size // header.unit_bytes
        if not 0 <= kind < len(Kind) or not 0 <= changed <= units:
            raise _invalid(path)
        encoded = Encoded(Kind(kind), changed)
        payload = bytearray(delta.read(encoded.payload_bytes(units, header.unit_bytes)))
        if len(payload) != encoded.payload_bytes(units, header.unit_bytes):
            raise _invalid(path)
        if payload:
            begin = number * header.chunk_bytes
            data = torch.frombuffer(payload, dtype=torch.uint8)
            apply(encoded, data, header.unit_bytes, content[begin : begin + size])


def _invalid(path: Path) -> Mismatch:
    return Mismatch(f"what has changed of {path.name} is damaged, or of another file")
