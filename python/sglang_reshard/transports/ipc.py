"""On one host: every engine rank reads exactly the boxes that it lacks out of trainer memory, mapped by handle.

One copy, from the trainer's shard to the live parameter; no buffer, no collective, no group.
"""

from __future__ import annotations

from sglang_reshard.transports.base import TransportContext
from sglang_reshard.transports.direct_read import DirectRead


class IpcTransport:
    """See the module's text. Takes all rows whose trainer rank sends nothing."""

    extra_bytes = 0

    def __init__(self, here: TransportContext) -> None:
        rows = (row for t in here.intake.links() if t not in here.shares for row in here.intake.rows(t))
        self._pull = DirectRead(here, rows)
        self.read_bytes = self._pull.read_bytes
        self.received_bytes = sum(self.read_bytes.values())

    def move(self) -> None:
        self._pull.run()
