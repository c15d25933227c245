"""Reads the newest snapshot of a folder or an object store, and lets a server load it. Trainer and server never meet.

    follower = SnapshotFollower("s3://bucket/run-1", engine, cache=Path("/local/run-1"))
    while True:
        follower.poll()
        time.sleep(5)

With a cache it keeps a copy of the checkpoint on this host, and reads what has changed only, as long as there are
deltas from the snapshot that it has. Every file is compared with its hash before the server hears of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.snapshots.delta_file import apply_delta
from sglang_reshard.snapshots.manifest import (
    DELTA,
    LIST,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Snapshot,
    SnapshotList,
    decode,
    encode,
    sha256_of,
    write_atomically,
)

if TYPE_CHECKING:
    from sglang_reshard.api.remote_engine import RemoteEngine

logger = get_logger(__name__)
_OURS = ".sglang-reshard-cache"  # in a folder whose other files may be deleted


class SnapshotFollower:
    """Keeps one server at the newest snapshot of a folder.

    read_bytes  that the last `poll` has read of weights, from the folder
    """

    def __init__(self, folder: str | Path, engine: RemoteEngine, cache: Path | None = None) -> None:
        """`folder`: a path, or a URL that fsspec knows. The server must see `cache`; without one, the folder itself.

        Raises Unsupported for a URL without a cache.
        """
        self._folder = _Folder(str(folder))
        if cache is None and not self._folder.is_local:
            raise Unsupported(f"{folder} is not a folder that a server can load weights from; pass a cache")
        self._engine, self._cache = engine, cache
        self.read_bytes = 0

    def poll(self) -> str | None:
        """Gives the server the newest snapshot, unless it has it; returns its name, or None if there was nothing to do.

        The name becomes the server's weight_version. Raises Mismatch for a snapshot that is damaged, and what the
        server raises.
        """
        self.read_bytes = 0
        names = self._folder.names()
        if not names or self._engine.weights_info().version == names[-1]:
            return None
        snapshot = self._folder.snapshot(names[-1])
        if self._cache is None:
            path = self._folder.path(snapshot.name)
            _check(path, snapshot)
        else:
            path = self._cached(self._cache, snapshot, names)
        # A server that was started on dummy weights has another format of its own.
        self._engine.update_weights_from_disk(str(path), weight_version=snapshot.name, load_format="auto")
        logger.info("%s has snapshot %s, %d bytes were read", self._engine.url, snapshot.name, self.read_bytes)
        return snapshot.name

    def _cached(self, cache: Path, newest: Snapshot, names: Sequence[str]) -> Path:
        """Brings the copy on this host to the newest of the snapshots with these names, and returns where it is."""
        _claim(cache)
        present = self._present(cache)
        chain = self._chain(present, newest, names) if present is not None else None
        (cache / MANIFEST).unlink(missing_ok=True)  # a copy that is half written is none
        if chain is not None:
            try:
                for step in chain:
                    self._advance(cache, step)
                _check(cache, newest)
            except Mismatch as error:
                logger.warning("%s; it is read whole", error)
                chain = None
        if chain is None:
            for name in newest.files:
                self._read_whole(cache, newest, name)
            _check(cache, newest)
        for path in cache.iterdir():
            if path.name not in newest.files and path.name != _OURS:
                path.unlink()
        write_atomically(cache / MANIFEST, encode(newest))
        return cache

    def _present(self, cache: Path) -> Snapshot | None:
        path = cache / MANIFEST
        return decode(path.read_bytes(), Snapshot, str(path)) if path.exists() else None

    def _chain(self, present: Snapshot, newest: Snapshot, names: Sequence[str]) -> Sequence[Snapshot] | None:
        """Returns the snapshots after the present one, in order; None if deltas do not lead from it to the newest."""
        chain, step = [newest], newest
        while step.base != present.name:
            if step.base not in names:
                return None
            step = self._folder.snapshot(step.base)
            chain.append(step)
        whole = sum(file.nbytes for file in newest.files.values())
        needed = sum(f.nbytes if f.delta_bytes is None else f.delta_bytes for s in chain for f in s.files.values())
        same = all(name in present.files for name in newest.files)
        return chain[::-1] if same and needed < whole else None

    def _advance(self, cache: Path, step: Snapshot) -> None:
        """Brings the copy from a snapshot's base to it."""
        for name, file in step.files.items():
            if file.delta_bytes is None:
                self._read_whole(cache, step, name)
                continue
            with self._folder.open(step.name, name + DELTA) as delta:
                apply_delta(delta, cache / name)
            self.read_bytes += file.delta_bytes

    def _read_whole(self, cache: Path, snapshot: Snapshot, name: str) -> None:
        with self._folder.open(snapshot.name, name) as source, open(cache / name, "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 24)
        self.read_bytes += snapshot.files[name].nbytes


class _Folder:
    """Where the snapshots are."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._files, self._root = fsspec.core.url_to_fs(url)
        protocols = self._files.protocol
        self.is_local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    def names(self) -> tuple[str, ...]:
        path = f"{self._root}/{LIST}"
        if not self._files.exists(path):
            return ()
        return decode(self._read(path), SnapshotList, path).names

    def snapshot(self, name: str) -> Snapshot:
        path = f"{self._root}/{name}/{MANIFEST}"
        return decode(self._read(path), Snapshot, path)

    def _read(self, path: str) -> bytes:
        """Returns a file of JSON. Raises Mismatch for one that has more bytes than any of ours."""
        with self._files.open(path, "rb") as opened:
            data: bytes = opened.read(MAX_MANIFEST_BYTES + 1)
        if len(data) > MAX_MANIFEST_BYTES:
            raise Mismatch(f"{path} has more than {MAX_MANIFEST_BYTES:,} bytes, and is not of a snapshot")
        return data

    def open(self, name: str, file: str) -> Any:
        return self._files.open(f"{self._root}/{name}/{file}", "rb")

    def path(self, name: str) -> Path:
        return Path(self._root, name)


def _claim(cache: Path) -> None:
    """Makes a folder a cache, in which other files are deleted. Raises Mismatch for one that has files of others."""
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / _OURS).exists():
        if any(cache.iterdir()):
            raise Mismatch(f"{cache} has files that are not of a cache of snapshots; pass an empty folder")
        (cache / _OURS).touch()


def _check(folder: Path, snapshot: Snapshot) -> None:
    """Raises Mismatch, naming a file, unless all are those of the snapshot."""
    for name, file in snapshot.files.items():
        path = folder / name
        if not path.exists() or path.stat().st_size != file.nbytes or sha256_of(path) != file.sha256:
            raise Mismatch(f"{path} is not the file of snapshot {snapshot.name}: its content has another hash")
