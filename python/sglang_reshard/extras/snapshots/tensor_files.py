"""Checks that the files of a snapshot match its manifest, and that a loader can read its tensors.

No allocation depends on sizes that a file claims: sizes are compared first, and headers are bounded. Tables of tensors
must fill their file without overlaps, as the safetensors format requires.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Annotated, BinaryIO

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.snapshots.manifest import Snapshot, SnapshotFile
from sglang_reshard.extras.snapshots.names import DELTA, MANIFEST

INDEX = "model.safetensors.index.json"
SAFETENSORS = ".safetensors"
WEIGHTS = (SAFETENSORS, ".bin", ".pt", ".pth", ".gguf")  # suffixes of what loaders read
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
MOST_TENSORS = 30_000  # of one file
_HEADER_BYTES, _INDEX_BYTES = 16 << 20, 32 << 20  # at most
_LENGTH_BYTES = 8
_PART = 1 << 24
_METADATA = "__metadata__"

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Open = Callable[[str], AbstractContextManager[tuple[BinaryIO, int]]]


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Count, _Count]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def check_files(open_file: Open, snapshot: Snapshot, where: Callable[[str], str]) -> None:
    """Raises Mismatch, naming a file, unless all are those of the snapshot, and its tensors can be read.

    open_file  opens a file of it for reading, with its bytes
    where      what errors call a file
    """
    check_kinds(snapshot, where)
    of_tensor: dict[str, str] = {}
    for name, file in snapshot.files.items():
        with open_file(name) as (opened, nbytes):
            check_size(nbytes, file, where(name))
            if name.endswith(SAFETENSORS):
                for tensor in _tensors(opened, nbytes, where(name)):
                    if of_tensor.setdefault(tensor, name) != name:
                        raise Mismatch(f"{where(name)} has tensor {tensor}, but {of_tensor[tensor]} has it, too")
                opened.seek(0)
            if hash_of(opened, nbytes) != file.sha256:
                raise Mismatch(
                    f"{where(name)} does not have the SHA-256 that the manifest of snapshot {snapshot.name} lists"
                )
    if INDEX in snapshot.files:
        with open_file(INDEX) as (opened, _):
            _check_index(opened.read(_INDEX_BYTES + 1), of_tensor, where(INDEX))


def check_kinds(snapshot: Snapshot, where: Callable[[str], str]) -> None:
    """Raises Mismatch for a snapshot without safetensors, or with weights of another kind."""
    weights = [name for name in snapshot.files if name.endswith(WEIGHTS)]
    if not weights:
        raise Mismatch(f"{where(MANIFEST)} lists no safetensors files")
    for name in weights:
        if not name.endswith(SAFETENSORS):
            raise Mismatch(f"{where(name)}: weights of a snapshot must be safetensors files")


def is_read_by_loaders(name: str) -> bool:
    """Returns whether a loader would read such a file, also if the manifest does not list it."""
    return name.endswith((*WEIGHTS, ".index.json")) and not name.endswith(DELTA)


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


def _tensors(opened: BinaryIO, nbytes: int, where: str) -> Mapping[str, _Tensor]:
    """Returns the tensors of one file of safetensors. Raises Mismatch unless they fill it."""
    length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    if not 0 < length <= min(_HEADER_BYTES, nbytes - _LENGTH_BYTES):
        raise Mismatch(f"{where} claims a header of {length} bytes, but has only {nbytes} bytes itself")
    try:
        listed = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
        if (metadata := listed.pop(_METADATA, None)) is not None:
            msgspec.json.decode(metadata, type=dict[str, str])
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in listed.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise Mismatch(f"{where} has a damaged header: {error}") from error
    if len(tensors) > MOST_TENSORS:
        raise Mismatch(f"{where} has {len(tensors)} tensors; at most {MOST_TENSORS} are supported in one file")
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        item_bytes = ITEM_BYTES.get(tensor.dtype)
        if item_bytes is None:
            raise Mismatch(f"{where}: {name} has the dtype {tensor.dtype[:40]!r}, which safetensors does not define")
        begin, stop = tensor.data_offsets
        if begin != end or stop - begin != math.prod(tensor.shape) * item_bytes:
            raise Mismatch(f"{where}: {name} of shape {tensor.shape} does not fit bytes {begin} to {stop}")
        end = stop
    if _LENGTH_BYTES + length + end != nbytes:
        raise Mismatch(f"{where} has {nbytes} bytes, but its tensors end at byte {_LENGTH_BYTES + length + end}")
    return tensors


def _check_index(data: bytes, of_tensor: Mapping[str, str], where: str) -> None:
    """Raises Mismatch unless the index assigns every tensor to its file."""
    if len(data) > _INDEX_BYTES:
        raise Mismatch(f"{where} has more than {_INDEX_BYTES} bytes")
    try:
        index = msgspec.json.decode(data, type=_Index)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise Mismatch(f"{where} is not a valid safetensors index: {error}") from error
    if index.weight_map != of_tensor:
        raise Mismatch(f"{where} does not assign every tensor to the file that holds it")
