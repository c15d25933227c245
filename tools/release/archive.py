"""Wheels as entries: read with every digest checked, written so that equal entries make equal bytes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can say
_FILE, _PROGRAM = 0o100644, 0o100755
_UNIX = 3
_LEVEL = 6
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")  # of a RECORD that is not the one to be written


class BadWheel(Exception):
    """A wheel is not what its name or its RECORD says; the message says in what."""


@dataclass(frozen=True)
class Entry:
    """One file of a wheel. path: within the wheel, with slashes. executable: its mode is 0755 and not 0644."""

    path: str
    data: bytes
    executable: bool = False


@dataclass(frozen=True)
class Wheel:
    """A wheel's files, without its RECORD. `tags` is the last part of its name: cp311-cp311-linux_x86_64."""

    name: str
    version: str
    tags: str
    entries: tuple[Entry, ...]

    @property
    def filename(self) -> str:
        return f"{self.name}-{self.version}-{self.tags}.whl"

    @property
    def dist_info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    def about(self, name: str) -> bytes:
        """The file of that name in the dist-info folder; KeyError if there is none."""
        return {entry.path: entry.data for entry in self.entries}[f"{self.dist_info}/{name}"]


def read(path: Path) -> Wheel:
    """The wheel at `path`. Raises BadWheel unless its files are those of its RECORD, with their sizes and digests."""
    name, version, tags = _parts(path.name)
    dist_info = f"{name}-{version}.dist-info"
    record_path = f"{dist_info}/RECORD"
    try:
        with zipfile.ZipFile(path) as archive:
            files = [info for info in archive.infolist() if not info.is_dir()]
            found = [Entry(f.filename, archive.read(f), bool(f.external_attr >> 16 & 0o111)) for f in files]
    except zipfile.BadZipFile as error:
        raise BadWheel(f"{path} is no whole zip file ({error}); delete it and get it again") from error
    record = [entry.data for entry in found if entry.path == record_path]
    if len(record) != 1:
        raise BadWheel(f"{path} has {len(record)} files named {record_path}; a wheel has one")
    unrecorded = {record_path, *(f"{dist_info}/{signature}" for signature in _SIGNATURES)}
    entries = tuple(entry for entry in found if entry.path not in unrecorded)
    recorded = [row for row in csv.reader(io.StringIO(record[0].decode())) if row and row[0] not in unrecorded]
    if differing := {tuple(row) for row in recorded} ^ {_row(entry) for entry in entries}:
        raise BadWheel(f"{path} does not hold what its RECORD says, {min(differing)[0]} to begin with; get it again")
    if len(entries) != len(recorded):
        raise BadWheel(f"{path} holds, or records, a file twice; get it again")
    return Wheel(name, version, tags, entries)


def write(wheel: Wheel, folder: Path) -> Path:
    """The wheel as a file in `folder`, with a RECORD: the same bytes whenever and wherever zlib is the same.

    Files of the package come first and the dist-info folder last, each sorted by path, all of 1 January 1980.
    Raises BadWheel if two entries have one path.
    """
    entries = sorted(wheel.entries, key=lambda entry: (entry.path.startswith(f"{wheel.dist_info}/"), entry.path))
    for before, after in itertools.pairwise(entries):
        if before.path == after.path:
            raise BadWheel(f"{wheel.filename} would hold {after.path} twice")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wheel.filename
    part = path.with_suffix(".part")  # so that nobody finds half a wheel
    with zipfile.ZipFile(part, "w") as archive:
        for entry in [*entries, _record(entries, f"{wheel.dist_info}/RECORD")]:
            archive.writestr(_info(entry), entry.data, zipfile.ZIP_DEFLATED, _LEVEL)
    part.replace(path)
    return path


def _parts(filename: str) -> tuple[str, str, str]:
    parts = filename.removesuffix(".whl").split("-")
    if not filename.endswith(".whl") or len(parts) != 5:  # six with a build number, which nothing here has
        raise BadWheel(f"{filename} is not named NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    return parts[0], parts[1], "-".join(parts[2:])


def _row(entry: Entry) -> tuple[str, str, str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(entry.data).digest()).rstrip(b"=").decode()
    return entry.path, f"sha256={digest}", str(len(entry.data))


def _record(entries: Iterable[Entry], path: str) -> Entry:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*map(_row, entries), (path, "", "")])
    return Entry(path, text.getvalue().encode())


def _info(entry: Entry) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(entry.path, _EPOCH)
    info.create_system = _UNIX  # and not that of the builder's machine
    info.external_attr = (_PROGRAM if entry.executable else _FILE) << 16
    return info
