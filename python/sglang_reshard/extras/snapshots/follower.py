"""Reads the newest snapshot of a folder or an object store, and lets a server load it. Trainer and server never meet.

    follower = SnapshotFollower("s3://bucket/run-1", engine, cache=Path("/local/run-1"))
    while True:
        follower.poll()
        time.sleep(5)

The server loads a snapshot as any update: its engine ranks read their parts of the files, and compare them with the
manifest before they write. With a cache the follower keeps a copy of the snapshot on this host, and reads only changed
elements as long as there are deltas from its copy.

The folder is not trusted. A bad snapshot is logged once and skipped in favor of the newest good one. A server never
goes back to an earlier publication than it holds, unless that is allowed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglang_reshard.errors import (
    EngineRefused,
    EngineUnreachable,
    Mismatch,
    ReshardError,
    TornWeights,
    Unsupported,
)
from sglang_reshard.extras.snapshots.cache import Cache
from sglang_reshard.extras.snapshots.folders import LocalFolder, folder_of, listed, manifest
from sglang_reshard.extras.snapshots.manifest import LIST, Entry
from sglang_reshard.nearest import check_names
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import LoadGiven

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sglang_reshard.api.remote_engine import RemoteEngine
    from sglang_reshard.protocol.weights_info import WeightsInfo

logger = get_logger(__name__)
_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0  # before a snapshot that is no good is read again


class _Refused(NamedTuple):
    """A snapshot that is no good. again_at: by the monotonic clock"""

    error: Exception
    pause_s: float
    again_at: float


class SnapshotFollower:
    """Keeps one server at the newest good snapshot of a folder.

    loaded_bytes  that the server has loaded in the last `poll`, out of the cache or the folder
    listed        the number of snapshots that the folder listed at the last `poll`
    """

    def __init__(
        self,
        folder: str | Path,
        engine: RemoteEngine,
        cache: Path | None = None,
        *,
        allow_rollback: bool = False,
        **options: Unpack[LoadGiven],
    ) -> None:
        """`folder`: a path, or a URL that fsspec knows. The server must see `cache`; without one, the folder itself.

        allow_rollback  give the server the newest snapshot of the folder also if it holds later weights
        options         of each load: `staged`, `ignore` and others, see `RemoteEngine.load_snapshot`

        Raises Unsupported for a URL without a cache, Mismatch for a cache that has files of others or that another
        follower uses, and TypeError for an option that does not exist.
        """
        check_names("a load", options, tuple(LoadGiven.__annotations__))
        self._folder, self._options = folder_of(folder), options
        if cache is None and not isinstance(self._folder, LocalFolder):
            raise Unsupported(f"a server cannot load weights from {folder}; pass a cache")
        self._engine, self._cache = engine, None if cache is None else Cache(cache)
        self._allow_rollback = allow_rollback
        self._refused: dict[Entry, _Refused] = {}
        self._told = ""  # what was told last of the weights that the server holds
        self.loaded_bytes = self.listed = 0

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that the last `poll` has read from the folder, into the cache or by the server."""
        return self.loaded_bytes if self._cache is None else self._cache.read_bytes

    @property
    def folder_exists(self) -> bool:
        """True if the folder exists on this host, and for every object store."""
        return not isinstance(self._folder, LocalFolder) or Path(self._folder.where()).is_dir()

    @property
    def refused(self) -> Mapping[str, Exception]:
        """Bad snapshots: name -> fault; `snapshots.json` if the list itself is bad."""
        return {entry.name: refused.error for entry, refused in self._refused.items()}

    def poll(self) -> str | None:
        """Gives the server the newest good snapshot, unless it has it or holds later weights.

        Returns the snapshot's name, which becomes the server's weight_version, or None if there was nothing to do. The
        fault of a snapshot is logged once and kept in `refused`; the snapshot is read again at growing intervals.
        Raises the server's errors if it does not answer or does not accept the keys, and TornWeights if its weights are
        torn and no snapshot makes them good.
        """
        self.loaded_bytes = 0
        if self._cache is not None:
            self._cache.read_bytes = 0
        try:
            found = listed(self._folder)
            entries = () if found is None else found.entries()
            self.listed = len(entries)
        except Mismatch as error:
            self._refuse(Entry(LIST, 0), error)
            return None
        self._refused = {entry: refused for entry, refused in self._refused.items() if entry in entries}
        torn: TornWeights | None = None
        for entry in self._wanted(entries, self._engine.weights_info()) if entries else ():
            refused = self._refused.get(entry)
            if refused is not None and time.monotonic() < refused.again_at:
                continue
            try:
                path = self._prepared(entry, entries)
            except ReshardError as error:
                self._refuse(entry, error)
                continue
            try:
                loaded = self._engine.load_snapshot(
                    str(path), entry.name, entry.publication, allow_rollback=self._allow_rollback, **self._options
                )
            except EngineUnreachable:
                raise
            except (EngineRefused, TornWeights) as error:
                self._refuse(entry, error)
                torn = error if isinstance(error, TornWeights) else torn  # an earlier snapshot may make it good
                continue
            self._refused.pop(entry, None)
            if not loaded.success:  # the server has got later weights meanwhile
                self._tell(loaded.message)
                return None
            self.loaded_bytes = loaded.read_bytes
            logger.info("%s now serves snapshot %s; %d bytes were read", self._engine.url, entry.name, self.read_bytes)
            return entry.name
        if torn is not None:
            raise torn
        return None

    def _wanted(self, entries: Sequence[Entry], info: WeightsInfo) -> Iterator[Entry]:
        """Yields the snapshots that the server should have, the best one first."""
        held = info.publication
        for entry in reversed(entries):
            # A weight_version alone tells nothing: the first one is "default" on every server, and the user, or an
            # update of an adapter, may have set it.
            is_live = entry == (info.version, held)
            if is_live and not info.torn:
                return
            later = held > entry.publication or (held == entry.publication and not info.torn)
            if later and not self._allow_rollback:
                if entry == entries[-1]:
                    self._tell(
                        f"{self._engine.url} holds version {info.version!r}, which is not older than snapshot "
                        f"{entry.name!r}, the newest in the folder. Pass allow_rollback (--allow-rollback) to load the "
                        "snapshot",
                    )
                return
            yield entry
            if is_live:
                return

    def _prepared(self, entry: Entry, entries: Sequence[Entry]) -> Path:
        """Returns the folder that the server is to load. Raises ReshardError, naming a file."""
        snapshot = manifest(self._folder, entry.name, entry)
        if self._cache is None:
            return Path(self._folder.where(entry.name))
        return self._cache.bring(self._folder, snapshot, entries)

    def _refuse(self, entry: Entry, error: ReshardError) -> None:
        before = self._refused.get(entry)
        if before is None or str(before.error) != str(error):
            logger.warning("snapshot %s is passed over: %s", entry.name, error)
        pause_s = _PAUSE_S if before is None else min(2 * before.pause_s, _LONGEST_PAUSE_S)
        self._refused[entry] = _Refused(error, pause_s, time.monotonic() + pause_s)

    def _tell(self, message: str) -> None:
        if self._told != message:
            logger.warning("%s", message)
        self._told = message
