"""The rows of the table of trainers.

record_property("trainer", shown("FSDP1, FULL_SHARD", "the module", "ipc", "run", ratio))
"""

from __future__ import annotations

from typing import Any


def shown(trainer: str, way: str, transport: str, state: str, ratio: float | None = None) -> dict[str, Any]:
    """A row.

    trainer    and its sharding
    way        what is passed to `update`
    transport  as asked for
    state      "run": its own library trained, and engine ranks' live weights were compared; "read": its shards were,
               put together; "refused"
    ratio      bytes received divided by the least, of all updates the largest
    """
    return {"trainer": trainer, "way": way, "transport": transport, "state": state, "ratio": ratio}
