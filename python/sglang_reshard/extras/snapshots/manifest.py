"""Describes a snapshot and the list of all snapshots, as JSON files next to the weights.

Only the list defines the published snapshots and their order. Every snapshot has a publication, a number that is
greater than those of all before it, see `protocol.publication`; times of files mean nothing.

All files may come from anybody: `decode_snapshot` and `decode_list` take bytes of a bounded size, and check every
field. A name in them is one component of a path. No allocation depends on a size that a file of weights claims: sizes
are compared first, headers are bounded, and tables of tensors must fill their file without overlaps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, TypeVar

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.checkpoint_headers import DTYPES
from sglang_reshard.layout.decoders import from_json
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.protocol.publication import MOST_PUBLICATION

LATEST = "latest"
MANIFEST, LIST = "snapshot.json", "snapshots.json"
CACHE_MARK = ".sglang-reshard-cache"  # in a cache, whose other files may be deleted
DELTA = ".delta"  # suffix of what has changed of a file since the snapshot before

_NAME_BYTES = 255  # of one component, on every file system
_ROOM = len(".") + len(".partial")  # around a snapshot's name, while it is written
PATTERNS = frozenset("*?[]")  # an object store's client expands them

MANIFEST_BYTES, LIST_BYTES = 16 << 20, 4 << 20  # at most
SUM_DIGITS = 16  # of a checksum in a manifest
PART_BYTES = 1 << 24  # that are read at once
T = TypeVar("T")

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
_Publication = Annotated[int, msgspec.Meta(ge=1, le=MOST_PUBLICATION)]
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Sums = Annotated[str, msgspec.Meta(pattern=f"^([0-9a-f]{{{SUM_DIGITS}}})*$")]
INDEX = "model.safetensors.index.json"
SAFETENSORS = ".safetensors"
WEIGHTS = (SAFETENSORS, ".bin", ".pt", ".pth", ".gguf")  # suffixes of what loaders read
MOST_TENSORS = 30_000  # of one file
_HEADER_BYTES = 16 << 20  # at most
_LENGTH_BYTES = 8
METADATA = "__metadata__"  # in a table of tensors, and the name of none


class SnapshotFile(msgspec.Struct, frozen=True):
    """One file of a snapshot.

    sha256       of its content
    delta_bytes  size of the file next to it with the changes since `Snapshot.base`; None if there is none
    table, sums  of safetensors: SHA-256 of the table of tensors, and the checksum of each tensor in the order of their
                 bytes, see `landings.checked`
    """

    nbytes: _Bytes
    sha256: _Sha256
    delta_bytes: _Bytes | None = None
    table: _Sha256 | None = None
    sums: _Sums = ""


class Entry(NamedTuple):
    """A snapshot as others refer to it. A name alone may have been written again."""

    name: str
    publication: int


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot: its files by name, and the snapshot that its deltas apply to, if any."""

    name: str
    files: Annotated[dict[str, SnapshotFile], msgspec.Meta(max_length=1 << 16)]
    publication: _Publication
    base: str = ""
    base_publication: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def entry(self) -> Entry:
        return Entry(self.name, self.publication)

    @property
    def base_entry(self) -> Entry | None:
        return Entry(self.base, self.base_publication) if self.base else None


class SnapshotList(msgspec.Struct, frozen=True):
    """The snapshots in a folder that are published.

    names         the newest last
    publications  of each
    unsettled     names of folders that are not published, and may be there: one that was about to be when its writer
                  died, or that was about to be deleted. The next writer deletes them
    """

    names: tuple[str, ...] = ()
    publications: tuple[_Publication, ...] = ()
    unsettled: tuple[str, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[Entry], unsettled: Iterable[str] = ()) -> SnapshotList:
        """Returns the list of these snapshots, in the order of publication."""
        ordered = sorted(entries, key=lambda entry: entry.publication)
        names = tuple(entry.name for entry in ordered)
        left = dict.fromkeys(name for name in unsettled if name not in names)
        return cls(names, tuple(entry.publication for entry in ordered), tuple(left))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(map(Entry, self.names, self.publications))

    def with_newest(self, entry: Entry, keep: int | None) -> SnapshotList:
        """Returns the list with one more snapshot, and without all but the newest `keep`, which become unsettled."""
        entries = SnapshotList.of([*(e for e in self.entries() if e.name != entry.name), entry]).entries()
        kept = entries if keep is None else entries[-keep:]
        return SnapshotList.of(kept, [*self.unsettled, *(e.name for e in entries if e not in kept)])


def encode(message: Snapshot | SnapshotList) -> bytes:
    return msgspec.json.format(msgspec.json.encode(message), indent=1) + b"\n"


