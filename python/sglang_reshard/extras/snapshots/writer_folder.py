"""Trainer rank 0's part of a snapshot: claims its name, publishes and deletes snapshots.

A writer works in a folder that no other one uses, `.NAME.TOKEN`, and locks that folder until it ends. Others refuse a
name while its folder is locked. The kernel releases the lock of a writer that dies, and the next writer of that name
deletes the folder.

The list, `snapshots.json`, is replaced at once, and alone says what is published. A folder gets its name while the list
has it as unsettled, and loses it while the list has it as unsettled again. So whenever a writer dies, each snapshot in
the list is there, and each folder of a snapshot is in the list: published, or for the next writer to delete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from sglang_reshard.errors import DeadlineExceeded, Mismatch
from sglang_reshard.extras.snapshots.folders import LocalFolder, entry_of, listed, listed_or_found
from sglang_reshard.extras.snapshots.manifest import (
    DELTA,
    INDEX,
    LATEST,
    LIST,
    MANIFEST,
    WEIGHTS,
    Entry,
    Snapshot,
    SnapshotFile,
    SnapshotList,
    check_file_name,
    check_snapshot_name,
    encode,
    sha256_of,
)
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.publication import MOST_PUBLICATION, next_publication
from sglang_reshard.regular_files import FOLDER_FLAGS, is_folder, lock

logger = get_logger(__name__)
_POLL_S = 0.05
_TOKEN = re.compile("[0-9a-f]{7}")  # of a writer


class SnapshotFolder:
    """One snapshot on its way into a folder. Must be closed.

    partial  where it is written
    final    what `publish` makes of that
    """

    def __init__(self, folder: Path, name: str, timeout_s: float) -> None:
        """Raises Mismatch if there is a snapshot of that name already, if another writer is writing it, or if it is no
        name of a folder.

        Raises DeadlineExceeded if another writer holds the folder for longer than `timeout_s`.
        """
        check_snapshot_name(name)
        self._folder, self._name, self._timeout_s = folder, name, timeout_s
        self._reader = LocalFolder(folder)
        self.final, self.partial = folder / name, folder / f".{name}.{secrets.token_hex(4)[1:]}"
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as is_locked:
            for left in folder.glob(f".{LIST}.*partial") if is_locked else ():  # of a writer that died
                left.unlink()
            self._settle(self._found())
            self._check_free()
            if (written := self._delete_partials(name)) is not None:
                raise Mismatch(
                    f"another trainer is writing {self.final}, in {written}; give each snapshot its own name, or each "
                    "trainer its own folder"
                )
            self.partial.mkdir()
            self._lock = os.open(self.partial, FOLDER_FLAGS)
            lock(self._lock)

    def base(self) -> Entry | None:
        """Returns the newest snapshot, which the deltas of this one apply to; None if there is none."""
        return next(reversed(self._found().entries()), None)

    def publish(
        self,
        weights: Mapping[str, SnapshotFile],
        base: Entry | None,
        copy_from: Path | None,
        keep: int | None,
        publication: int,
    ) -> int:
        """Gives the folder its name, once everything is on disk, and deletes all but the newest `keep`.

        weights, base  of the manifest
        publication    of the snapshot, at least

        Returns the publication. When it raises, there is nothing of the snapshot; what fails once it is in the list is
        logged, and the next snapshot makes up for it.
        """
        files = self._described(weights, copy_from)
        for path in self.partial.iterdir():
            to_disk(path)
        with self._locked():
            before = self._settle(self._found())
            self._check_free()
            last = before.publications[-1] if before.publications else 0
            if last >= MOST_PUBLICATION:
                raise Mismatch(
                    f"{self._folder / LIST} has reached the last publication number, {last}; delete this file"
                )
            entry = Entry(self._name, publication if publication > last else next_publication(last))
            snapshot = Snapshot(self._name, files, entry.publication, *(base or ()))
            (self.partial / MANIFEST).write_bytes(encode(snapshot))
            to_disk(self.partial / MANIFEST)
            to_disk(self.partial)
            after = before.with_newest(entry, keep)
            try:
                self._write(SnapshotList.of(before.entries(), (*before.unsettled, self._name)))
                self._rename()
                to_disk(self._folder)
                self._write(after)
            except BaseException:
                found = listed(self._reader)  # Mismatch: then nothing is taken back, and the list is right either way
                if found is None or entry not in found.entries():
                    with self._later(f"the next snapshot will delete {self.final}"):
                        self._settle(self._found())
                    raise
                logger.warning(
                    "snapshot %s is published, but syncing it to disk failed; it may not survive a crash of the host",
                    self._name,
                    exc_info=True,
                )
            with self._later(f"{LATEST} is not updated until the next snapshot"):
                link = self._folder / f".{LATEST}"
                link.unlink(missing_ok=True)
                link.symlink_to(self._name)
                os.replace(link, self._folder / LATEST)
            with self._later(f"{LIST} is not updated until the next snapshot"):
                self._settle(after)
        return entry.publication

    def close(self) -> None:
        """Deletes what has not been published."""
        shutil.rmtree(self.partial, ignore_errors=True)
        _unlock(self._lock)

    def _described(self, weights: Mapping[str, SnapshotFile], copy_from: Path | None) -> dict[str, SnapshotFile]:
        """Copies the model's other files, and returns all of the snapshot's."""
        for source in sorted(copy_from.iterdir()) if copy_from is not None else ():
            own = (INDEX, MANIFEST, LIST)  # the model may be a snapshot itself
            if source.is_file() and not source.name.endswith((*WEIGHTS, DELTA)) and source.name not in own:
                check_file_name(source.name, str(copy_from))
                shutil.copyfile(source, self.partial / source.name)
        others = [p for p in self.partial.iterdir() if p.name.removesuffix(DELTA) not in weights]
        return {**weights, **{p.name: SnapshotFile(p.stat().st_size, sha256_of(p)) for p in others}}

    def _check_free(self) -> None:
        if os.path.lexists(self.final):
            raise Mismatch(f"{self.final} already exists; give each snapshot its own name")

    def _found(self) -> SnapshotList:
        """Returns the list, without what is gone. If it is missing or damaged, the manifests say what it should be.

        Raises Mismatch if it cannot be read now.
        """
        found = listed_or_found(self._reader)
        present = [entry for entry in found.entries() if is_folder(self._folder / entry.name)]
        return SnapshotList.of(present, found.unsettled)

    def _settle(self, found: SnapshotList) -> SnapshotList:
        """Deletes unsettled folders of others where possible. Returns the list without them."""
        settled = SnapshotList.of(found.entries(), [name for name in found.unsettled if not self._delete(name)])
        if settled != found:
            self._write(settled)
        return settled

    def _delete(self, name: str) -> bool:
        """Deletes a snapshot's folder, and returns whether it is gone.

        A folder that is not a snapshot belongs to someone else and stays, even if a list names it.
        """
        trash = self._folder / f".{name}.deleted"
        with self._later(f"the next snapshot will delete {self._folder / name}"):
            if os.path.lexists(trash):
                shutil.rmtree(trash)
            self._delete_partials(name)
            if entry_of(self._reader, name) is not None:
                os.rename(self._folder / name, trash)
                shutil.rmtree(trash)
            return True
        return False

    def _delete_partials(self, name: str) -> Path | None:
        """Deletes what writers of a snapshot have left that died. Returns the folder of one that is alive, if any.

        On a file system that does not lock folders, nobody can tell the two apart: all of them stay.
        """
        for path in self._folder.glob(f".{name}.*"):
            if not _TOKEN.fullmatch(path.name.removeprefix(f".{name}.")) or not is_folder(path):
                continue
            descriptor = os.open(path, FOLDER_FLAGS)
            try:
                if (is_free := lock(descriptor)) is False:
                    return path
                if is_free:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                _unlock(descriptor)
        return None

    def _rename(self) -> None:
        try:
            os.rename(self.partial, self.final)
        except OSError:
            self._check_free()  # where nobody can lock, another writer may have been first
            raise

    def _write(self, found: SnapshotList) -> None:
        write_atomically(self._folder / LIST, encode(found))

    @contextlib.contextmanager
    def _later(self, consequence: str) -> Iterator[None]:
        """In its block the file system may fail: the error is logged, and the code after the block continues."""
        try:
            yield
        except (OSError, Mismatch) as error:
            logger.warning("%s; %s", error, consequence)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Keeps other writers out of the list. Yields False on file systems that do not lock folders."""
        descriptor = os.open(self._folder, FOLDER_FLAGS & ~os.O_NOFOLLOW)
        deadline = time.monotonic() + self._timeout_s
        try:
            while (is_locked := lock(descriptor)) is False:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"another writer has held {self._folder} for {self._timeout_s:.0f} s; find the other trainer "
                        "that writes there, or use another folder"
                    )
                time.sleep(_POLL_S)
            yield bool(is_locked)
        finally:
            _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # where it is not locked; a child that was forked would keep the lock
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file atomically, and syncs it and its folder to disk."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")  # others may be replacing it, too
    try:
        with open(partial, "xb") as opened:
            opened.write(data)
        to_disk(partial)
        os.replace(partial, path)
        to_disk(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
