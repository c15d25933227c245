"""Chooses the strategy of an update: the requested route; with `auto`, engine ranks read all memory they can and
receive the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_reshard.errors import Unsupported
from sglang_reshard.plan import ClusterTopology, RankDemand, TensorIndex
from sglang_reshard.protocol.validation import check_transport
from sglang_reshard.routes import route_module
from sglang_reshard.routes.strategy import Strategy, demanded_bytes, first_unread


def choose_strategy(
    transport: str,
    index: TensorIndex,
    demands: Sequence[RankDemand],
    topology: ClusterTopology,
    bucket_bytes: int,
) -> Strategy:
    """Chooses the strategy for engine ranks with these demands; every rank that calls it gets the same.

    Raises Mismatch for an unknown transport, and Unsupported, naming ranks and hosts, for an infeasible one.
    """
    check_transport(transport, of_request=True)
    if transport == "auto":
        return _read_or_send(index, demands, topology, bucket_bytes)
    strategy: Strategy = route_module(transport).plan(index, demands, topology, bucket_bytes)
    return strategy


def _read_or_send(
    index: TensorIndex, demands: Sequence[RankDemand], topology: ClusterTopology, bucket_bytes: int
) -> Strategy:
    """Returns what `auto` chooses: engine ranks read all memory they can, and trainer ranks send the rest.

    Where NCCL would not connect the ranks for that, weights are broadcast, if that can be done.
    """
    read, unread = demanded_bytes(demands, topology)
    if not unread.any():
        return Strategy("ipc", "auto: engine ranks read memory of their own hosts", unread)
    why = first_unread(unread, topology)
    name, reads = ("ipc+p2p", "what they can") if read.any() else ("p2p", "nothing")
    try:
        reason = f"auto: engine ranks read {reads}; {why}"
        strategy: Strategy = route_module("p2p").send(name, reason, unread, topology, bucket_bytes)
        return strategy
    except Unsupported as refusal:
        unsent = refusal
    try:
        reason = f"auto: not {name}: {unsent.problem}"
        strategy = route_module("broadcast").plan(index, demands, topology, bucket_bytes, reason)
        return strategy
    except Unsupported:
        raise Unsupported(f"{why}. Nor can weights be sent: {unsent.problem}", cure=unsent.cure) from None
