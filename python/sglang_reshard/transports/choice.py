"""Which transports there are, and which one an update gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_reshard.errors import Mismatch
from sglang_reshard.plan import Needs, Pieces, Plan, make_plan, pull_plan
from sglang_reshard.transports.base import Here, Transport
from sglang_reshard.transports.broadcast import BroadcastTransport
from sglang_reshard.transports.ipc import IpcTransport


@dataclass(frozen=True, slots=True)
class Kind:
    """A transport's planner, which all ranks run alike, and the transport itself, which each builds for its part."""

    name: str
    plan: Callable[[Pieces, Sequence[Needs], Sequence[str], int], Plan]
    build: Callable[[Here], Transport]


_KINDS = {
    "broadcast": Kind("broadcast", make_plan, BroadcastTransport),
    "ipc": Kind("ipc", pull_plan, IpcTransport),
}


def chosen(asked: str) -> tuple[Kind, str]:
    """The transport for what was asked, and why it; raises Mismatch for one that does not exist."""
    if asked == "auto":
        return _KINDS["broadcast"], "auto: the one that needs no engine rank on the host of every shard it lacks"
    if asked not in _KINDS:
        raise Mismatch(f"transport {asked!r} is not one of: auto, {', '.join(_KINDS)}")
    return _KINDS[asked], "asked for"
