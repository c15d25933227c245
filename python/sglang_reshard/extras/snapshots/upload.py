"""Copies snapshots to where fsspec can write: object stores, other file systems."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sglang_reshard.extras.snapshots.folders import StoredFolder, entry_of, listed_or_found
from sglang_reshard.extras.snapshots.manifest import LIST, Entry, SnapshotList, encode
from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)


class SnapshotStore:
    """A URL below which each snapshot has a folder. One trainer at a time writes there."""

    def __init__(self, url: str) -> None:
        """Raises ImportError or ValueError for a URL that fsspec does not know here."""
        import fsspec

        self._files, self._root = fsspec.core.url_to_fs(url)
        self._reader = StoredFolder(self._files, self._root)

    def put(self, folder: Path, name: str, files: Iterable[str]) -> None:
        """Copies files of a snapshot's folder. Nobody reads them before `publish`."""
        self._files.makedirs(f"{self._root}/{name}", exist_ok=True)
        for file in files:
            self._files.put_file(str(folder / file), f"{self._root}/{name}/{file}")

    def publish(self, entry: Entry, keep: int | None) -> None:
        """Adds a snapshot to the list, once all its files are there, and deletes all but the newest `keep`.

        Folders that cannot be deleted stay in the list as unsettled, and the next snapshot deletes them.
        """
        found = listed_or_found(self._reader).with_newest(entry, keep)
        self._write(found)
        left = tuple(name for name in found.unsettled if not self._delete(name))
        if left != found.unsettled:
            self._write(SnapshotList.of(found.entries(), left))

    def _write(self, found: SnapshotList) -> None:
        self._files.pipe_file(f"{self._root}/{LIST}", encode(found))

    def _delete(self, name: str) -> bool:
        """Deletes a snapshot's folder; returns whether it is gone. Only snapshots are deleted, even if a list names
        other folders.
        """
        path = f"{self._root}/{name}"
        try:
            if entry_of(self._reader, name) is not None:
                self._files.rm(path, recursive=True)
        except Exception as error:  # of any kind, by the store
            logger.warning("%s cannot be deleted: %s; the next snapshot tries again", path, error)
            return False
        return True
