"""Copies snapshots to where fsspec can write: object stores, other file systems."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sglang_reshard.snapshots.manifest import LIST, SnapshotList, decode, encode


class SnapshotStore:
    """A URL below which each snapshot has a folder."""

    def __init__(self, url: str) -> None:
        """Raises ImportError or ValueError for a URL that fsspec does not know here."""
        import fsspec

        self._files, self._root = fsspec.core.url_to_fs(url)

    def put(self, folder: Path, name: str, files: Iterable[str]) -> None:
        """Copies files of a snapshot's folder. Nobody reads them before `publish`."""
        self._files.makedirs(f"{self._root}/{name}", exist_ok=True)
        for file in files:
            self._files.put_file(str(folder / file), f"{self._root}/{name}/{file}")

    def publish(self, name: str, keep: int | None) -> None:
        """Makes a snapshot the newest, once all its files are there, and deletes all but the newest `keep`."""
        path = f"{self._root}/{LIST}"
        names: tuple[str, ...] = ()
        if self._files.exists(path):
            names = decode(self._files.cat_file(path), SnapshotList, path).names
        names = (*(other for other in names if other != name), name)
        kept = names if keep is None else names[-keep:]
        self._files.pipe_file(path, encode(SnapshotList(kept)))
        for old in names[: -len(kept)]:
            self._files.rm(f"{self._root}/{old}", recursive=True)
