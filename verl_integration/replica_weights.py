"""Lets replicas take the live weights of others: new ones, and those that a sync has left out."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from sglang_reshard.errors import ReshardError
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.server_client import ServerClient
from sglang_reshard.protocol.weights_info import WeightsInfo

logger = get_logger(__name__)


def pull_weights(known: Sequence[str], new: Sequence[str]) -> None:
    """Lets the servers `new` take the weights of the first of the servers `known` that has been updated. URLs.

    Raises nothing: one that cannot take them logs a warning, and gets the next sync's like all others.
    """
    source, live = _first_updated(known)
    if live is None or not new:
        return
    with ThreadPoolExecutor(len(new), "sglang-reshard pull") as threads:
        for url, why in zip(new, threads.map(lambda url: _pull(source, live, url), new), strict=True):
            if why:
                logger.warning("the new replica at %s serves its initial weights until the next sync: %s", url, why)
            else:
                logger.info("the new replica at %s got the weights of %s, version %s", url, source, live.version)


class LeftOut:
    """The replicas that syncs leave out, on trainer rank 0. After each sync they are asked to take its weights.

    A replica that has taken them takes part in the next sync.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._thread: threading.Thread | None = None

    @property
    def replicas(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._names)

    def sync_ended(self, urls: Mapping[str, str], failed: Collection[str]) -> None:
        """Excludes replicas that failed, and starts a thread that lets excluded replicas pull from another one.

        urls    of the servers of all replicas, those that are left out included
        failed  replicas that have not got this sync's weights
        """
        with self._lock:
            left_out = {name: url for name, url in urls.items() if name in self._names or name in failed}
            self._names = set(left_out)
        good = sorted(url for name, url in urls.items() if name not in left_out)
        if left_out and good and (self._thread is None or not self._thread.is_alive()):
            arguments = left_out, good
            self._thread = threading.Thread(target=self._heal, args=arguments, name="sglang-reshard heal", daemon=True)
            self._thread.start()

    def _heal(self, left_out: Mapping[str, str], good: Sequence[str]) -> None:
        source, live = _first_updated(good)
        if live is None:
            return
        for name, url in left_out.items():
            if why := _pull(source, live, url):
                logger.warning("replica %s is still excluded: %s", name, why)
                continue
            logger.warning("replica %s is included again: it has the weights of version %s", name, live.version)
            with self._lock:
                self._names.discard(name)


def _first_updated(urls: Sequence[str]) -> tuple[str, WeightsInfo | None]:
    """Returns the URL of the first of these servers that has been updated, and its `WeightsInfo`; None if none has."""
    for url in urls:
        try:
            live = ServerClient(url).weights_info()
        except ReshardError as error:
            logger.warning("%s cannot give its weights to other replicas: %s", url, error)
            continue
        if live.engine_ranks and not live.torn:
            return url, live
    return "", None


def _has_weights_of(own: WeightsInfo, live: WeightsInfo) -> bool:
    """Returns whether two servers have the same weights. Equal versions are names, and tell nothing of the weights."""
    if not own.engine_ranks or own.torn:
        return False
    same_update = live.session != "" and (own.session, own.update) == (live.session, live.update)
    return same_update or (live.digest != "" and (own.version, own.digest) == (live.version, live.digest))


def _pull(source: str, live: WeightsInfo, url: str) -> str:
    """Returns why the server at `url` has not got the weights of the one at `source`; empty if it has."""
    try:
        server = ServerClient(url)
        if _has_weights_of(server.weights_info(), live):
            return ""  # it was removed, and has come back
        output = server.pull_weights(source)
        return "" if output.success else output.message
    except ReshardError as error:
        return str(error)