def decode_snapshot(data: bytes, where: str, entry: Entry | None = None) -> Snapshot:
    """Raises Mismatch, naming the file, for an invalid manifest, or one that is not of `entry`."""
    snapshot = _decode(data, Snapshot, where, MANIFEST_BYTES)
    check_snapshot_name(snapshot.name, where)
    for name in snapshot.files:
        check_file_name(name, where)
    if entry is not None and snapshot.entry != entry:
        raise Mismatch(
            f"{where} describes snapshot {snapshot.name!r} with publication number {snapshot.publication}, but {LIST} "
            f"lists {entry.name!r} with {entry.publication}"
        )
    if snapshot.base:
        check_snapshot_name(snapshot.base, where)
        if snapshot.base == snapshot.name or snapshot.base_publication >= snapshot.publication:
            raise Mismatch(f"{where}: the base {snapshot.base!r} is not an earlier snapshot")
    return snapshot


def decode_list(data: bytes, where: str) -> SnapshotList:
    """Raises Mismatch, naming the file, for an invalid list of snapshots."""
    listed = _decode(data, SnapshotList, where, LIST_BYTES)
    for name in (*listed.names, *listed.unsettled):
        check_snapshot_name(name, where)
    if len(listed.publications) != len(listed.names):
        raise Mismatch(
            f"{where} lists {len(listed.publications)} publication numbers for {len(listed.names)} snapshots"
        )
    ordered = tuple(sorted(set(listed.publications))) == listed.publications
    if not ordered or len({*listed.names, *listed.unsettled}) != len(listed.names) + len(listed.unsettled):
        raise Mismatch(f"{where} is not sorted by publication number, or lists a name twice")
    return listed


def _decode(data: bytes, kind: type[T], where: str, most_bytes: int) -> T:
    if len(data) > most_bytes:
        raise Mismatch(f"{where} has more than {most_bytes} bytes; sglang-reshard did not write it")
    try:
        return from_json(data, kind)
    except msgspec.MsgspecError as error:
        raise Mismatch(f"{where} is not a valid file of a snapshot: {error}") from error


def is_snapshot_name(name: str) -> bool:
    is_own = name.startswith(".") or name in (LATEST, LIST)
    return _is_component(name, _NAME_BYTES - _ROOM) and not is_own and PATTERNS.isdisjoint(name)


def check_snapshot_name(name: str, where: str = "") -> None:
    """Raises Mismatch unless this can be the name of a snapshot. where: the file that has it, if one does"""
    if not is_snapshot_name(name):
        raise Mismatch(
            f"{where}{': ' if where else ''}{name[:_NAME_BYTES]!r} cannot be the name of a snapshot: pass a valid "
            f"folder name of at most {_NAME_BYTES - _ROOM} bytes, without a leading dot and without any of / \\ * ? [ ]"
        )


def check_file_name(name: str, where: str) -> None:
    """Raises Mismatch unless this can be the name of a file of the snapshot that `where` describes."""
    if not _is_component(name, _NAME_BYTES - len(DELTA)) or name in (MANIFEST, CACHE_MARK):
        raise Mismatch(f"{where} lists {name[:_NAME_BYTES]!r}, which cannot be the name of a file in a snapshot")


def _is_component(name: str, most_bytes: int) -> bool:
    if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        return False
    return len(name.encode(errors="replace")) <= most_bytes


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Bytes, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Bytes, _Bytes]


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
    """Raises Mismatch for a snapshot without safetensors or their checksums, or with weights of another kind."""
    weights = [name for name in snapshot.files if name.endswith(WEIGHTS)]
    if not weights:
        raise Mismatch(f"{where(MANIFEST)} lists no safetensors files")
    for name in weights:
        if not name.endswith(SAFETENSORS):
            raise Mismatch(f"{where(name)}: weights of a snapshot must be safetensors files")
        if snapshot.files[name].table is None:
            raise Mismatch(f"{where(MANIFEST)} lists no checksums of the tensors in {name}; write a new snapshot")


def check_size(nbytes: int, file: SnapshotFile, where: str) -> None:
    if nbytes != file.nbytes:
        raise Mismatch(f"{where} has {nbytes} bytes, but its manifest lists {file.nbytes}")


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file that this process has written."""
    found = hashlib.sha256()
    with open(path, "rb") as opened:
        while part := opened.read(PART_BYTES):
            found.update(part)
    return found.hexdigest()


def read_table(opened: BinaryIO, nbytes: int, where: str) -> Table:
    """Returns the tensors of one file of safetensors. Raises Mismatch unless they fill it."""
    begins = opened.read(_LENGTH_BYTES)
    length = int.from_bytes(begins, "little")
    if not 0 < length <= min(_HEADER_BYTES, nbytes - _LENGTH_BYTES):
        raise Mismatch(f"{where} claims a header of {length} bytes, but has only {nbytes} bytes itself")
    header = opened.read(length)
    try:
        listed = from_json(header, dict[str, msgspec.Raw])
        if (metadata := listed.pop(METADATA, None)) is not None:
            from_json(bytes(metadata), dict[str, str])
        tensors = {name: from_json(bytes(raw), _Tensor) for name, raw in listed.items()}
    except msgspec.MsgspecError as error:
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
