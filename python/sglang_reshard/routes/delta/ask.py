"""Defines what an engine asks of the trainer ranks that may send it deltas."""

from __future__ import annotations

import msgspec

from sglang_reshard.routes.p2p.ask import Links


class DeltaAsk(msgspec.Struct, frozen=True):
    """Asks trainer ranks to keep the weights they have sent, on top of another route.

    links  of the kept weights
    inner  name of the other route
    asked  the request of that route
    """

    links: Links
    inner: str
    asked: msgspec.Raw
