"""Copies snapshots to where fsspec can write: object stores, other file systems.

Stores lock nothing. A writer writes a file, its claim, and lists all claims: it has its turn if there is no other one,
and otherwise deletes its claim and tries again later. The claim is written again and again while the turn lasts. One
that does not change for a minute is that of a writer that has died.
"""

from __future__ import annotations

import contextlib
import functools
import random
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sglang_reshard import tasks
from sglang_reshard.errors import DeadlineExceeded, Mismatch, Unsupported
from sglang_reshard.extras.snapshots.folders import StoredFolder, entry_of, file_system, listed_or_found
from sglang_reshard.extras.snapshots.manifest import LIST, PATTERNS, Entry, SnapshotList, encode
from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)
_CLAIM = ".writer-"
_RENEW_S, _DEAD_S, _POLL_S = 10.0, 60.0, 0.5


class SnapshotStore(StoredFolder):
    """A URL below which each snapshot has a folder."""

    def __init__(self, url: str) -> None:
        """Raises Unsupported as `file_system` does, and for a URL that is a pattern: `_delete` would delete all that
        match it.
        """
        super().__init__(*file_system(url))
        if not PATTERNS.isdisjoint(self._root):
            raise Unsupported(
                f"snapshots cannot be uploaded to {url}: an object store's client reads a path with * ? [ ] as a "
                "pattern, and would delete snapshots of other folders; use a URL without them"
            )
        self._claim = f"{self._root}/{_CLAIM}{secrets.token_hex(8)}"

    @contextlib.contextmanager
    def turn(self, name: str, timeout_s: float) -> Iterator[None]:
        """Keeps other writers out within its block, to which the other trainer ranks belong.

        Raises DeadlineExceeded if another writer does not end within `timeout_s`, and Mismatch if a snapshot of this
        name is published.
        """
        self._files.makedirs(self._root, exist_ok=True)
        self._wait_for_turn(timeout_s)
        ended = threading.Event()
        renewing = tasks.start("upload", functools.partial(self._renew, ended))
        try:
            if name in listed_or_found(self).names:
                raise Mismatch(f"{self._root}/{name} already exists; give each snapshot its own name")
            yield
        finally:
            ended.set()
            renewing.result()
            self._forget(self._claim)

    def _wait_for_turn(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        seen: dict[str, tuple[bytes, float]] = {}  # the claims of others, and since when they have been the same
        while True:
            self._files.pipe_file(self._claim, secrets.token_bytes(8))
            others = self._claims()
            others.pop(self._claim, None)
            if not others:
                return
            self._forget(self._claim)
            now = time.monotonic()
            seen = {
                path: seen[path] if path in seen and seen[path][0] == content else (content, now)
                for path, content in others.items()
            }
            for path in [path for path, (_, since) in seen.items() if now - since > _DEAD_S]:
                logger.warning("the writer of %s has died; this one goes on", path)
                self._forget(path)
            if now > end:
                raise DeadlineExceeded(
                    f"another trainer has written to {self._root} for {timeout_s:.0f} s; find it by its claim, "
                    f"{next(iter(others))}, or use another URL"
                )
            time.sleep(_POLL_S * (0.5 + random.random()))

    def _claims(self) -> dict[str, bytes]:
        self._files.invalidate_cache()
        found = {}
        for path in self._files.ls(self._root, detail=False):
            if path.rstrip("/").rpartition("/")[2].startswith(_CLAIM):
                with contextlib.suppress(FileNotFoundError):  # its writer has ended
                    found[f"{self._root}/{path.rpartition('/')[2]}"] = self._files.cat_file(path)
        return found

    def _forget(self, claim: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(claim)

    def put(self, folder: Path, name: str, files: Iterable[str]) -> None:
        """Copies files of a snapshot's folder. Nobody reads them before `publish`."""
        self._files.makedirs(self.where(name), exist_ok=True)
        for file in files:
            self._files.put_file(str(folder / file), self.where(name, file))

    def publish(self, entry: Entry, keep: int | None) -> None:
        """Adds a snapshot to the list, once all its files are there, and deletes all but the newest `keep`.

        Folders that cannot be deleted stay in the list as unsettled, and the next snapshot deletes them.

        Raises Mismatch if this writer has lost its turn: it did not run for so long that others count it as dead.
        """
        if self._claim not in self._claims():
            raise Mismatch(
                f"{self._root}/{entry.name} is not published: this trainer did not write for {_DEAD_S:.0f} s, and "
                "another one has begun there; write it again under another name"
            )
        found = listed_or_found(self).with_newest(entry, keep)
        self._write(found)
        left = tuple(name for name in found.unsettled if not self._delete(name))
        if left != found.unsettled:
            self._write(SnapshotList.of(found.entries(), left))

    def _write(self, found: SnapshotList) -> None:
        self._files.pipe_file(self.where(LIST), encode(found))

    def _delete(self, name: str) -> bool:
        """Deletes a snapshot's folder; returns whether it is gone. Only snapshots are deleted, even if a list names
        other folders.
        """
        path = self.where(name)
        try:
            if entry_of(self, name) is not None:
                self._files.rm(path, recursive=True)
        except Exception as error:  # of any kind, by the store
            logger.warning("%s cannot be deleted: %s; the next snapshot tries again", path, error)
            return False
        return True

    def _renew(self, ended: threading.Event) -> None:
        """Changes the claim again and again, unless others have deleted it."""
        while not ended.wait(_RENEW_S):
            try:
                self._files.invalidate_cache()
                if self._files.exists(self._claim):
                    self._files.pipe_file(self._claim, secrets.token_bytes(8))
            except Exception as error:  # noqa: PERF203 (of any kind, by the store)
                logger.warning("%s cannot be renewed: %s", self._claim, error)
