"""Reads a folder of snapshots that anybody may have written: on this host, or in a store that fsspec reads.

Names are checked before they are used. On this host nothing is followed out of the folder: every file is opened below
its snapshot's folder, is no link, and is a regular file. All that goes wrong is a Mismatch that names the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.extras.snapshots.manifest import (
    LIST,
    LIST_BYTES,
    MANIFEST,
    MANIFEST_BYTES,
    Entry,
    Snapshot,
    SnapshotList,
    decode_list,
    decode_snapshot,
    is_snapshot_name,
)
from sglang_reshard.nearest import nearest
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.regular_files import FOLDER_FLAGS, open_regular

logger = get_logger(__name__)


class Folder(Protocol):
    """A folder of snapshots, for reading."""

    def where(self, *names: str) -> str:
        """Returns what errors call a file."""

    def open(self, name: str, file: str) -> contextlib.AbstractContextManager[tuple[BinaryIO, int]]:
        """Opens a file of the snapshot `name`, or of the folder if that is empty; with its bytes.

        Raises Mismatch if it is not a regular file of that folder, and in the block for an error while reading it.
        """

    def names(self) -> tuple[str, ...]:
        """Returns the names of all folders in it that could be those of snapshots, in any order."""


def listed(folder: Folder) -> SnapshotList | None:
    """Returns the list of a folder; None if it has none. Raises Mismatch for a list that is none."""
    try:
        data = _read(folder, "", LIST, LIST_BYTES)
    except MissingFile:
        return None
    return decode_list(data, folder.where(LIST))


def manifest(folder: Folder, name: str, entry: Entry | None = None) -> Snapshot:
    """Returns the manifest in the folder `name`. Raises Mismatch if it is missing, or that of another than `entry`."""
    try:
        data = _read(folder, name, MANIFEST, MANIFEST_BYTES)
    except MissingFile as error:  # clients are told errors by class, and this class is not theirs
        raise Mismatch(str(error)) from None
    return decode_snapshot(data, folder.where(name, MANIFEST), entry)


def entry_of(folder: Folder, name: str) -> Entry | None:
    """Returns the snapshot in the folder of that name; None if that is no snapshot's.

    Raises UnreadableFile if nobody can tell now.
    """
    try:
        found = manifest(folder, name).entry
    except UnreadableFile:
        raise
    except Mismatch:
        return None
    return found if found.name == name else None


def listed_or_found(folder: Folder) -> SnapshotList:
    """Returns the list of a folder; if it is missing or damaged, the list according to the valid manifests.

    Raises UnreadableFile if it cannot be read now.
    """
    try:
        if (found := listed(folder)) is not None:
            return found
    except UnreadableFile:
        raise
    except Mismatch as error:
        logger.warning("%s; it is rebuilt from the snapshots' manifests", error)
    entries = []
    for name in sorted(folder.names()):
        with contextlib.suppress(UnreadableFile):  # another's, perhaps
            entries.append(entry_of(folder, name))
    return SnapshotList.of({entry.publication: entry for entry in entries if entry is not None}.values())


def _read(folder: Folder, name: str, file: str, most_bytes: int) -> bytes:
    with folder.open(name, file) as (opened, _):
        return opened.read(most_bytes + 1)


class UnreadableFile(Mismatch):
    """A file, good or not, cannot be read now."""


class MissingFile(Mismatch):
    """There is no such file."""


class LocalFolder:
    """A folder of this host."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def where(self, *names: str) -> str:
        return str(self._root.joinpath(*names))

    @contextlib.contextmanager
    def open(self, name: str, file: str) -> Iterator[tuple[BinaryIO, int]]:
        where = self.where(name, file)
        with _told(where), contextlib.ExitStack() as stack:
            within = os.open(self._root, FOLDER_FLAGS & ~os.O_NOFOLLOW)  # what the user has named
            stack.callback(os.close, within)
            if name:
                within = os.open(name, FOLDER_FLAGS, dir_fd=within)
                stack.callback(os.close, within)
            opened, found = open_regular(within, file, where)
            with opened:
                yield opened, found.st_size

    def names(self) -> tuple[str, ...]:
        with _told(str(self._root)), os.scandir(self._root) as found:
            return tuple(e.name for e in found if e.is_dir(follow_symlinks=False) and is_snapshot_name(e.name))


class StoredFolder:
    """A URL that fsspec reads. Its store has no links."""

    def __init__(self, files: Any, root: str) -> None:
        """`files`: fsspec's file system."""
        self._files, self._root = files, root

    def where(self, *names: str) -> str:
        return "/".join((self._root, *filter(None, names)))

    @contextlib.contextmanager
    def open(self, name: str, file: str) -> Iterator[tuple[BinaryIO, int]]:
        path = self.where(name, file)
        with _told(path):
            found = self._files.info(path)
            if found.get("type") != "file":
                raise Mismatch(f"{path} is not a file")
            with self._files.open(path, "rb") as opened:
                yield opened, int(found["size"])

    def names(self) -> tuple[str, ...]:
        with _told(self._root):
            found = [entry["name"].rstrip("/").rpartition("/")[2] for entry in self._files.ls(self._root, detail=True)]
            return tuple(name for name in found if is_snapshot_name(name))


def folder_of(url: str | Path) -> Folder:
    """Returns the folder at a path or URL. Raises Unsupported as `file_system` does."""
    files, root = file_system(url)
    protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
    return LocalFolder(root) if "file" in protocols else StoredFolder(files, root)


def file_system(url: str | Path) -> tuple[Any, str]:
    """Returns fsspec's file system of a path or URL, and the path there.

    Raises Unsupported for a URL that fsspec does not know here, and for one whose end it would drop.
    """
    import fsspec

    given = str(url)
    if "://" not in given:  # fsspec would cut the name of a folder at "::"
        return fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(given))
    if "://" not in given.rpartition("::")[2]:
        raise Unsupported(
            f"{given} has a name with '::', which fsspec reads as a chain of URLs; use a name without it, or pass a "
            "local folder as a plain path"
        )
    try:
        files, root = fsspec.core.url_to_fs(given)
    except ImportError as error:  # of the package that reads such URLs
        raise Unsupported(f"{given} cannot be read: {error}. Install that package with pip on this host") from error
    except ValueError as error:
        known = fsspec.available_protocols()
        raise Unsupported(f"{given} cannot be read: {error}{nearest(given.partition('://')[0], known)}") from error
    return files, root


@contextlib.contextmanager
def _told(where: str) -> Iterator[None]:
    """Raises MissingFile and UnreadableFile in place of other errors of a read; stores raise all kinds of errors."""
    try:
        yield
    except ReshardError:
        raise
    except FileNotFoundError as error:
        raise MissingFile(f"{where} is missing") from error
    except Exception as error:
        raise UnreadableFile(f"{where} cannot be read: {type(error).__name__}: {error}") from error
