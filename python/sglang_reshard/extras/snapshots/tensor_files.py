"""Checks that the files of a snapshot match its manifest, and reads their tables of tensors.

No allocation depends on sizes that a file claims: sizes are compared first, and headers are bounded. Tables of tensors
must fill their file without overlaps, as the safetensors format requires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, BinaryIO, NamedTuple

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.snapshots.manifest import MANIFEST, Snapshot, SnapshotFile
from sglang_reshard.layout.checkpoint_headers import DTYPES
from sglang_reshard.layout.regions import TensorSpec

INDEX = "model.safetensors.index.json"
SAFETENSORS = ".safetensors"
WEIGHTS = (SAFETENSORS, ".bin", ".pt", ".pth", ".gguf")  # suffixes of what loaders read
MOST_TENSORS = 30_000  # of one file
_HEADER_BYTES = 16 << 20  # at most
_LENGTH_BYTES = 8
_PART = 1 << 24
METADATA = "__metadata__"  # in a table of tensors, and the name of none

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Count, _Count]


class Table(NamedTuple):
    """The table of tensors at the beginning of a file.

    tensors         with the offset of each in the file, in bytes, in ascending order
    nbytes, sha256  of the table, with its length before it
    """

    tensors: tuple[tuple[TensorSpec, int], ...]
    nbytes: int
    sha256: str


def note_tensors(of_tensor: dict[str, str], table: Table, file: str, where: str) -> None:
    """Adds the tensors of a file to tensor -> file. Raises Mismatch if another file has one of them."""
    for spec, _ in table.tensors:
        if of_tensor.setdefault(spec.name, file) != file:
            raise Mismatch(f"{where} has tensor {spec.name}, but {of_tensor[spec.name]} has it, too")


def check_kinds(snapshot: Snapshot, where: Callable[[str], str]) -> None:
    """Raises Mismatch for a snapshot without safetensors, or with weights of another kind."""
    weights = [name for name in snapshot.files if name.endswith(WEIGHTS)]
    if not weights:
        raise Mismatch(f"{where(MANIFEST)} lists no safetensors files")
    for name in weights:
        if not name.endswith(SAFETENSORS):
            raise Mismatch(f"{where(name)}: weights of a snapshot must be safetensors files")


def check_size(nbytes: int, file: SnapshotFile, where: str) -> None:
    if nbytes != file.nbytes:
        raise Mismatch(f"{where} has {nbytes} bytes, but its manifest lists {file.nbytes}")


def hash_of(opened: BinaryIO, nbytes: int) -> str:
    """Returns the SHA-256 of a file, of whose bytes no more than `nbytes` and one are read."""
    found, left = hashlib.sha256(), nbytes + 1
    while left and (part := opened.read(min(left, _PART))):
        found.update(part)
        left -= len(part)
    return found.hexdigest()


def read_table(opened: BinaryIO, nbytes: int, where: str) -> Table:
    """Returns the tensors of one file of safetensors. Raises Mismatch unless they fill it."""
    begins = opened.read(_LENGTH_BYTES)
    length = int.from_bytes(begins, "little")
    if not 0 < length <= min(_HEADER_BYTES, nbytes - _LENGTH_BYTES):
        raise Mismatch(f"{where} claims a header of {length} bytes, but has only {nbytes} bytes itself")
    header = opened.read(length)
    try:
        listed = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        if (metadata := listed.pop(METADATA, None)) is not None:
            msgspec.json.decode(metadata, type=dict[str, str])
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in listed.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise Mismatch(f"{where} has a damaged header: {error}") from error
    if len(tensors) > MOST_TENSORS:
        raise Mismatch(f"{where} has {len(tensors)} tensors; at most {MOST_TENSORS} are supported in one file")
    found, first, end = [], _LENGTH_BYTES + length, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in DTYPES:
            raise Mismatch(f"{where}: {name} has the dtype {tensor.dtype[:40]!r}, which safetensors does not define")
        spec = TensorSpec(name, tensor.shape, DTYPES[tensor.dtype])
        begin, stop = tensor.data_offsets
        if begin != end or stop - begin != spec.nbytes:
            raise Mismatch(f"{where}: {name} of shape {tensor.shape} does not fit bytes {begin} to {stop}")
        found.append((spec, first + begin))
        end = stop
    if first + end != nbytes:
        raise Mismatch(f"{where} has {nbytes} bytes, but its tensors end at byte {first + end}")
    return Table(tuple(found), first, hashlib.sha256(begins + header).hexdigest())
