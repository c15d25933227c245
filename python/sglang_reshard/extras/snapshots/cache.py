"""Keeps a copy of the newest snapshot on this host, and makes the next one of it by deltas where these lead there.

    cache/
      .sglang-reshard-cache     one follower holds a lock on it
      copy-5f0c1a2b3d4e5f60/    a snapshot's files, and its manifest, which says what it is a copy of

A copy is never changed: each gets a folder of a new name, so that a server may read one at any time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.extras.snapshots.delta_file import apply_delta
from sglang_reshard.extras.snapshots.folders import Folder, LocalFolder, manifest
from sglang_reshard.extras.snapshots.manifest import (
    CACHE_MARK,
    DELTA,
    MANIFEST,
    PART_BYTES,
    SAFETENSORS,
    Entry,
    Snapshot,
    check_kinds,
    check_size,
    encode,
    note_tensors,
    read_table,
    sha256_of,
)
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.regular_files import is_folder, lock

logger = get_logger(__name__)
_LONGEST_CHAIN = 64  # of deltas, one after the other
_MARK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o666  # less the umask
_COPY = "copy-"  # begins the names of copies


class _Copy(NamedTuple):
    path: Path
    snapshot: Snapshot


class Cache:
    """A folder of this host that only one follower writes: the one that made this object first.

    path        of the folder, absolute
    read_bytes  of weights that were read from snapshots, since the owner last set it to 0
    """

    def __init__(self, path: Path) -> None:
        """Raises Mismatch for a folder that has files of others or another follower uses, and ReshardError for one that
        cannot be made.
        """
        self.path = Path(os.path.abspath(path))
        try:
            weakref.finalize(self, os.close, _claim(self.path))  # for another follower
        except OSError as error:
            raise ReshardError(f"{path} cannot be a cache: {error}") from error
        self._copies = LocalFolder(self.path)
        self.read_bytes = 0

    def bring(self, folder: Folder, newest: Snapshot, entries: Sequence[Entry]) -> Path:
        """Returns a copy of a snapshot, one of the `entries` that `folder` lists.

        Raises Mismatch, naming a file, for a snapshot that is damaged, and ReshardError where it finds no room here.
        """
        check_kinds(newest, lambda name: folder.where(newest.name, name))
        try:
            present = self._found()
            if present is not None and present.snapshot == newest:
                with contextlib.suppress(Mismatch):
                    self._check(newest, folder, present.path)
                    return present.path
                self._clear(keep=None)
            elif present is not None:
                try:
                    if chain := self._chain(folder, present.snapshot, newest, entries):
                        step = functools.partial(self._advance, folder, chain, present.path)
                        return self._copied(newest, folder, step)
                except Mismatch as error:
                    logger.warning("%s; snapshot %s is read whole", error, newest.name)
            self._check_sizes(folder, newest)
            return self._copied(newest, folder, functools.partial(self._read_whole, folder, newest))
        except OSError as error:
            raise ReshardError(f"snapshot {newest.name} cannot be stored in the cache {self.path}: {error}") from error

    def _found(self) -> _Copy | None:
        """Returns the newest copy, and deletes all other files. None if there is none."""
        known: list[_Copy] = []
        for name in self._copies.names():
            if name.startswith(_COPY):
                with contextlib.suppress(Mismatch):
                    known.append(_Copy(self.path / name, manifest(self._copies, name)))
        newest = max(known, key=lambda copy: copy.snapshot.publication, default=None)
        self._clear(keep=None if newest is None else newest.path)
        return newest

    def _clear(self, keep: Path | None) -> None:
        """Deletes all copies and files but one copy, and this package's own mark. A server that reads one has it open.

        Folders of a user stay.
        """
        for path in self.path.iterdir():
            if path.name == CACHE_MARK or path == keep:
                continue
            if not is_folder(path):
                path.unlink()
            elif path.name.startswith((_COPY, ".unfinished-")):  # in earlier releases, of incomplete ones
                shutil.rmtree(path)

    def _copied(self, snapshot: Snapshot, folder: Folder, write: Callable[[str, Path], None]) -> Path:
        """Returns a new copy, which is one once it has its manifest. `write` makes a file of a name in a folder.

        Raises Mismatch, naming a file of `folder`, if the copy is damaged.
        """
        copy = self.path / f"{_COPY}{secrets.token_hex(8)}"
        copy.mkdir()
        try:
            for name in snapshot.files:
                write(name, copy)
            self._check(snapshot, folder, copy)
            (copy / MANIFEST).write_bytes(encode(snapshot))
            return copy
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise

    def _chain(
        self, folder: Folder, present: Snapshot, newest: Snapshot, entries: Sequence[Entry]
    ) -> list[Snapshot] | None:
        """Returns the snapshots after the present one, in order; None if deltas do not lead from it to the newest.

        Raises Mismatch for one of them that is damaged.
        """
        chain = [newest]
        while (base := chain[-1].base_entry) != present.entry:
            if base is None or base not in entries or len(chain) == _LONGEST_CHAIN:
                return None
            chain.append(manifest(folder, base.name, base))
        whole = sum(file.nbytes for file in newest.files.values())
        needed = sum(f.nbytes if f.delta_bytes is None else f.delta_bytes for s in chain for f in s.files.values())
        return chain[::-1] if needed < whole else None

    def _advance(self, folder: Folder, chain: Sequence[Snapshot], base: Path, name: str, copy: Path) -> None:
        """Makes one file of `copy`, from the copy `base`: of its last whole version, by the deltas since."""
        steps = [step for step in chain if name in step.files]
        whole = max((n for n, step in enumerate(steps) if step.files[name].delta_bytes is None), default=-1)
        if whole >= 0:
            self._read_whole(folder, steps[whole], name, copy)
        else:
            with self._copies.open(base.name, name) as (opened, nbytes):
                self._write(copy / name, opened, nbytes)
        for step in steps[whole + 1 :]:
            of = step.files[name]
            with folder.open(step.name, name + DELTA) as (delta, nbytes):
                if nbytes != of.delta_bytes:
                    raise Mismatch(f"{folder.where(step.name, name + DELTA)} has {nbytes} bytes")
                apply_delta(delta, copy / name)
            self.read_bytes += nbytes

    def _read_whole(self, folder: Folder, snapshot: Snapshot, name: str, copy: Path) -> None:
        with folder.open(snapshot.name, name) as (source, nbytes):
            check_size(nbytes, snapshot.files[name], folder.where(snapshot.name, name))
            self._write(copy / name, source, nbytes)
        self.read_bytes += nbytes

    def _write(self, path: Path, source: BinaryIO, nbytes: int) -> None:
        """Copies exactly this number of bytes, even if a store reports another size."""

        def here(call: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return call(*arguments)
            except OSError as error:  # of this host, and no failure to read the snapshot
                raise ReshardError(f"{path} cannot be written: {error}") from error

        with here(open, path, "xb") as copy:
            while nbytes and (part := source.read(min(nbytes, PART_BYTES))):
                here(copy.write, part)
                nbytes -= len(part)

    def _check(self, snapshot: Snapshot, folder: Folder, copy: Path) -> None:
        """Raises Mismatch, naming a file of the snapshot, unless the copy is that snapshot, and can be read."""
        files, of_tensor = LocalFolder(copy), dict[str, str]()
        for name, file in snapshot.files.items():
            where = folder.where(snapshot.name, name)
            with files.open("", name) as (opened, nbytes):
                check_size(nbytes, file, where)
                if name.endswith(SAFETENSORS):
                    note_tensors(of_tensor, read_table(opened, nbytes, where), name, where)
                if sha256_of(copy / name) != file.sha256:
                    raise Mismatch(
                        f"{where} does not have the SHA-256 that the manifest of snapshot {snapshot.name} lists"
                    )

    def _check_sizes(self, folder: Folder, snapshot: Snapshot) -> None:
        """Raises before a copy is begun, for files of other sizes than the manifest says, and without room here."""
        for name, file in snapshot.files.items():
            with folder.open(snapshot.name, name) as (_, nbytes):
                check_size(nbytes, file, folder.where(snapshot.name, name))
        needed = sum(file.nbytes for file in snapshot.files.values())
        if needed > shutil.disk_usage(self.path).free:
            self._clear(keep=None)
        if needed > (free := shutil.disk_usage(self.path).free):
            raise ReshardError(
                f"{self.path} has {free} bytes free, but snapshot {snapshot.name} needs {needed}; free space, or use "
                "another cache folder"
            )


def _claim(path: Path) -> int:
    """Makes a folder a cache; other files in it are deleted later. Returns a descriptor that holds it.

    Raises Mismatch if it has files of others, or another follower holds it.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not (path / CACHE_MARK).exists() and any(path.iterdir()):
        raise Mismatch(f"{path} holds files that do not belong to a snapshot cache; pass an empty folder")
    mark = os.open(path / CACHE_MARK, _MARK, _MODE)
    is_free = lock(mark)
    if is_free is False:
        os.close(mark)
        raise Mismatch(f"another follower uses the cache {path}; give each follower its own folder")
    if is_free is None:
        logger.warning("%s cannot be locked; make sure that no other follower uses it", path)
    return mark
