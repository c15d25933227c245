"""`sglang-reshard pull`: lets one server take the live weights of another."""

from __future__ import annotations

import time
from typing import Any

from sglang_reshard.errors import EngineRefused, TornWeights
from sglang_reshard.observability.report import summary
from sglang_reshard.protocol.server_client import ServerClient


def run(giver: ServerClient, taker: ServerClient, timeout_s: float, options: dict[str, Any]) -> str:
    """Returns a line that says what `taker` has now. Raises a ReshardError if it has no new weights."""
    live = giver.check()  # what is wrong with either is told here: the taker passes on nothing of the giver's answer
    taker.check()
    if live.torn:
        raise TornWeights(f"the weights of {giver.url} are torn: {live.torn}")
    if not live.engine_ranks:
        raise EngineRefused(
            f"the weights of {giver.url} were not brought by an update of sglang-reshard; update it first, or start "
            "the other server from the same checkpoint"
        )
    started = time.perf_counter()
    output = taker.pull_weights(
        giver.url, api_key=giver.api_key, admin_api_key=giver.admin_api_key, timeout_s=timeout_s, **options
    )
    if not output.success:
        kind = TornWeights if output.torn else EngineRefused
        raise kind(output.message)
    info = taker.weights_info()
    seconds = time.perf_counter() - started
    digest = f", digest {info.digest}" if info.digest else ""
    return f"{taker.url}: {summary(output.ranks, output.transport, info.version, seconds)}{digest}"
