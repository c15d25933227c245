"""Keeps a copy of one snapshot on this host, and brings it to a later one by deltas where these lead there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Sequence
from pathlib import Path
from typing import BinaryIO

from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.extras.snapshots.delta_file import apply_delta
from sglang_reshard.extras.snapshots.folders import Folder, LocalFolder, manifest
from sglang_reshard.extras.snapshots.manifest import (
    MANIFEST_BYTES,
    Entry,
    Snapshot,
    decode_snapshot,
    encode,
    write_atomically,
)
from sglang_reshard.extras.snapshots.names import CACHE_MARK, DELTA, MANIFEST
from sglang_reshard.extras.snapshots.tensor_files import check_files, check_kinds, check_size
from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)
_PART = 1 << 24
_LONGEST_CHAIN = 64  # of deltas, one after the other
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o666  # less the umask


class Cache:
    """A folder of this host that only one follower writes.

    read_bytes  of weights that were read from snapshots, so far
    """

    def __init__(self, path: Path) -> None:
        """Raises Mismatch for a folder that has files of others, and ReshardError for one that cannot be made."""
        self.path = path
        try:
            _claim(path)
        except OSError as error:
            raise ReshardError(f"{path} cannot be a cache: {error}") from error
        self._files = LocalFolder(path)
        self.read_bytes = 0

    def bring(self, folder: Folder, newest: Snapshot, entries: Sequence[Entry]) -> None:
        """Makes the copy that of a snapshot, one of the `entries` that `folder` lists.

        Raises Mismatch, naming a file, for a snapshot that is damaged, and ReshardError where it finds no room here.
        The copy is none then, and the next one is read whole.
        """
        check_kinds(newest, lambda name: folder.where(newest.name, name))
        try:
            present = self._present()
            chain = self._chain(folder, present, newest, entries) if present is not None else None
            (self.path / MANIFEST).unlink(missing_ok=True)  # a copy that is half written is none
            if chain is None or not self._advanced(folder, chain):
                self._check_sizes(folder, newest)
                self._clear(())
                for name in newest.files:
                    self._read_whole(folder, newest, name)
                self._check(newest, folder)
            self._clear(newest.files)
            write_atomically(self.path / MANIFEST, encode(newest))
        except OSError as error:
            raise ReshardError(f"snapshot {newest.name} cannot be stored in the cache {self.path}: {error}") from error

    def _present(self) -> Snapshot | None:
        try:
            with self._files.open("", MANIFEST) as (opened, _):
                return decode_snapshot(opened.read(MANIFEST_BYTES + 1), str(self.path / MANIFEST))
        except Mismatch:
            return None  # all is read then

    def _chain(
        self, folder: Folder, present: Snapshot, newest: Snapshot, entries: Sequence[Entry]
    ) -> list[Snapshot] | None:
        """Returns the snapshots after the present one, in order; None if deltas do not lead from it to the newest.

        Raises Mismatch for a snapshot whose bases lead back to it.
        """
        chain, seen = [newest], {newest.name}
        while (base := chain[-1].base_entry) != present.entry:
            if base is None or base not in entries or len(chain) == _LONGEST_CHAIN:
                return None
            if base.name in seen:
                raise Mismatch(
                    f"{folder.where(newest.name, MANIFEST)}: the bases of snapshot {newest.name} form a cycle back to "
                    f"{base.name}; write a new snapshot"
                )
            seen.add(base.name)
            try:
                chain.append(manifest(folder, base))
            except Mismatch as error:
                logger.warning("%s; snapshot %s is read whole", error, newest.name)
                return None
            if not chain[-1].files.keys() <= present.files.keys():
                return None
        whole = sum(file.nbytes for file in newest.files.values())
        needed = sum(f.nbytes if f.delta_bytes is None else f.delta_bytes for s in chain for f in s.files.values())
        return chain[::-1] if newest.files.keys() <= present.files.keys() and needed < whole else None

    def _advanced(self, folder: Folder, chain: Sequence[Snapshot]) -> bool:
        """Brings the copy along a chain of snapshots; returns whether the copy then equals the newest snapshot."""
        newest = chain[-1]
        try:
            for step in chain:
                for name, file in step.files.items():
                    if file.delta_bytes is None:
                        self._read_whole(folder, step, name)
                        continue
                    with folder.open(step.name, name + DELTA) as (delta, nbytes):
                        if nbytes != file.delta_bytes:
                            raise Mismatch(f"{folder.where(step.name, name + DELTA)} has {nbytes} bytes")
                        apply_delta(delta, self.path / name)
                    self.read_bytes += file.delta_bytes
            self._check(newest, folder)
        except Mismatch as error:
            logger.warning("%s; snapshot %s is read whole", error, newest.name)
            return False
        return True

    def _read_whole(self, folder: Folder, snapshot: Snapshot, name: str) -> None:
        with folder.open(snapshot.name, name) as (source, nbytes):
            check_size(nbytes, snapshot.files[name], folder.where(snapshot.name, name))
            self._write(self.path / name, source, nbytes)
        self.read_bytes += nbytes

    def _write(self, path: Path, source: BinaryIO, nbytes: int) -> None:
        """Copies exactly this number of bytes, even if a store reports another size."""
        path.unlink(missing_ok=True)
        with open(self._new(path), "wb") as copy:
            while nbytes and (part := source.read(min(nbytes, _PART))):
                try:
                    copy.write(part)
                except OSError as error:  # of this host, and no failure to read the snapshot
                    raise ReshardError(f"{path} cannot be written: {error}") from error
                nbytes -= len(part)

    @staticmethod
    def _new(path: Path) -> int:
        try:
            return os.open(path, _NEW, _MODE)
        except OSError as error:
            raise ReshardError(f"{path} cannot be written: {error}") from error

    def _check(self, snapshot: Snapshot, folder: Folder) -> None:
        """Raises Mismatch, naming a file of the snapshot, unless the copy is that snapshot."""
        check_files(lambda name: self._files.open("", name), snapshot, lambda name: folder.where(snapshot.name, name))

    def _check_sizes(self, folder: Folder, snapshot: Snapshot) -> None:
        """Raises before the copy is touched, for files of other sizes than the manifest says, and without room here."""
        for name, file in snapshot.files.items():
            with folder.open(snapshot.name, name) as (_, nbytes):
                check_size(nbytes, file, folder.where(snapshot.name, name))
        needed, free = sum(file.nbytes for file in snapshot.files.values()), shutil.disk_usage(self.path).free
        free += sum(path.lstat().st_size for path in self.path.iterdir())
        if needed > free:
            raise ReshardError(
                f"{self.path} has {free} bytes free, but snapshot {snapshot.name} needs {needed}; free space, or use "
                "another cache folder"
            )

    def _clear(self, kept: Container[str]) -> None:
        """Deletes all files but those, and this package's own mark."""
        for path in self.path.iterdir():
            if path.name not in kept and path.name != CACHE_MARK and (path.is_symlink() or not path.is_dir()):
                path.unlink()


def _claim(path: Path) -> None:
    """Makes a folder a cache; other files in it are deleted. Raises Mismatch if it has files of others."""
    path.mkdir(parents=True, exist_ok=True)
    if not (path / CACHE_MARK).exists():
        if any(path.iterdir()):
            raise Mismatch(f"{path} holds files that do not belong to a snapshot cache; pass an empty folder")
        (path / CACHE_MARK).touch()
