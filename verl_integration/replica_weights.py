"""Lets replicas take the live weights of others, from verl's driver."""

from __future__ import annotations

from collections.abc import Sequence
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
    if live is not None and new:
        with ThreadPoolExecutor(len(new), "sglang-reshard pull") as threads:
            list(threads.map(lambda url: _pull(source, live, url), new))


def _first_updated(urls: Sequence[str]) -> tuple[str, WeightsInfo | None]:
    for url in urls:
        try:
            live = ServerClient(url).weights_info()
        except ReshardError as error:
            logger.warning("%s has no weights for new replicas: %s", url, error)
            continue
        if live.engine_ranks and not live.torn:
            return url, live
    return "", None


def _pull(source: str, live: WeightsInfo, url: str) -> None:
    try:
        server = ServerClient(url)
        own = server.weights_info()
        if own.engine_ranks and (own.version, own.digest) == (live.version, live.digest):
            return  # it was removed, and has come back
        output = server.pull_weights(source)
        message = "" if output.success else output.message
    except ReshardError as error:
        message = str(error)
    if message:
        logger.warning(
            "the new replica at %s serves the weights it was started with until the next sync: %s", url, message
        )
    else:
        logger.info("the new replica at %s has the weights of %s, version %s", url, source, live.version)
